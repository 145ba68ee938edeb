"""benchmarks/convert.py: arms at equal bytes, means over seeds, paired distances, and a dry run of all of it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import attnlab as al
from attnlab.adapters.cache_bytes import cache_bytes
from attnlab.data import bundled_text

ROOT = Path(__file__).resolve().parents[2]


def modules(*names: str) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield from map(importlib.import_module, names)


@pytest.fixture(scope="module")
def arms() -> Iterator[ModuleType]:
    yield from modules("convert_arms")


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    yield from modules("convert_tables")


@pytest.fixture(scope="module")
def model(arms: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(importlib.import_module("tiny_models").tiny_language_model(tmp_path_factory.mktemp("tiny") / "model"))


AT = {"budget": 0.6, "length": 64}
BOUNDED = "abc-select:slots=4,window=4,sinks=1,block=1"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arm", ["uniform", "window", "hybrid", "mlp"])
def test_one_mechanism_takes_the_budget_and_no_more(arms: ModuleType, model: str, arm: str, dtype: str) -> None:
    """Also where what is kept has another type than the model's keys."""
    teacher = al.load_model(model, dtype=getattr(torch, dtype)).model
    spec = arms.spec_for(arm, model, bounded=BOUNDED, dtype=dtype, **AT)
    share = cache_bytes(al.convert(teacher, spec, copy=True), 64) / cache_bytes(teacher, 64)
    assert 0.5 < share <= 0.6


def test_whole_layers_keep_softmax_where_that_brings_the_model_nearest(arms: ModuleType, model: str) -> None:
    loaded = al.load_model(model)
    texts = [bundled_text()[:20_000]]
    plan = arms.layers_plan(loaded, texts, bounded=BOUNDED, tokens=256, seed=0, **AT)
    ranked = plan.report["layers"]
    assert [row["kl"] for row in ranked] == sorted(row["kl"] for row in ranked)
    # One of two layers fits, and the other's memory takes what it leaves.
    assert list(plan.layers) == [("decoder", ranked[1]["layer"])]
    share = cache_bytes(al.convert(loaded.model, plan, copy=True), 64) / cache_bytes(loaded.model, 64)
    assert 0.55 < share <= 0.6
    with pytest.raises(ValueError, match="name a smaller one"):
        arms.layers_plan(loaded, texts, bounded=BOUNDED, tokens=256, seed=0, budget=0.1, length=64)


def test_several_seeds_have_a_mean_and_an_interval(tables: ModuleType) -> None:
    rows = [
        {"model": "teacher", "loss": 3.0, "loss_above": 0.0},
        *({"model": "plan", "seed": i, "cache": 0.25, "loss": 3 + x, "loss_above": x} for i, x in enumerate((1, 2, 3))),
    ]
    teacher, plan = tables.means(rows)
    assert teacher == {"model": "teacher", "seeds": 1, "loss": 3.0, "loss_above": 0.0}
    assert (plan["seeds"], plan["loss"], plan["cache"]) == (3, 5.0, 0.25)
    assert plan["loss_above_interval"] == pytest.approx([-0.484, 4.484], abs=1e-3)


def test_arms_are_compared_window_by_window(tables: ModuleType) -> None:
    scores = {
        "plan": [{"loss": [1.0, 2.0, 4.0], "needle": [1.0, 0.0]}, {"loss": [3.0, 2.0, 4.0], "needle": [1.0, 1.0]}],
        "window": [{"loss": [3.0, 3.0, 5.0]}],
    }
    [row] = tables.against(scores, "plan")
    # The plan's windows are 2, 2 and 4, the mean of its seeds: 1 below the window's in each.
    assert row == {
        "arm": "window", "task": "loss", "better": "lower", "difference": -1.0, "interval": [-1.0, -1.0], "cases": 3,
        "seeds": 2, "seeds_of_arm": 1,
    }  # fmt: skip


def test_rows_from_before_there_were_seeds_keep_the_one_they_had(tables: ModuleType) -> None:
    earlier: dict[str, Any] = {"config": {"seed": 7}, "tables": {"conversion": [{"model": "teacher"}, {"model": "plan", "training_tokens": 5}]}}  # fmt: skip
    assert tables.with_seeds(earlier)["tables"]["conversion"] == [
        {"model": "teacher"},
        {"model": "plan", "training_tokens": 5, "seed": 7},
    ]
    assert tables.with_seeds(None) is None


