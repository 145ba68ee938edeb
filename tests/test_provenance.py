"""The commit that a result carries is the commit of the code that made it, or says that it is not known."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from attnlab.provenance import commit_of, file_sha256


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
