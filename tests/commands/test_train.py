"""``attnlab train`` and what is made of its runs: output, resuming, guidance, and one clear line for every mistake."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from attnlab.cli import main
from attnlab.pretraining import PretrainConfig
from tests.commands.conftest import Fails

TRAINING = [
    *("--model", "attnlab-lm", "--vocab", "300", "--length", "16"),
    *("--batch", "2", "--steps", "3", "--warmup", "1"),
]

LINES = "\n\n".join(f"The {word} of our discontent is number {i}." for i in range(40) for word in ("winter", "sun"))


def test_train_then_resume_then_report(
    text: Path, tmp_path: Path, fails: Fails, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    text.write_text(LINES)
    assert (
        main(["train", "--text", str(text), *TRAINING, "--attention", "kernel:elu", "--out", str(run), "--json"]) == 0
    )
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["step"] == 3
    assert outcome["metrics"]["valid/loss"] > 0
    assert (run / "model" / "model.safetensors").is_file()
    assert (run / "model" / "tokenizer.json").is_file()
    # A finished run is not run again; its folder alone says what it was.
    assert main(["train", "--resume", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == outcome["metrics"]
    page = tmp_path / "report.html"
    assert main(["report", str(run), "-o", str(page)]) == 0
    assert "valid/loss" in page.read_text()
    capsys.readouterr()
    # What belongs to a new run is not ignored.
    error = fails("train", "--resume", run, "--steps", 1000, "--lr", 0.1)
    assert f"--resume goes on with the settings of {run}: leave out --steps, --lr" in error
    # It is not written over, and it recorded no steps to look at.
    assert "already holds a run" in fails("train", "--text", text, *TRAINING, "--out", run)
    assert "without recorded steps" in fails("explore", run, "-o", page)


MASKED = ["--model", "attnlab-mlm"]


@pytest.mark.parametrize(
    ("options", "patterns", "hold"),
    [
        (["--guidance"], ["prev", "first", "period", "delim"], 0.3),
        ([*MASKED, "--guidance"], ["next", "prev", "first", "period", "delim"], 0.3),
        (
            [*MASKED, "--guidance", "0.25", "--guidance-patterns", "next,delim", "--guidance-hold", "0"],
            ["next", "delim"],
            0.0,
        ),
    ],
    ids=["causal", "masked", "own settings"],
)
def test_train_guided(
    options: list[str], patterns: list[str], hold: float, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    text.write_text(LINES)
    assert main(["train", "--text", str(text), *TRAINING, *options, "--out", str(run), "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    # At the last step alpha is 0, so that the loss is the task's.
    assert outcome["metrics"]["valid/guidance"] > 0
    task = "masked-lm" if "attnlab-mlm" in options else "causal-lm"
    assert outcome["metrics"]["valid/loss"] == pytest.approx(outcome["metrics"][f"valid/{task}"])
    settings = json.loads((run / "run.json").read_text())["config"]["pretrain"]["guidance"]
    assert settings["patterns"] == patterns
    assert settings["hold"] == hold
    # alpha0 of 10 belongs to a mean over 512 keys.
    assert (settings["alpha0"], settings["reduction"]) == (10 / 512, "row")
    # The folder alone says how to go on.
    assert main(["train", "--resume", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == outcome["metrics"]


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, ("attnlab-mlm", "mlm")),
        ({"model": "attnlab-lm"}, ("attnlab-lm", "causal")),
        ({"model": "bert-2x32"}, ("bert-2x32", "mlm")),
        ({"model": "llama-2x32"}, ("llama-2x32", "causal")),
        ({"task": "causal"}, ("attnlab-lm", "causal")),
        ({"model": "attnlab-lm", "task": "causal"}, ("attnlab-lm", "causal")),
    ],
)
def test_the_task_is_the_models_own_and_the_model_the_tasks(
    named: dict[str, str], expected: tuple[str, str], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[tuple[str, str]] = []

    def stop(corpus: Any, config: PretrainConfig, **others: Any) -> None:
        chosen.append((config.model, config.task))
        raise ValueError("this is enough")

    monkeypatch.setattr("attnlab.pretraining.train_language_model", stop)
    options = [part for name, value in named.items() for part in (f"--{name}", value)]
    assert main(["train", "--text", str(text), *options, "--out", str(tmp_path / "run")]) == 2
    assert chosen == [expected]


def test_a_model_for_pairs_of_texts_has_no_task_of_one(text: Path, fails: Fails) -> None:
    assert "learns from pairs of texts" in fails("train", "--text", text, "--model", "translation-wmt14")


def test_options_of_guidance_need_guidance(text: Path, tmp_path: Path, fails: Fails) -> None:
    error = fails("train", "--text", text, *TRAINING, "--guidance-hold", 0.1, "--out", tmp_path / "run")
    assert "--guidance-hold says how to guide: give --guidance too" in error
    error = fails(
        "train", "--text", text, *TRAINING, "--guidance", "--guidance-patterns", "nxt", "--out", tmp_path / "r"
    )
    assert "no pattern named 'nxt'" in error


def test_a_missing_package_is_named(text: Path, tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    text.write_text(LINES)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    error = fails("train", "--text", text, *TRAINING, "--out", tmp_path / "run")
    assert "pip install accelerate" in error


def test_train_says_how_large_the_model_is_and_records_what_explore_plays(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    text.write_text(LINES)
    assert main(["train", "--text", str(text), *TRAINING, "--record", "The sun of winter", "--out", str(run)]) == 0
    said = capfd.readouterr().err
    assert re.search(r"attnlab: [0-9,]+ parameters; [0-9,]+ tokens to train on; 3 steps of up to 32 tokens are", said)
    assert main(["explore", str(run), "-o", "/dev/stdout"]) == 0
    page = capfd.readouterr()
    assert page.out.lower().startswith("<!doctype html>")
    assert page.out.rstrip().endswith("</html>")
    assert "wrote" in page.err
    assert [step["step"] for step in json.loads((run / "steps" / "index.json").read_text())["steps"]] == [0, 1, 2, 3]


def test_an_interrupted_training_is_one_line(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnlab.training import Interrupted

    def interrupted(*_: object, **__: object) -> None:
        raise Interrupted(7, tmp_path / "a run")

    monkeypatch.setattr("attnlab.pretraining.train_language_model", interrupted)
    assert main(["train", "--text", str(text)]) == 130
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        "attnlab: interrupted at step 7; a checkpoint is saved; go on with: "
        f"attnlab train --resume '{tmp_path / 'a run'}'"
    )


@pytest.mark.parametrize("option", ["--out", "--resume"])
def test_an_empty_folder_name_is_refused(
    option: str, text: Path, tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    words = ("--text", text, *TRAINING) if option == "--out" else ()
    assert f"{option} names no folder" in fails("train", *words, option, "")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("tracker", "message"), [("wandb", "is not installed"), ("wanbd", "no tracker is named")])
def test_a_tracker_that_cannot_be_is_refused(
    tracker: str, message: str, text: Path, tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    text.write_text(LINES)
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", list)
    assert message in fails("train", "--text", text, *TRAINING, "--track", tracker, "--out", tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()


def test_train_needs_a_text(fails: Fails) -> None:
    assert "--text FILE" in fails("train")


def test_resuming_needs_a_run(text: Path, tmp_path: Path, fails: Fails) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert "no run to resume" in fails("train", "--resume", run)


def test_an_encoder_cannot_learn_left_to_right(text: Path, tmp_path: Path, fails: Fails) -> None:
    words = ("--vocab", 60, "--model", "attnlab-mlm", "--task", "causal")
    error = fails("train", "--text", text, *words, "--out", tmp_path / "r")
    assert "needs a model of kind decoder, but 'attnlab-mlm' is of kind encoder" in error
