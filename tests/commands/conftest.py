"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attnlab.cli import main

Fails = Callable[..., str]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Now is the winter of our discontent made glorious summer by this sun of York. " * 4)
    return path


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
