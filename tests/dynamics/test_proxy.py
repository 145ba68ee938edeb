"""The trained bag-of-words proxy, and logistic regression against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnlab.dynamics import BagOfWords, ProxyConfig, logistic_proxy, train_proxy


def texts(n: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Texts of 3 to 9 words of 11, labelled by whether word 1 is more frequent than word 2, with some noise."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 11, rng.integers(3, 10)).tolist() for _ in range(n)]
    labels = [int(row.count(1) + 0.3 * rng.standard_normal() > row.count(2)) for row in rows]
    return rows, labels


def test_the_proxy_is_the_softmax_of_a_mean() -> None:
    model = BagOfWords(7, 3, width=2)
    out = model(torch.tensor([4, 5, 6]), torch.tensor([0, 2]))
    mean = (model.embedding.weight[4] + model.embedding.weight[5]) / 2
    torch.testing.assert_close(out[0], model.output(mean))
    torch.testing.assert_close(out[1], model.output(model.embedding.weight[6]))


def test_the_proxy_learns_a_word_for_word_translation() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.choice(9, 3, replace=False).tolist() for _ in range(300)]
    pairs = (rows, [[word + 1 for word in row] for row in rows])
    proxy = train_proxy(pairs, pairs, words=9, outputs=10, config=ProxyConfig(lr=0.01, epochs=30, width=8))
    theta = proxy.model.output(proxy.model.embedding.weight).softmax(1)
    assert theta.argmax(1).tolist() == list(range(1, 10))
    assert min(proxy.losses) < proxy.losses[0]


def test_the_lowest_validation_loss_is_kept_and_patience_ends_it() -> None:
    train, valid = texts(20, 0), texts(200, 1)
    config = ProxyConfig(lr=0.3, epochs=60, patience=2, width=4)
    proxy = train_proxy(train, valid, words=11, outputs=2, config=config)
    assert len(proxy.losses) < 61
    assert int(np.argmin(proxy.losses)) == len(proxy.losses) - 3


def test_logistic_regression_is_scikit_learns() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    train, valid = texts(150, 0), texts(80, 1)
    x = np.stack([np.bincount(row, minlength=11) / len(row) for row in train[0]])
    for penalty in (10.0, 0.1):
        ours = logistic_proxy(train, valid, words=11, penalties=[penalty])
        peer = linear_model.LogisticRegression(C=1 / penalty, tol=1e-9, max_iter=5000).fit(x, train[1])
        np.testing.assert_allclose(ours.weight.numpy(), peer.coef_[0], atol=1e-4)
        assert abs(ours.bias - peer.intercept_[0]) < 1e-4


def test_the_sweep_has_ten_decades_and_chooses_by_validation_accuracy() -> None:
    proxy = logistic_proxy(texts(150, 0), texts(80, 1), words=11)
    assert sorted(proxy.accuracy) == [10.0**power for power in range(-5, 5)]
    assert proxy.accuracy[proxy.penalty] == max(proxy.accuracy.values())
    assert proxy.weight[1] > proxy.weight[3] > proxy.weight[2]


def test_bad_input_is_refused() -> None:
    rows, labels = texts(5, 0)
    with pytest.raises(ValueError, match="sentence 1 has no words"):
        train_proxy(([[1], []], [0, 1]), (rows, labels), words=11, outputs=2)
    with pytest.raises(ValueError, match=r"the training labels must be 0 and 1, both of them, got \[1\]"):
        logistic_proxy(([[1], [2]], [1, 1]), ([[1], [2]], [0, 1]), words=11)
    with pytest.raises(ValueError, match="as many, and at least one, got 2 and 1"):
        train_proxy(([[1], [2]], [1]), (rows, labels), words=11, outputs=2)
    with pytest.raises(ValueError, match="penalties is empty"):
        logistic_proxy(([[1], [2]], [0, 1]), ([[1], [2]], [0, 1]), words=11, penalties=[])
