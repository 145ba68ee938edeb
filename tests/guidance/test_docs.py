"""The page's example runs."""

from __future__ import annotations

import re
from pathlib import Path

from attnlab.guidance import GuidanceTerm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guidance.md"


def test_the_example_runs() -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, object] = {"__name__": "guidance_page"}
    exec(compile(source, "guidance.md", "exec", dont_inherit=True), names)
    assert isinstance(names["term"], GuidanceTerm)
    assert names["best"]["closeness"] > 0.2
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in names["model"].parameters())
