"""KTIW's toy tasks: reproducible batches with the distributions that the paper describes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from papers.ktiw.synthetic import FixedPermutation, KeywordDetection, MixtureOfPermutations, PermutationCopying

TASKS = [
    PermutationCopying(),
    PermutationCopying(words=60),
    MixtureOfPermutations(),
    FixedPermutation(),
    KeywordDetection(),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda t: type(t).__name__)
def test_batches_are_a_function_of_seed_split_and_step(task: Any) -> None:
    again = type(task)(**vars(task))
    for step in (5, 0):
        a, b = task.batch(step), again.batch(step)
        assert all(torch.equal(a[name], b[name]) for name in a)
    others = [
        task.batch(1),
        type(task)(**{**vars(task), "seed": 1}).batch(0),
        type(task)(**{**vars(task), "split": "test"}).batch(0),
    ]
    for other in others:
        assert not torch.equal(task.batch(0)["input_ids"], other["input_ids"])
    ids = task.batch(0)["input_ids"]
    assert ids.min() >= 1
    assert ids.max() < task.vocab_size


def test_permutation_copying_holds_every_word_once() -> None:
    batch = PermutationCopying().batch(0)
    assert batch["input_ids"].shape == (128, 40)
    assert torch.equal(batch["input_ids"].sort(dim=1).values, torch.arange(1, 41).expand(128, 40))
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert torch.equal(batch["decoder_input_ids"][:, 1:], batch["labels"][:, :-1])
    assert (batch["decoder_input_ids"][:, 0] == 0).all()


def test_the_control_draws_forty_of_sixty_without_repeats() -> None:
    task = PermutationCopying(words=60)
    ids = torch.cat([task.batch(step)["input_ids"] for step in range(5)])
    assert all(len(set(row.tolist())) == 40 for row in ids)
    counts = torch.bincount(ids.ravel(), minlength=61)[1:]
    # Each word is in two thirds of the rows; five standard deviations.
    expected = len(ids) * 2 / 3
    assert (counts - expected).abs().max() < 5 * np.sqrt(len(ids) * 2 / 9)


def test_the_mixture_never_mixes_within_a_row() -> None:
    ids = MixtureOfPermutations(length=7, batch_size=301).batch(0)["input_ids"]
    low = ids.sort(dim=1).values[:, 0]
    assert set(low.tolist()) == {1, 8}
    assert all(row.sort().values.tolist() == list(range(int(a), int(a) + 7)) for row, a in zip(ids, low, strict=True))
    assert 100 < (low == 1).sum() < 200


def test_fixed_permutation_is_one_function_for_every_batch_and_split() -> None:
    task = FixedPermutation(words=11, length=7, batch_size=13, seed=2)
    assert sorted(task.pi.tolist()) == list(range(7))
    for source in (task, FixedPermutation(words=11, length=7, batch_size=13, seed=2, split="test")):
        for step in range(3):
            batch = source.batch(step)
            assert torch.equal(batch["labels"], batch["input_ids"][:, task.pi])
    assert FixedPermutation(seed=3).pi.tolist() != FixedPermutation(seed=4).pi.tolist()


def test_positive_rows_have_the_keyword_once_at_a_uniform_place() -> None:
    task = KeywordDetection(words=5, length=7, batch_size=2003)
    batch = task.batch(0)
    hits = batch["input_ids"] == 1
    assert torch.equal(hits.sum(1), batch["labels"])
    assert torch.equal(torch.where(batch["labels"] == 1, hits.int().argmax(1), -1), batch["position"])
    assert abs(batch["labels"].float().mean() - 0.5) < 5 * 0.5 / np.sqrt(2003)
    places = torch.bincount(batch["position"][batch["position"] >= 0], minlength=7)
    assert (places - places.float().mean()).abs().max() < 5 * places.float().mean().sqrt()
    rest = torch.bincount(batch["input_ids"][~hits], minlength=6)[2:]
    assert (rest - rest.float().mean()).abs().max() < 5 * rest.float().mean().sqrt()


def test_a_length_beyond_the_vocabulary_is_refused() -> None:
    for task in (PermutationCopying, FixedPermutation):
        with pytest.raises(ValueError, match="got length=41 of 40"):
            task(words=40, length=41)
