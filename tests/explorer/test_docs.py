"""The Python blocks of docs/explorer.md run, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnlab.explorer import read_timeline

PAGE = Path(__file__).parent.parent.parent / "docs" / "explorer.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    assert (tmp_path / "page.html").stat().st_size > 50_000
    assert read_timeline(tmp_path / "runs" / "guided").steps[0].step == 100