def test_the_figure_draws_what_is_measured_and_more_when_it_arrives(tables: ModuleType) -> None:
    figures = importlib.import_module("memory_figures")
    rows = [
        {"model": "teacher", "cache": 1.0, "loss_above": 0.0, "needle": 1.0},
        {"model": "plan", "budget": 0.25, "cache": 0.25, "loss_above": 0.01, "needle": 0.9},
    ]
    found = (("h2o", 0.7), ("tova", 0.4), ("compact:queries=repeat", 0.9))
    judged = [
        {"task": "needle", "length": 64, "policy": p, "budget": 0.5, "unseen": {"score": s}} for p, s in found
    ]  # fmt: skip
    drawn = figures.conversion_curves(rows, judged, 64)
    assert "loss over the teacher" in drawn
    assert "needles found" in drawn
    assert "after the cache is cut" not in drawn
    # Compaction is no eviction.
    assert figures._best_judged(judged, 64) == {0.5: 0.7}
    more = [
        *rows,
        {"model": "plan", "budget": 0.5, "cache": 0.5, "loss_above": 0.0, "continuation_above": 0.1},
        *({"model": f"eviction, {name}", "cache": 0.25, "needle": x} for name, x in (("tova", 0.2), ("h2o", 0.1))),
    ]
    assert "after the cache is cut" not in figures.conversion_curves(more, judged, 64)
    more.append({"model": "eviction, tova", "cache": 0.5, "continuation_above": 0.3})
    again = figures.conversion_curves(more, judged, 64)
    assert "after the cache is cut" in again
    # The plan has two points now: a line.
    assert again.count("<path d=") > drawn.count("<path d=")


@pytest.mark.slow
def test_a_dry_run_makes_all_tables_and_adds_seeds(tmp_path: Path) -> None:
    def run(*words: str) -> dict[str, Any]:
        command = [sys.executable, "benchmarks/convert.py", str(tmp_path / "runs"), "--tiny", *words]
        done = subprocess.run(
            [*command, "--out", str(tmp_path / "out.json")], cwd=ROOT, capture_output=True, text=True
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "out.json").read_text())["tables"]

    made = run("--arms", "plan", "--train-only")
    assert [row["memory"] for row in made["planned"]][:3] == ["softmax", "by loss", "by error"]
    assert all(row["cache"] <= 0.6 and "recall_loss_above_low" in row for row in made["planned"][1:])
    [student] = made["trained"]
    assert (student["model"], student["seed"], student["training_tokens"]) == ("plan", 0, 320)
    assert 0 < student["kl"] <= student["kl_at_start"]
    first = run("--arms", "plan", "layers", "--policies", "tova")
    assert first["trained"] == [student]
    assert [row["model"] for row in first["arms"]] == ["teacher", "plan", "whole layers softmax", "eviction, tova"]
    assert all("continuation" in row and "needle" in row for row in first["arms"])
    second = run("--arms", "plan", "--seeds", "1", "--policies")
    by_model = {row["model"]: row for row in second["arms"]}
    assert by_model["plan"]["seeds"] == 2
    assert len(by_model["plan"]["loss_above_interval"]) == 2
    # What was measured before stays.
    assert by_model["eviction, tova"]["needle"] == first["arms"][-1]["needle"]
    assert {row["arm"] for row in second["against"]} >= {"teacher", "whole layers softmax"}


def test_the_page_says_how_many_cases_each_row_has() -> None:
    """The results have no column for them; the command that made a row does."""
    page = " ".join((ROOT / "docs" / "convert-costs.md").read_text(encoding="utf-8").split())
    results = json.loads((ROOT / "benchmarks" / "results" / "convert.json").read_text(encoding="utf-8"))
    rows, by = results["tables"]["conversion"], results["made_by"]["conversion"]
    commands = {row["model"]: results["sources"][source]["command"] for row, source in zip(rows, by, strict=True)}
    assert "and has 100 needles and 100 stretches. The others, with 50 of each" in page
    assert "--cases 100 " in commands.pop("every head bounded")
    assert all("--cases 50 " in command for command in commands.values())
