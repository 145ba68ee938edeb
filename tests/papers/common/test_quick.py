"""Every experiment that trains has --config smoke, and nothing of it comes near the papers' results."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from papers import __main__ as command_line
from papers.common.folders import RESULTS, command_of, experiments_like, load_results
from papers.common.quick import FOLDER

EXPERIMENTS = experiments_like(None)


def seen_by(name: str, extra: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """The options that an experiment's run gets from its example command line and ``extra``."""
    seen: list[argparse.Namespace] = []

    def write(options: argparse.Namespace) -> Path | None:
        seen.append(options)
        out = getattr(options, "out", None)
        if out is None or out.suffix != ".json":
            return None
        out.write_text(json.dumps({"tables": {}}))
        return out

    replaced: dict[str, Any] = {name: replace(EXPERIMENTS[name], run=write)}
    monkeypatch.setattr(command_line, "experiments_like", lambda _: replaced)
    words = shlex.split(command_of(name, EXPERIMENTS[name]))[3:]
    assert command_line.main([*words, *extra]) == 0
    return seen[0]


@pytest.mark.parametrize("how", [["--quick"], ["--config", "smoke"]], ids=["quick", "smoke"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_quick_keeps_away_from_results_and_from_whole_runs(
    name: str, how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = seen_by(name, [], monkeypatch)
    if how != ["--quick"] and not whole.shared_config:
        pytest.skip("it has no --config, or configs of its own")
    quick = seen_by(name, how, monkeypatch)
    assert "no evidence" in capsys.readouterr().err
    for option, value in EXPERIMENTS[name].quick.items():
        assert hasattr(whole, option)
        assert getattr(quick, option) == value
    settings = EXPERIMENTS[name].quick
    assert not settings or any(getattr(whole, option) != value for option, value in settings.items())
    if EXPERIMENTS[name].quick and hasattr(whole, "work"):
        folders = quick.work if isinstance(quick.work, list) else [quick.work]
        assert all(folder.parent == FOLDER and not list(folder.iterdir()) for folder in folders)
    out = getattr(quick, "out", None)
    if out is not None and out.suffix == ".json":
        assert out.parent not in (Path("papers/results"), RESULTS)
        # Two experiments that add to one results file do so in different settings when they are quick.
        assert out.parent != FOLDER or out.stem == name
        assert json.loads(out.read_text())["quick"] is True
        with pytest.raises(ValueError, match="no evidence"):
            load_results(out.parent)


@pytest.mark.parametrize("extra", [["--out", "papers/results/other.json"], ["--collect"]])
def test_quick_refuses_what_it_cannot_do(
    extra: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["abc-lm", "--corpus", "none", "--work", "w", "--quick", *extra]
    assert command_line.main(arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("python -m papers: --config smoke")


def test_every_paper_says_that_there_is_quick() -> None:
    pages = [RESULTS.parent / "README.md", *sorted(RESULTS.parent.glob("*/README.md"))]
    assert len(pages) > 5
    assert [page for page in pages if "--quick" not in page.read_text(encoding="utf-8")] == []


# What is read, drawn or judged from results and runs at hand has nothing to cut.
NOTHING_TO_CUT = {
    "claims", "data", "docs", "effective-maps", "effective-figures", "abc-figures", "abc-family", "guidance-patterns", "ktiw-alignment",
    "ktiw-figures", "truth-rxnmapper",
}  # fmt: skip


def test_every_experiment_that_trains_or_reads_a_corpus_is_cut() -> None:
    assert {name for name, experiment in EXPERIMENTS.items() if not experiment.quick} == NOTHING_TO_CUT
