"""benchmarks/judge_pairs.py: kinds of policies by pairs of cases, and runs on the same cases joined."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CONFIG = {"policies": ["h2o", "vatp"], "budgets": [0.25], "tasks": ["loss"], "lengths": [64], "cases": 8, "seed": 0}
FULL, H2O, VATP, COMPACT = 3.0, 3.2, 3.3, 3.1


@pytest.fixture(scope="module")
def judge_pairs() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("judge_pairs")


def row(policy: str, loss: float, *, length: int = 64, budget: float = 0.25) -> dict[str, Any]:
    scores = [loss + 0.01 * case for case in range(8)]
    over = {"value": loss - FULL, "low": loss - FULL, "high": loss - FULL}
    unseen = {"score": loss, "low": loss, "high": loss, "scores": scores, "over_full": over, "full_cannot": False}
    named = {"task": "loss", "length": length, "policy": policy, "spec": policy, "budget": budget}
    measured = {"bytes": 100.0 * budget, "bytes_ratio": budget, "prefill_ratio": None, "decode_ratio": None}
    return named | {"unseen": unseen, "seen": None} | measured


def run(*rows: dict[str, Any], **config: Any) -> dict[str, Any]:
    full = [row("full cache", FULL, length=length, budget=1.0) for length in {each["length"] for each in rows}]
    made_by = {"command": f"judge {rows[0]['policy']}", "commit": "0" * 40}
    return {"model": {"name": "m"}, "config": CONFIG | config, "rows": [*full, *rows], "tables": {}} | made_by


def test_kinds_are_compared_with_policies_that_do_not_look_at_values(judge_pairs: ModuleType) -> None:
    rows = [row("h2o", H2O), row("tova", 3.4), row("vatp", VATP), row("compact:queries=repeat", COMPACT)]
    by_values, fitted = judge_pairs.pairs(rows)
    assert (by_values["kind"], by_values["best"], by_values["without"]) == ("by values", "vatp", "h2o")
    assert by_values["difference"] == pytest.approx(H2O - VATP)
    assert by_values["better"] == "without"
    assert (fitted["kind"], fitted["without"], fitted["better"]) == ("fitted", "h2o", "fitted")
    assert fitted["difference"] == pytest.approx(H2O - COMPACT)
    assert fitted["cases"] == 4


def test_joined_runs_are_one_run_with_the_provenance_of_both(
    judge_pairs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(row("h2o", H2O), row("vatp", VATP))
    policy = run(row("compact", COMPACT), policies=["compact"])
    longer = run(row("h2o", 2.0, length=128), lengths=[128])
    paths = [tmp_path / f"{name}.json" for name in ("first", "policy", "longer")]
    for path, result in zip(paths, (first, policy, longer), strict=True):
        path.write_text(json.dumps(result), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["judge_pairs.py", str(paths[0]), "--join", *map(str, paths[1:])])
    judge_pairs.main()
    assert "'fitted'" in capsys.readouterr().out
    joined = json.loads(paths[0].read_text(encoding="utf-8"))
    # The full cache at 64 tokens is there once.
    assert [(each["policy"], each["length"]) for each in joined["rows"]] == [
        ("full cache", 64), ("h2o", 64), ("vatp", 64), ("compact", 64), ("full cache", 128), ("h2o", 128),
    ]  # fmt: skip
    assert joined["config"]["policies"] == ["h2o", "vatp", "compact"]
    assert joined["config"]["lengths"] == [64, 128]
    assert [each["command"] for each in joined["joined"]] == ["judge compact", "judge h2o"]
    assert len(joined["tables"]["scores"]) == 6
    assert len(joined["tables"]["policies_at"]) == 4


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (run(row("compact", COMPACT), seed=1), "seed differs"),
        (run(row("compact", COMPACT)) | {"model": {"name": "n"}}, "the model differs"),
        (run(row("h2o", H2O)), "loss 64 h2o 0.25 is in both runs"),
        (run(row("compact", COMPACT)) | {"rows": [row("full cache", 3.5, budget=1.0)]}, "the full cache scores diff"),
    ],
)
def test_runs_on_other_cases_are_not_joined(judge_pairs: ModuleType, other: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        judge_pairs.join(run(row("h2o", H2O)), other)
