"""Whatever a user types or a file holds: a result, or one line that says what to correct; in time and in memory."""

from __future__ import annotations

import argparse
import math
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlab
from attnlab import registry
from attnlab.cli import main, run_reporting
from attnlab.data import readers
from tests.adapters.architectures import build
from tests.commands.bad_input import (
    CASES,
    DEEP,
    GOOD,
    Case,
    edit,
    end_beyond,
    fewer_layers,
    good_call,
    ids_beyond,
    with_value,
)

# Every so many cases one is part of the fast tests.
STRIDE, FIRST = 38, 3
SECONDS = 30
MORE_BYTES = 6 << 30
# A training may have begun, and said so, and a text may be doubtful.
BEGUN = re.compile(r"step |attnlab: (converting |warning: |this processor |[\d,]+ parameters; )")
# Advice that is of no use at the command line.
PYTHON = re.compile(
    r"\bpass \w+=|\(\w+=True\)|=\[|Malformed\(|save_pretrained|\bal\.\w|\b[a-z_]+\(\w+=|import |<class |Traceback"
)


class TakesTooLongError(BaseException):
    """Not an Exception, so that no command takes it for an error of its own."""


@contextmanager
def guarded() -> Iterator[None]:
    """A limit of time, and one of memory above which allocations fail."""

    def stop(*_: Any) -> None:
        raise TakesTooLongError(f"over {SECONDS} seconds")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (held + MORE_BYTES, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def outcome(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit code, stderr) of a command run in this process."""
    with guarded():
        try:
            code = main(words)
        except SystemExit as stopped:
            code = stopped.code
        else:
            return code, capsys.readouterr().err
    # argparse: the usage, and one line.
    assert code == 2
    *usage, line = capsys.readouterr().err.splitlines()
    assert usage[0].startswith("usage: attnlab")
    return 2, line


def marked(i: int, case: Case) -> Any:
    return pytest.param(case, id=case.name, marks=[] if i % STRIDE == FIRST else [pytest.mark.slow])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", [marked(i, case) for i, case in enumerate(CASES)])
def test_bad_input_is_one_line(
    case: Case, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(readers, "PIPE_SECONDS", 0.1)
    monkeypatch.setattr(readers, "MOST_BYTES", 32 << 20)
    words = case.arguments(files, tmp_path)
    before = set(tmp_path.rglob("*"))
    code, err = outcome(words, capsys)
    assert code in (0, 2)
    if code == 2:
        assert set(tmp_path.rglob("*")) == before, "something was half written"
        assert err.strip()
        assert sum(not BEGUN.match(line) for line in err.splitlines()) == 1, err
        assert not PYTHON.search(err), err
        # What does not fit is refused before it is allocated.
        assert "not enough memory" not in err, err
        assert len(err) < 1500
    assert code == 2 or not case.refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench --lengths 10000000 --heads 1 --width 8", "hours or more"),
        ("bench --lengths 10000000", "would take 81.9 GB"),
        (f"bench --lengths {10**12}", "would take"),
        (f"bench --lengths 8 --repeats {10**10}", "hours or more"),
        ("train --text {files}/text.txt --model bert-1x1000000 --out {own}/run", "would take 192 TB"),
        (f"train --text {{files}}/text.txt --length {10**9} --out {{own}}/run", "would take"),
        (f"train --text {{files}}/text.txt --vocab {10**9} --out {{own}}/run", "would take"),
        ("explore {files}/llama a --layers 0-99999999999 -o {own}/p.html", "layers must be numbers below 10000"),
        ("explore {files}/llama a --layers 2-1 -o {own}/p.html", "2-1 ends before it begins"),
        ("explore {files}/llama a --target b -o {own}/p.html", "LlamaForCausalLM is none"),
        ("compare {files}/llama --text {files}/word.txt -o {own}/p.html", "the text has 1 token, from which nothing"),
        ("convert {files}/llama --text {files}/text.txt --out {own}/run", "give one of --mechanism, --plan, --budget"),
        ("convert {files}/llama -m window:r=4 --out {own}/run", "name the text to learn from: --text FILE"),
        (
            "convert {files}/llama -m window:r=4 --text {files}/word.txt --lengths 8 --batch 16 --out {own}/run",
            "the text holds 2 tokens, too few for rows of 8",
        ),
        (
            "convert {files}/llama --budget 1e-4 --text {files}/long.txt --lengths 64 --batch 64 --out {own}/run",
            "one key for each of 6 heads takes 288",
        ),
        (
            "convert {files}/llama -m window:r=4 --text {files}/text.txt --tokens 10X --out {own}/run",
            "--tokens must be a number such as 500k or 10M, got '10X'",
        ),
        (
            "convert {files}/llama -m window:r=4 --text {files}/text.txt --lengths 64=half --out {own}/run",
            "--lengths: 'half' is no share",
        ),
        (
            "convert {files}/llama -m window:r=4 --text {files}/text.txt --batch 100 --out {own}/run",
            "--batch has 100 tokens and --lengths rows of 2048: one row must fit",
        ),
        ("diagnose {files}/text.txt", "name the file of the translations too"),
        ("explore {files}/run -o {own}/p.html", "to look at its model give a text after it"),
    ],
)
def test_what_is_said(
    words: str, message: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = outcome([word.format(files=files, own=tmp_path) for word in words.split()], capsys)
    assert code == 2
    assert message in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (with_value(math.nan), "its weights hold NaN, in model.layers.1.self_attn.q_proj.weight"),
        (with_value(math.inf), "its weights hold infinity, in model.layers.1.self_attn.q_proj.weight"),
        (lambda f: edit(f / "config.json", num_hidden_layers=10**7), "num_hidden_layers is 10000000, but the weights"),
        (fewer_layers, "hold more layers than its config.json names (1 of model.layers"),
        (lambda f: edit(f / "config.json", hidden_size="x"), "hidden_size must be a whole number, got 'x'"),
        (lambda f: edit(f / "config.json", dtype="evil"), "dtype must be the name of a dtype"),
        (lambda f: edit(f / "config.json", architectures="x"), "architectures must be a list"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json must hold a JSON object, got list"),
        (lambda f: (f / "config.json").write_text(DEEP), "config.json is nested too deeply"),
        (ids_beyond, "the tokenizer made the id 99999, but LlamaForCausalLM has"),
    ],
    ids=range(10),
)
def test_what_is_said_of_a_model(
    damage: Callable[[Path], object],
    message: str,
    files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(files / "llama", tmp_path / "damaged"))
    damage(folder)
    code, err = outcome(["explore", str(folder), "a b", "-o", str(tmp_path / "p.html")], capsys)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("command", "damage"),
    [
        *((command, ids_beyond) for command in ("compare", "evaluate", "judge", "audit", "convert")),
        ("convert", end_beyond),
        ("sample", end_beyond),
    ],
)
def test_ids_beyond_the_embeddings_are_one_line_of_every_command(
    command: str,
    damage: Callable[[Path], None],
    files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(files / "llama", tmp_path / "damaged"))
    damage(folder)
    words = good_call(command, files, tmp_path / "own")
    # A mechanism that begins from the texts.
    other = {str(files / "llama"): str(folder), "window:r=4": "abc-select:slots=2,window=2,sinks=1,block=1"}
    code, err = outcome([other.get(word, word) for word in words], capsys)
    assert code == 2
    assert "the tokenizer made the id 99999, but LlamaForCausalLM has" in err
    assert not any((tmp_path / "own").iterdir()), "something was half written"


@pytest.mark.parametrize("command", ["compare", "audit", "convert", "explore"])
def test_a_text_that_the_tokenizer_does_not_know_is_said_to_be_doubtful(
    command: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the king is dead a b .\n\n" * 300)
    words = [word.replace(str(files / "text.txt"), str(text)) for word in good_call(command, files, tmp_path / "own")]
    if command == "explore":
        words = [command, words[1], "--long", "--text", str(text), *words[3:]]
    code, err = outcome(words, capsys)
    assert code == 0
    assert "of the text's tokens are unknown to the tokenizer ([UNK])" in err


@pytest.mark.parametrize("command", ["explore", "compare", "audit"])
@pytest.mark.parametrize("kind", ["clip", "whisper"])
def test_a_model_of_more_than_text_is_one_line(
    kind: str, command: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    build(kind).save_pretrained(tmp_path / "model")
    for file in (files / "llama").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    words = good_call(command, files, tmp_path / "own")
    code, err = outcome([str(tmp_path / "model") if word == str(files / "llama") else word for word in words], capsys)
    assert code == 2
    assert "does not read a text alone, but" in err.splitlines()[-1]
    assert not list((tmp_path / "own").iterdir())


def test_a_run_folder_stands_for_its_model(files: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(files / "run", tmp_path / "run"))
    shutil.copytree(files / "llama", run / "model")
    assert main(["explore", str(run), "a b", "-o", str(tmp_path / "p.html")]) == 0
    assert (tmp_path / "p.html").is_file()


def huge_settings() -> list[str]:
    """Every whole number that a mechanism can be set to, as 10^9; a seed is no size."""
    specs = []
    for name, entry in registry._load().items():
        numbers = [f.name for f in fields(entry.cls) if isinstance(f.default, int) and f.type in ("int", "int | None")]
        specs += [f"{name}:{number}=1000000000" for number in numbers if number not in ("seed", "stream", "at")]
    return specs


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", huge_settings())
def test_a_mechanism_of_any_size_attends_or_says_what_it_would_take(spec: str, causal: bool) -> None:
    q = torch.randn(1, 4, 9, 8)
    refusal = ""
    with guarded(), torch.no_grad():
        try:
            mech = attnlab.mechanism(spec)
            out = mech(attnlab.AttentionCall(q, q, q, x=torch.randn(1, 9, 8), causal=causal))
        except ValueError as error:
            out, refusal = q, str(error)
    assert out.shape == q.shape
    assert not refusal or re.search(r"would take [\d.e+]+ [kMGTP]?B|cannot take this call|must be", refusal), refusal


def test_a_closed_pipe_ends_a_command_silently() -> None:
    """``attnlab | head`` and ``python -m papers | head``."""
    for module in ("attnlab", "papers"):
        program = subprocess.Popen([sys.executable, "-m", module], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert program.stdout is not None
        program.stdout.close()
        assert program.stderr is not None
        assert program.stderr.read() == b""
        assert program.wait() == 141
        program.stderr.close()


@pytest.mark.parametrize(("error", "line"), [(KeyboardInterrupt(), "interrupted"), (KeyboardInterrupt("x"), "x")])
def test_an_interrupt_says_so(error: KeyboardInterrupt, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(options: argparse.Namespace) -> None:
        raise error

    assert run_reporting(stopped, argparse.Namespace(debug=False), program="attnlab") == 130
    assert capsys.readouterr().err == f"attnlab: {line}\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "there is not enough memory for this; ask for less"),
        (torch.OutOfMemoryError("CUDA out of memory."), "not enough memory for this (CUDA out of memory)"),
        (
            RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."),
            "(can't allocate memory: you tried to allocate 4 bytes)",
        ),
        (RuntimeError("std::bad_alloc"), "not enough memory for this (std::bad_alloc)"),
        (OSError(12, "Cannot allocate memory"), "not enough memory for this ([Errno 12] Cannot allocate memory)"),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            "not enough memory for this (libtorch",
        ),
        (ValueError("two\nlines"), "attnlab: two; lines\n"),
        (ValueError("\udcff"), "attnlab: \\udcff\n"),
        (FileNotFoundError(2, "No such file", "a.txt"), "attnlab: a.txt: No such file\n"),
    ],
    ids=range(9),
)
def test_one_place_makes_one_line(error: Exception, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(options: argparse.Namespace) -> None:
        raise error

    assert run_reporting(failing, argparse.Namespace(debug=False), program="attnlab") == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1


def test_a_defect_of_the_program_keeps_its_traceback() -> None:
    def failing(options: argparse.Namespace) -> None:
        raise TypeError("a defect")

    with pytest.raises(TypeError, match="a defect"):
        run_reporting(failing, argparse.Namespace(debug=False), program="attnlab")


def test_there_are_enough_cases_and_their_names_differ() -> None:
    assert len(CASES) >= 300
    assert len({case.name for case in CASES}) == len(CASES)
    assert 40 <= len(CASES[FIRST::STRIDE]) <= 60


@pytest.mark.slow
def test_the_good_calls_are_good(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the cases change is what makes them fail."""
    for command in GOOD:
        assert main(good_call(command, files, tmp_path / command)) == 0, command
