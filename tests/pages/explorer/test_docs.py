"""The Python blocks of docs/explorer.md run, in order, in one namespace."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnlab.pages.explorer import read_timeline
from tests.opened_pages import run_blocks


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks("docs/explorer.md")
    assert (tmp_path / "page.html").stat().st_size > 50_000
    assert read_timeline(tmp_path / "runs" / "guided").steps[0].step == 100
