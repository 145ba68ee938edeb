"""The runs of a data set as one stacked model: each is what it would be alone, and its folder as others expect it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, softplus

from attnlab.dynamics import ProxyConfig
from attnlab.training import load_weights
from papers.ktiw.comparison import run_chosen
from papers.ktiw.config import StudyConfig
from papers.ktiw.corpora import Corpus
from papers.ktiw.models.lstm import Classifier, Translator, freeze_probe
from papers.ktiw.readings import BOS, EOS
from papers.ktiw.stacked import orders, run_stacked
from papers.ktiw.study import make_model
from papers.ktiw.tables import Study, table_2, table_10

CONFIG = StudyConfig(
    steps=5, batch=3, evaluate=(), evaluate_every=5, count=12, tau_rows=8, width=7, proxy=ProxyConfig(epochs=1)
)


def corpus(kind: str) -> Corpus:
    rng = np.random.default_rng(0)
    x = [rng.integers(4, 17, rng.integers(2, 12)) for _ in range(13)]
    y: Any = np.arange(13) % 2 if kind == "classification" else [row[::-1].copy() for row in x]
    words = ("<pad>", "<unk>", "<s>", "</s>", *(f"▁w{i}" for i in range(13)))
    return Corpus("sst-trees" if kind == "classification" else "multi30k", kind, words, (x, y), (x, y))


def loss_of(model: Classifier | Translator, data: Corpus, chosen: np.ndarray) -> torch.Tensor:
    """The mean loss of a batch, one example after another and without padding."""
    losses = []
    for i in chosen:
        x, y = data.train[0][i], data.train[1][i]
        if isinstance(model, Classifier):
            logit = model(torch.tensor(x)[None]).logits
            losses.append(softplus(-(2 * int(y) - 1) * logit))
        else:
            source, decoder_ids = torch.tensor([*x, EOS])[None], torch.tensor([BOS, *y])[None]
            logits = model(source, decoder_input_ids=decoder_ids).logits[0]
            losses.append(cross_entropy(logits, torch.tensor([*y, EOS]), reduction="none"))
    return torch.cat(losses).mean()


@pytest.fixture
def double() -> Iterator[None]:
    """Models in float64: Adam divides gradients by their size, so that rounding would show."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", ["classification", "translation"])
def test_each_run_trains_as_it_would_alone(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = corpus(kind)
    # What dropout draws depends on the shape of all members together.
    monkeypatch.setattr("papers.ktiw.study.make_model", _without_dropout)
    names = ("reference", "second", "uniform", "frozen")
    folder = run_stacked(data, tmp_path, config=CONFIG, runs=names)
    lengths = np.array([len(row) + (kind == "translation") for row in data.train[0]])
    members = [name for name in names if (folder / name).exists()]
    assert len(members) == (4 if kind == "classification" else 3)
    made = [orders(lengths, batch=3, members=len(members), epoch=epoch) for epoch in range(2)]
    batches = np.concatenate(made)[:5]
    for i, run in enumerate(members):
        torch.manual_seed(i)
        model = _without_dropout(data, run, width=7)
        if run == "frozen":
            freeze_probe(model)
        before = model.output.weight.detach().clone()
        adam = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for batch in batches[:, i]:
            adam.zero_grad()
            loss_of(model, data, batch).backward()
            adam.step()
        trained = make_model(data, run, width=7)
        assert load_weights(trained, folder / run, which="best") == 5
        for name, p in model.named_parameters():
            torch.testing.assert_close(trained.get_parameter(name), p, atol=1e-9, rtol=0, msg=f"{run} {name}")
        assert torch.equal(trained.output.weight, before) == (run == "frozen")


def _without_dropout(data: Corpus, run: str, *, width: int) -> Any:
    model = make_model(data, run, width=width)
    if isinstance(model, Classifier):
        return model
    plain = Translator(replace(model.config, dropout=0.0))
    plain.load_state_dict(model.state_dict())
    return plain


def test_tables_are_made_from_stacked_runs(tmp_path: Path) -> None:
    data = corpus("classification")
    run_chosen([data], tmp_path, runs=("reference", "second", "uniform", "frozen"), steps=2, batch=3, stacked=True)
    [row] = table_2([Study(tmp_path / "sst-trees")])
    assert {"a_alpha_uf", "a_uf_px", "a_delta_uf", "a_alpha_beta", "xi_star"} <= set(row)
    assert len(table_10([Study(tmp_path / "sst-trees")])) == 1


def test_a_limit_of_time_ends_with_an_evaluation(tmp_path: Path) -> None:
    folder = run_stacked(corpus("classification"), tmp_path, config=CONFIG, runs=("reference",), seconds=0)
    assert [row["step"] for row in Study(folder).evaluations("reference")] == [0]
    assert (folder / "reference" / "result.json").exists()


def test_the_batches_of_a_step_are_of_like_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 400, 1000)
    made = orders(lengths, batch=10, members=3, epoch=0)
    assert made.shape == (100, 3, 10)
    for member in range(3):
        assert len(np.unique(made[:, member])) == 1000
    longest = lengths[made].max(2)
    assert np.mean(longest.max(1) / longest.mean(1)) < 1.15
    # No two members and no two epochs see the same batches.
    assert not np.array_equal(made[:, 0], made[:, 1])
    assert not np.array_equal(made, orders(lengths, batch=10, members=3, epoch=1))
    # A data set smaller than a batch repeats its examples.
    assert orders(lengths[:3], batch=5, members=1, epoch=0).shape == (1, 1, 5)


def test_the_linear_model_is_stacked_apart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stacked apart"):
        run_stacked(corpus("translation"), tmp_path, config=CONFIG, runs=("reference", "linear"))
