"""``ktiw-bases``: heads on several base models, trained alone, going on where an ended run stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from papers.common.row_store import Part
from papers.ktiw import bases
from papers.ktiw.config import PermutationsConfig
from papers.ktiw.permutations import figure_3_tasks, with_heads

TINY = PermutationsConfig(length=4, batch=3, width=5, head_steps=10)


def test_a_base_changes_all_but_the_head() -> None:
    task = figure_3_tasks(TINY)["permutations", "hard"]
    first = with_heads(TINY, task, [7])
    other = with_heads(PermutationsConfig(length=4, batch=3, width=5, base=1), task, [7])
    assert torch.equal(first.attention.query.weight, other.attention.query.weight)
    assert not torch.equal(first.hidden.weight, other.hidden.weight)  # type: ignore[union-attr]


def test_every_head_on_every_base_and_none_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(tmp_path / "bases.rows", keys=bases.KEYS)
    bases.run_bases(TINY, part, bases=[0, 4], heads=[0])
    trained = []
    train_one = bases.train_one
    monkeypatch.setattr(bases, "train_one", lambda *some, **how: trained.append(1) or train_one(*some, **how))
    out = tmp_path / "bases.json"
    result = bases.write_bases(out, config=TINY, bases=[0, 4], heads=[0, 1])
    assert len(trained) == 2
    assert [(row["head"], row["base"]) for row in result["tables"]["trainings"]] == [(0, 0), (0, 4), (1, 0), (1, 4)]
    assert [row["heads"] for row in result["tables"]["by_base"]] == [2, 2]
    assert not (tmp_path / "bases.rows").exists()


def test_counts_of_a_base() -> None:
    rows = [{"base": 4, "accuracy": a, "learned": a > 0.95} for a in (0.3, 0.99)]
    assert bases.by_base(rows) == [{"base": 4, "heads": 2, "learned": 1, "least": 0.3, "most": 0.99}]
