"""The command line: what it prints, what it writes, and one clear line for every mistake."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attnlab
from attnlab.adapters.load import SHIPPED
from attnlab.cli import main
from attnlab.commands import table
from attnlab.commands.table import COMMANDS, command_module, make_parser
from attnlab.commands.train import MODEL_NAMES
from attnlab.models import CONFIGS
from tests.commands.conftest import Fails

QUICK = ["--tokens", "60", "--length", "32", "-m", "softmax", "-m", "top-r:r=2"]


def test_without_a_command_it_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name}" in shown
        assert f"$ {command.examples[0]}" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == f"attnlab {attnlab.__version__}"


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
    monkeypatch.setattr(table, "command_module", lambda name: loaded.append(name) or command_module(name))
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


DEMO = [*QUICK, "--lengths", "32", "64"]


def test_demo_writes_its_page_and_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out), *DEMO]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line[:3] for line in shown[:3]] == ["1. ", "2. ", "3. "]
    assert shown[3:] == [f"wrote {out / name}" for name in ("index.html", "explorer.html", "results.json")]
    assert '"norm"' in (out / "explorer.html").read_text()
    assert 'href="explorer.html"' in (out / "index.html").read_text()
    result = json.loads((out / "results.json").read_text())
    assert result["complete"]
    assert result["head"]["rule"] == "changes"
    assert [row["mechanism"] for row in result["comparison"]["rows"]] == ["softmax", "top-r:r=2"]
    assert [row["length"] for row in result["memory"]["rows"]] == [32, 64]
    assert result["memory"]["learned"] == "trained"
    page = (out / "index.html").read_text()
    assert "captain" in page
    assert "Ishmael" in page


def test_demo_of_a_causal_model_makes_its_twin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "shipped-lm", "--out", str(tmp_path), *DEMO, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["models"] == {"1 and 2": "shipped-lm", "3": "shipped-lm"}
    assert result["comparison"]["rows"][0]["quality"]["name"] == "perplexity"
    assert result["memory"]["learned"] == "started"
    assert "nothing was trained" in (tmp_path / "index.html").read_text()


def test_demo_of_a_masked_model_has_two_acts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "shipped-mlm", "--out", str(tmp_path), *DEMO]) == 0
    last = capsys.readouterr().out.splitlines()[2]
    assert last == (
        "3. There is no third act: BertForMaskedLM does not write one token after another, so it has no cache to bound."
    )
    assert json.loads((tmp_path / "results.json").read_text())["complete"]


def test_demo_refuses_a_model_that_is_converted(tmp_path: Path, fails: Fails) -> None:
    assert "is converted already" in fails("demo", "--model", "shipped-lm-bounded", "--out", tmp_path, *DEMO)


def test_a_demo_that_is_stopped_keeps_its_first_act(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from attnlab.evaluation import compare

    def stop(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "compare", stop)
    assert main(["demo", "--out", str(tmp_path), *DEMO]) == 130
    assert "captain" in (tmp_path / "index.html").read_text()
    assert not json.loads((tmp_path / "results.json").read_text())["complete"]
    assert "what was finished is kept" in capsys.readouterr().err


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


def test_a_diagnosis_needs_lines(text: Path, fails: Fails) -> None:
    assert "at least 2 lines, got -1" in fails("diagnose", text, text, "--lines", -1)


def test_a_page_and_json_do_not_share_standard_output(tmp_path: Path, fails: Fails) -> None:
    assert "would both be standard output" in fails("report", tmp_path, "--json", "-o", "/dev/stdout")


def test_report_needs_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["report"])
    assert stopped.value.code == 2
    assert "RUN" in capsys.readouterr().err
