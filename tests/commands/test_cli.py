"""The command line: what it prints, what it writes, and one clear line for every mistake."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attnlab
from attnlab import cli
from attnlab.adapters.load import SHIPPED
from attnlab.cli import COMMANDS, command_module, main, make_parser
from attnlab.commands.train import MODEL_NAMES
from attnlab.models import CONFIGS
from attnlab.pretraining import PretrainConfig

QUICK = ["--tokens", "60", "--length", "32", "-m", "softmax", "-m", "top-r:r=2"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Now is the winter of our discontent made glorious summer by this sun of York. " * 4)
    return path


Fails = Callable[..., str]


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """Run a command that must end with code 2, one line on stderr and nothing on stdout; returns the line."""

    def run(*argv: object) -> str:
        assert main([str(word) for word in argv]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("attnlab: ")
        assert err.count("\n") == 1
        return err

    return run


def test_without_a_command_it_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name}" in shown
        assert f"$ {command.example}" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == f"attnlab {attnlab.__version__}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_parses(command: str) -> None:
    program, *words = shlex.split(COMMANDS[command].example)
    assert program == "attnlab"
    assert make_parser(words).parse_args(words).command == command


@pytest.mark.parametrize("words", [["--help"], [], *([command, "--help"] for command in COMMANDS)], ids=" ".join)
def test_help_needs_no_torch(words: list[str]) -> None:
    """The user and system time of the process counts, since other processes may delay it."""
    heavy = "{'torch', 'transformers', 'numpy'} & set(sys.modules)"
    program = (
        "import atexit, resource, sys\n"
        f"atexit.register(lambda: print({heavy}, sum(resource.getrusage(resource.RUSAGE_SELF)[:2])))\n"
        "from attnlab.cli import main\n"
        f"main({words})\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    imported, seconds = shown.splitlines()[-1].rsplit(" ", 1)
    assert imported == "set()"
    assert float(seconds) < 0.3


def test_only_the_named_command_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(cli, "command_module", lambda name: loaded.append(name) or command_module(name))
    make_parser(["report", "train", "-o", "demo"])
    assert loaded == ["report"]


@pytest.mark.parametrize("module", ["attnlab", "attnlab.cli"])
def test_the_package_runs_as_a_module(module: str) -> None:
    ran = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == f"attnlab {attnlab.__version__}"


def test_help_lists_the_named_models() -> None:
    assert set(MODEL_NAMES) == set(CONFIGS)


def test_compare_prints_a_table_and_writes_a_page(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["compare", str(SHIPPED), "--text", str(text), *QUICK, "-o", str(page)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split()[:3] == ["mechanism", "MLM", "error"]
    assert [line.split()[0] for line in shown[1:3]] == ["softmax", "top-r:r=2"]
    assert shown[-1] == f"wrote {page}"
    assert page.read_text().startswith("<!doctype html>")
    assert set(tmp_path.iterdir()) == {text, page}


def test_compare_as_json(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert (
        main(
            ["compare", str(SHIPPED), "--text", str(text), *QUICK, "-m", "value-aware:r=d+1", "-o", str(page), "--json"]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    softmax, top, aware = result["rows"]
    assert softmax["output_error"] == pytest.approx(0, abs=1e-6)
    assert softmax["score_error"] == pytest.approx(0, abs=1e-6)
    assert top["output_error"] > 0.01
    assert top["quality"]["exact"] == softmax["quality"]["value"]
    # With d + 1 keys chosen by their values the output is kept, whatever the weights.
    assert aware["output_error"] == pytest.approx(0, abs=1e-4)
    assert aware["quality"]["value"] == softmax["quality"]["value"]
    assert result["model"]["layers"] == 6
    assert len(result["layers"]["top-r:r=2"]) == 6
    assert result["versions"]["attnlab"] == attnlab.__version__


def test_a_refused_mechanism_is_a_row_of_its_own(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last window is padded, which the mechanism refuses; the other one is still compared."""
    monkeypatch.setattr(attnlab.Kernelized, "cannot", lambda self: {"padding": "it knows no padding"})
    words = ["compare", str(SHIPPED), "--text", str(text), "--tokens", "50", "--length", "32", "--batch", "1"]
    assert main([*words, "-m", "kernel:elu", "-m", "softmax", "-o", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].startswith("kernel:elu  refused: ")
    assert "it knows no padding" in shown[1]
    assert shown[2].split()[0] == "softmax"
    assert "it knows no padding" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "empty"), (b"\x00\x01\x02PNG", "binary"), (b"caf\xe9 " * 30, "UTF-8")],
    ids=["empty", "binary", "latin-1"],
)
def test_bad_text(content: bytes, message: str, tmp_path: Path, fails: Fails) -> None:
    path, page = tmp_path / "bad.txt", tmp_path / "page.html"
    path.write_bytes(content)
    error = fails("compare", SHIPPED, "--text", path, *QUICK, "-o", page)
    assert message in error
    assert not page.exists()


