"""benchmarks/recall.py: the memory grows with the task, and a killed command goes on with the same result."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--tiny --width 16 --rows 2 --steps 2 --small-steps 2 --warmup 1 --memory 8 --pairs 8 --keys 16 --only select abc-mlp"


@pytest.fixture
def recall() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("recall")


@pytest.mark.parametrize("name", ["window", "select"])
def test_a_memory_grows_to_what_it_is_at_the_end_and_is_never_larger_for_fewer_pairs(
    recall: ModuleType, name: str
) -> None:
    config = recall.Config()
    at = [config.memory_at(stage) for stage in config.growing]
    assert at == sorted(at)
    assert at[-1] == config.memory_at(None) == config.memory
    assert recall.compared(at[0])[name] != recall.compared(config.memory)[name]


def test_the_command_makes_a_row_of_each_and_goes_on_where_it_was(
    recall: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "recall.json"
    monkeypatch.setattr("sys.argv", ["recall.py", str(tmp_path / "runs"), *SMALL.split(), "--out", str(out)])
    recall.main()
    rows = json.loads(out.read_text())["tables"]["recall"]
    assert [row["mechanism"] for row in rows] == ["select", "abc-mlp"]
    for row in rows:
        assert 0 <= row["answered"] <= 1
        assert list(row["answered_before"]) == ["4-pairs-of-16", "8-pairs-of-16"]
    specs = {
        name: [
            json.loads((run / "run.json").read_text())["config"]["spec"]
            for run in sorted((tmp_path / "runs" / f"{name}-8-0").iterdir())
        ]
        for name in ("select", "abc-mlp")
    }
    assert specs["select"] == [
        "abc-select:slots=2,window=4,sinks=0,block=2",
        *["abc-select:slots=4,window=4,sinks=0,block=2"] * 2,
    ]
    assert len(set(specs["abc-mlp"])) == 1
    recall.main()
    assert json.loads(out.read_text())["tables"]["recall"] == rows
