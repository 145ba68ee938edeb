"""The page's code runs, and every name in its table exists in the package."""

from __future__ import annotations

import re
from pathlib import Path

import attnlab.dynamics

PAGE = (Path(__file__).parents[2] / "docs" / "dynamics.md").read_text(encoding="utf-8")


def test_the_code_runs() -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(source, "dynamics.md", "exec", dont_inherit=True), {"__name__": "page"})


def test_the_table_names_what_exists() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "`" in line]
    named = {name for line in rows for name in re.findall(r"`(\w+)`", line)}
    assert named <= set(attnlab.dynamics.__all__)
    assert {name for name in attnlab.dynamics.__all__ if name.islower()} - named == {"bitext", "pad_rows"}