def test_missing_text(tmp_path: Path, fails: Fails) -> None:
    assert "nowhere.txt" in fails(
        "compare", SHIPPED, "--text", tmp_path / "nowhere.txt", *QUICK, "-o", tmp_path / "p.html"
    )


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SHIPPED, tmp_path / "model"))


def damage_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def damage_truncated(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def damage_pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_no_weights, "holds no weights"),
        (damage_truncated, "truncated or damaged"),
        (damage_pickle_only, "only as a pickle"),
    ],
)
def test_bad_model_folder(damage, message: str, model_folder: Path, text: Path, fails: Fails) -> None:
    damage(model_folder)
    page = model_folder.parent / "page.html"
    error = fails("compare", model_folder, "--text", text, *QUICK, "-o", page)
    assert message in error
    assert not page.exists()


def test_a_misspelt_mechanism_fails_before_the_model_is_loaded(text: Path, fails: Fails) -> None:
    error = fails("compare", "no-such-model", "--text", text, "-m", "sofmax")
    assert "no mechanism named 'sofmax'; did you mean 'softmax'?" in error


def test_a_window_longer_than_the_positions(text: Path, tmp_path: Path, fails: Fails) -> None:
    error = fails("compare", SHIPPED, "--text", text, "--length", 513, "-m", "softmax", "-o", tmp_path / "p.html")
    assert "513 tokens is longer than the 512 positions" in error


def test_a_page_that_cannot_be_written_fails_first(text: Path, tmp_path: Path, fails: Fails) -> None:
    error = fails("compare", SHIPPED, "--text", text, *QUICK, "-o", tmp_path / "no" / "page.html")
    assert "make it first" in error


def test_an_unknown_device(text: Path, tmp_path: Path, fails: Fails) -> None:
    error = fails("compare", SHIPPED, "--text", text, *QUICK, "--device", "nowhere", "-o", tmp_path / "p.html")
    assert "device 'nowhere' cannot be used here" in error
    assert "cannot be used here" in fails("bench", "-m", "kernel:elu", "--lengths", 8, "--device", "nowhere")


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path / "nothing"), "-m", "softmax", "--debug", "-o", str(tmp_path / "p.html")]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_demo_writes_its_page_and_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out), *QUICK]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-3:] == [f"wrote {out / name}" for name in ("index.html", "explorer.html", "results.json")]
    assert '"norm"' in (out / "explorer.html").read_text()
    assert 'href="explorer.html"' in (out / "index.html").read_text()
    result = json.loads((out / "results.json").read_text())
    assert [row["mechanism"] for row in result["rows"]] == ["softmax", "top-r:r=2"]
    page = (out / "index.html").read_text()
    assert "captain" in page
    assert "effective" in page


def test_bench_gives_a_mechanism_its_hidden_states(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--lengths", "16", "--heads", "2", "--repeats", "1", "--json"]
    assert main(["bench", "-m", "abc-mlp:slots=3", "-m", "rfa:gate=true", *words]) == 0
    rows = json.loads(capsys.readouterr().out)["tables"]["rows"]
    assert [row["mechanism"] for row in rows if "refused" not in row] == ["sdpa", "abc-mlp:slots=3", "rfa:gate=true"]


def test_bench_prints_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "-m", "kernel:elu", "--lengths", "64", "128", "--heads", "2", "--repeats", "1", "--json"]) == 0
    )
    rows = json.loads(capsys.readouterr().out)["tables"]["rows"]
    assert [(row["mechanism"], row["length"]) for row in rows] == [
        ("sdpa", 64),
        ("kernel:elu", 64),
        ("sdpa", 128),
        ("kernel:elu", 128),
    ]
    assert rows[0]["time_ratio"] == rows[0]["memory_ratio"] == 1
    assert rows[3]["bytes_growth"] == pytest.approx(rows[3]["bytes"] / rows[1]["bytes"])


TRAINING = [
    "--model",
    "attnlab-lm",
    "--vocab",
    "300",
    "--length",
    "16",
    "--batch",
    "2",
    "--steps",
    "3",
    "--warmup",
    "1",
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


def test_a_diagnosis_needs_lines(text: Path, fails: Fails) -> None:
    assert "at least 2 lines, got -1" in fails("diagnose", text, text, "--lines", -1)


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


def test_a_page_and_json_do_not_share_standard_output(tmp_path: Path, fails: Fails) -> None:
    assert "would both be standard output" in fails("report", tmp_path, "--json", "-o", "/dev/stdout")


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
    error = fails(
        "train",
        "--text",
        text,
        "--vocab",
        60,
        "--model",
        "attnlab-mlm",
        "--task",
        "causal",
        "--out",
        tmp_path / "r",
    )
    assert "needs a model of kind decoder, but 'attnlab-mlm' is of kind encoder" in error


def test_report_needs_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["report"])
    assert stopped.value.code == 2
    assert "RUN" in capsys.readouterr().err
