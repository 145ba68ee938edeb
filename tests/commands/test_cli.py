"""The command line as a user meets it: what it prints, what it writes, and one clear line for every mistake."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import attnlab
from attnlab.cli import COMMANDS, main

SHIPPED = Path(attnlab.__file__).parent / "shipped" / "mlm"
QUICK = ["--tokens", "60", "--length", "32", "-m", "softmax", "-m", "top-r:r=2"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Now is the winter of our discontent made glorious summer by this sun of York. " * 4)
    return path


def fails(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run a command that must end with code 2, one line on stderr and nothing on stdout; the line."""
    assert main([str(a) for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("attnlab: ")
    assert "Traceback" not in err
    return err


def test_alone_it_shows_what_one_can_do(capsys: pytest.CaptureFixture[str]) -> None:
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
    from attnlab.cli import _parser

    words = COMMANDS[command].example.split()
    assert words[0] == "attnlab"
    assert _parser().parse_args(words[1:]).command == command


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
    """The others are compared all the same; here the last window is padded."""
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
def test_bad_text(content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "bad.txt", tmp_path / "page.html"
    path.write_bytes(content)
    said = fails(capsys, "compare", SHIPPED, "--text", path, *QUICK, "-o", page)
    assert message in said
    assert said.count("\n") == 1
    assert not page.exists()


def test_missing_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.txt" in fails(
        capsys, "compare", SHIPPED, "--text", tmp_path / "nowhere.txt", *QUICK, "-o", tmp_path / "p.html"
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
def test_bad_model_folder(
    damage, message: str, model_folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(model_folder)
    page = model_folder.parent / "page.html"
    said = fails(capsys, "compare", model_folder, "--text", text, *QUICK, "-o", page)
    assert message in said
    assert said.count("\n") == 1
    assert not page.exists()


def test_a_misspelt_mechanism_is_told_before_the_model_is_loaded(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = fails(capsys, "compare", "no-such-model", "--text", text, "-m", "sofmax")
    assert "no mechanism named 'sofmax'; did you mean 'softmax'?" in said
    assert said.count("\n") == 1


def test_a_window_longer_than_the_positions(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = fails(
        capsys, "compare", SHIPPED, "--text", text, "--length", 513, "-m", "softmax", "-o", tmp_path / "p.html"
    )
    assert "513 tokens is longer than the 512 positions" in said


def test_a_page_that_cannot_be_written_is_told_first(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = fails(capsys, "compare", SHIPPED, "--text", text, *QUICK, "-o", tmp_path / "no" / "page.html")
    assert "make it first" in said


def test_a_device_that_is_not_there(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = fails(capsys, "compare", SHIPPED, "--text", text, *QUICK, "--device", "nowhere", "-o", tmp_path / "p.html")
    assert "device 'nowhere' cannot be used here" in said
    assert "cannot be used here" in fails(capsys, "bench", "-m", "kernel:elu", "--lengths", 8, "--device", "nowhere")


def test_figures_2_and_7(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "maps.html"
    assert (
        main(["reproduce", "effective-maps", "--text", "The old ferry stayed in the harbour.", "--out", str(page)]) == 0
    )
    assert capsys.readouterr().out == f"wrote {page}\n"
    assert "harbour" in page.read_text() or "##bour" in page.read_text()


@pytest.mark.parametrize(
    "experiment",
    [
        ("value-aware", "--corpus", "stores", "--work", "runs"),
        ("effective", "--data", "glue", "--tagger", "tagger.json"),
        ("effective-patterns", "--texts", "texts.txt"),
        ("effective-classifier",),
        ("abc-family",),
    ],
    ids=lambda experiment: experiment[0],
)
def test_reproduce_asks_for_its_folder_before_the_work(
    experiment: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = fails(capsys, "reproduce", *experiment, "--out", tmp_path / "nowhere" / "result.json")
    assert "nowhere is no folder" in said


def test_reproduce_names_its_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["reproduce", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("wiki-corpus", "value-aware", "effective", "effective-maps"))


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
    "--task",
    "causal",
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


def test_train_then_resume_then_report(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    text.write_text(LINES)
    assert (
        main(["train", "--text", str(text), *TRAINING, "--attention", "kernel:elu", "--out", str(run), "--json"]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 3
    assert told["metrics"]["valid/loss"] > 0
    assert (run / "model" / "model.safetensors").is_file()
    assert (run / "model" / "tokenizer.json").is_file()
    # A finished run is not run again; its folder alone says what it was.
    assert main(["train", "--resume", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == told["metrics"]
    page = tmp_path / "report.html"
    assert main(["report", str(run), "-o", str(page)]) == 0
    assert "valid/loss" in page.read_text()
    capsys.readouterr()
    # It is not written over, and it recorded no steps to look at.
    assert "already holds a run" in fails(capsys, "train", "--text", text, *TRAINING, "--out", run)
    assert "without recorded steps" in fails(capsys, "explore", run, "-o", page)


def test_what_is_not_installed_is_said(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text.write_text(LINES)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    said = fails(capsys, "train", "--text", text, *TRAINING, "--out", tmp_path / "run")
    assert 'pip install "attnlab[train]"' in said


def test_a_diagnosis_needs_lines(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "at least 2 lines, got -1" in fails(capsys, "diagnose", text, text, "--lines", -1)


def test_train_needs_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--text FILE" in fails(capsys, "train")


def test_a_run_is_not_overwritten(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert "no run to resume" in fails(capsys, "train", "--resume", run)


def test_an_encoder_cannot_learn_left_to_right(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = fails(
        capsys,
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
    assert "needs a model of kind decoder, but 'attnlab-mlm' is of kind encoder" in said


def test_report_needs_something(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--claims" in fails(capsys, "report")
