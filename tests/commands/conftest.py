"""What the tests of the command line share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from attnlab.cli import main
from tests.adapters.test_load import save

Fails = Callable[..., str]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Now is the winter of our discontent made glorious summer by this sun of York. " * 4)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, a text and a run folder."""
    folder = tmp_path_factory.mktemp("good")
    save("llama", folder / "llama")
    (folder / "text.txt").write_text("a b b a . a b\n\nb a b b\n\n" * 40)
    (folder / "word.txt").write_text("a")
    (folder / "long.txt").write_text("a b b a . a b\n\nb a b b\n\n" * 120)
    run = folder / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"name": "tiny", "config": {"lr": 0.1}, "seed": 1}))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "kind": "train", "values": {"loss": 2.0}, "seconds": 1}))
    (run / "result.json").write_text(json.dumps({"metrics": {"loss": 2.0}, "tables": {"t": [{"a": 1}]}}))
    return folder


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
