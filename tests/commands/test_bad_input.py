"""Whatever a user types or a file holds: a result, or one line that says what to correct; in time and in memory."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from attnlab.cli import main
from attnlab.data import readers
from tests.adapters.test_load import save
from tests.commands.bad_input import CASES, Case

# Every so many cases one is part of the fast tests.
import os

LOG = os.environ.get("FZLOG")
STRIDE = 22
SECONDS = 30
MORE_BYTES = 6 << 30
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


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, a text and a run folder."""
    folder = tmp_path_factory.mktemp("good")
    save("llama", folder / "llama")
    (folder / "text.txt").write_text("a b b a . a b\n\nb a b b\n\n" * 40)
    run = folder / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"name": "tiny", "config": {"lr": 0.1}, "seed": 1}))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "kind": "train", "values": {"loss": 2.0}, "seconds": 1}))
    (run / "result.json").write_text(json.dumps({"metrics": {"loss": 2.0}, "tables": {"t": [{"a": 1}]}}))
    return folder


def outcome(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit code, stderr) of a command run in this process."""
    with guarded():
        try:
            code = main(words)
        except SystemExit as stopped:
            # argparse: the usage, and one line.
            assert stopped.code == 2
            *usage, line = capsys.readouterr().err.splitlines()
            assert usage[0].startswith("usage: attnlab")
            return 2, line
    return code, capsys.readouterr().err


def marked(i: int, case: Case) -> Any:
    return pytest.param(case, id=case.name, marks=[] if i % STRIDE == 0 else [pytest.mark.slow])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", [marked(i, case) for i, case in enumerate(CASES)])
def test_bad_input_is_one_line(
    case: Case, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(readers, "PIPE_SECONDS", 0.1)
    monkeypatch.setattr(readers, "MOST_BYTES", 32 << 20)
    code, err = outcome(case.arguments(files, tmp_path), capsys)
    if LOG:
        print(code, case.name, "|", err.strip()[:400], file=open(LOG, "a"))
    assert code in (0, 2)
    if code == 2:
        assert err.strip()
        # A training may have begun, and said so.
        assert sum(not line.startswith("step ") for line in err.splitlines()) == 1, err
        assert not PYTHON.search(err), err
        # What does not fit is refused before it is allocated.
        assert "not enough memory" not in err, err
        assert len(err) < 1500
    assert code == 2 or not case.refused


def test_there_are_enough_cases_and_their_names_differ() -> None:
    assert len(CASES) >= 300
    assert len({case.name for case in CASES}) == len(CASES)
    assert 40 <= len(CASES[::STRIDE]) <= 60


def test_the_good_calls_are_good(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the cases change is what makes them fail."""
    from tests.commands.bad_input import GOOD

    for command, words in GOOD.items():
        assert main([command, *(word.format(files=files, own=tmp_path) for word in words)]) == 0, command
    shutil.rmtree(tmp_path / "run")
