"""The commit that a result carries is the commit of the code that made it, or says that it is not known.

And every results file of the repository says by which commit, command and program it was made, or why it cannot.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from attnlab.commands.table import COMMANDS
from attnlab.provenance import commit_of, file_sha256
from papers.common.folders import experiments_like
from papers.common.sources import KNOWN, misplaced, unexplained, writer_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted(path for folder in ("papers", "benchmarks") for path in (ROOT / folder / "results").glob("*.json"))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with one commit."""
    monkeypatch.delenv("ATTNLAB_COMMIT", raising=False)
    (tmp_path / "code.py").write_text("x = 1\n")
    as_tester = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "code.py"], [*as_tester, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def head(tree: Path) -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tree, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_clean_tree_is_at_its_head_whatever_an_old_file_says(tree: Path) -> None:
    (tree / "COMMIT").write_text("old\n")
    assert commit_of(tree) == head(tree)


def test_files_that_differ_from_the_head_are_not_passed_off_as_it(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "code.py").write_text("x = 2\n")
    assert commit_of(tree) == f"{head(tree)}-changed"
    monkeypatch.setenv("ATTNLAB_COMMIT", "from-the-variable")
    assert commit_of(tree) == "from-the-variable"
    (tree / "COMMIT").write_text("from-the-file\n")
    assert commit_of(tree) == "from-the-file"


def test_without_git_the_commit_is_carried_or_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNLAB_COMMIT", raising=False)
    assert commit_of(tmp_path) is None
    (tmp_path / "COMMIT").write_text("carried\n")
    assert commit_of(tmp_path) == "carried"


@pytest.mark.parametrize("size", [0, 5, (1 << 20) + 7])
def test_the_checksum_of_a_file_is_that_of_its_bytes(tmp_path: Path, size: int) -> None:
    content = bytes(i % 251 for i in range(size))
    (tmp_path / "file").write_bytes(content)
    assert file_sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_results_file_says_where_it_comes_from_or_why_it_cannot(path: Path) -> None:
    result = read(path)
    assert unexplained(result) == []
    assert misplaced(result) == []
    reasons = result.get("unknown") or {}
    assert set(reasons) <= set(KNOWN)
    assert [name for name in reasons if name != "writer" and result.get(name)] == [], (
        "known, with a reason why it is not"
    )
    if result.get("commit"):
        assert re.fullmatch(r"[0-9a-f]{40}(-changed)?", result["commit"])


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_program_that_writes_a_results_file_is_there(path: Path) -> None:
    writer = writer_of(read(path))
    if writer is None:
        assert read(path)["unknown"]["writer"]
        return
    match writer.split():
        case ["python", "-m", "papers", experiment]:
            assert experiment in experiments_like(None)
        case ["attnlab", command] | ["python", "-m", "attnlab", command]:
            assert command in COMMANDS
        case ["python", "-m", module]:
            assert importlib.util.find_spec(module) is not None
        case ["python", script]:
            assert (ROOT / script).is_file()
        case _:
            pytest.fail(f"{path.name}: {writer} is no program of this repository")


def test_what_is_not_said_is_found() -> None:
    whole = {"device": "a CPU", "commit": "a" * 40, "command": "python -m papers claims"}
    assert unexplained(whole) == []
    assert unexplained({**whole, "command": None}) == ["command", "writer"]
    assert unexplained({**whole, "command": None, "writer": "python -m papers claims"}) == ["command"]
    assert unexplained({**whole, "commit": None, "unknown": {"commit": "the copy had no git"}}) == []
