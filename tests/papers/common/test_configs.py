"""--config small, smoke and paper of every experiment: their settings, without running anything."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from papers.__main__ import main
from papers.common.folders import Experiment, command_of, experiments_in, experiments_like

EXPERIMENTS = experiments_like(None)
DRY = {name: one for name, one in EXPERIMENTS.items() if one.settings is not None}
STUDY = {"classification.steps": 4000, "classification.batch": 32, "translation.epochs": 20, "translation.batch": 16}
# What the paper says of its sizes, optimiser and schedule, by the path to a setting.
PAPER: dict[str, dict[str, Any]] = {
    # Table 9.
    "abc-lm": {"width": 1024, "layers": 16, "deep_layers": 32, "heads": 8, "batch": 64, "dropout": 0.3, "recipe.lr": 1.0},
    # Table 10.
    "abc-mt": {"width": 512, "layers": 6, "hidden": 2048, "warmup": 6000, "dropout": 0.1, "norm": "post"},
    "abc-doc-mt": {"translation.hidden": 1024, "translation.warmup": 4000, "translation.dropout": 0.3},
    # Table 12's tasks; Liu et al. (2019).
    "abc-mlm": {"tasks": ["MNLI", "QNLI", "QQP", "SST-2"], "length": 512, "recipe.lr": 6e-4, "tune_lr": 1e-5},
    "abc-decoding": {"model": "translation-wmt14", "batch": 16},
    # Tables 10 and 11.
    "guidance": {"rows.english-roberta-12-mlm.lr": 5e-5, "rows.english-roberta-12-ag.alpha0": 10.0, "length": 512,
                 "rows.english-roberta-12-ag.model_sizes.layers": 12, "epochs": 7},
    "effective": {"batch_size": 8, "length": 128, "epochs": 3.0, "train_limit": None, "dev_limit": None},
    # A.2 and Table 4.
    "value-aware": {"lm_layers": 6, "lm_width": 512, "lm_vocabulary": "words", "mlm_long": 4096, "mlm_lr": 5e-6},
    # A.8.
    **dict.fromkeys(("ktiw-table2", "ktiw-tau", "ktiw-train", "ktiw-frozen", "ktiw-logreg", "ktiw-optimal"), STUDY),
    "ktiw-permutations": {"seeds": 20, "length": 40, "width": 256},
    "ktiw-multihead": {"seeds": 20, "heads": 8},
    "ktiw-permute-function": {"permute_steps": 1000},
    "ktiw-local": {"width": 256},
}  # fmt: skip


def settings(name: str, config: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    words = shlex.split(command_of(name, EXPERIMENTS[name]))[3:]
    assert main([*words, "--config", config, "--dry-run"]) == 0
    return json.loads(capsys.readouterr().out)


def at(nested: Any, path: str) -> Any:
    for name in path.split("."):
        nested = nested[name]
    return nested


@pytest.mark.parametrize("name", [name for name, one in DRY.items() if one.paper is not None])
def test_the_papers_settings_are_the_papers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    paper = settings(name, "paper", capsys)
    assert {path: at(paper, path) for path in PAPER[name]} == PAPER[name]
    # Nothing was made.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", DRY)
def test_small_and_smoke_have_settings_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings(name, "small", capsys)
    assert settings(name, "smoke", capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name.endswith("-arm")])
def test_what_trains_one_model_shows_its_settings(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert settings(name, "small", capsys)["steps"] > 4


@pytest.mark.parametrize("folder", ["abc", "guidance", "ktiw", "effective", "value_aware"])
def test_every_paper_has_the_three_configs(folder: str) -> None:
    experiments: list[Experiment] = list(experiments_in(folder).values())
    assert any(one.configs == ("small", "smoke", "paper") for one in experiments)
    # One that has the paper's settings can show them.
    assert [one.summary for one in experiments if one.paper is not None and one.settings is None] == []


def test_what_the_papers_settings_need_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs = {
        "effective": ["--data", "glue", "--tagger", "t"],
        "abc-mlm": ["--work", str(tmp_path)],
        "value-aware": ["--corpus", "c", "--work", str(tmp_path / "w")],
    }
    for name, words in needs.items():
        out = ["--out", str(tmp_path / "r.json")]
        assert main([name, *words, *out, "--config", "paper"]) == 2
        assert "--model" in capsys.readouterr().err
