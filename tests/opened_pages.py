"""Helpers for pages: the Python blocks of the docs, run in order; and an HTML page on a screen of some width."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.adapters.named_models import found_models

ROOT = Path(__file__).resolve().parent.parent
# Set ATTNLAB_SCREENSHOTS to a folder to keep the pictures and look at them.
SCREENSHOTS = os.environ.get("ATTNLAB_SCREENSHOTS")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language (empty where none is named), its text, and the line of its fence."""

    language: str
    source: str
    line: int


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a page's text, in order.

    >>> [(block.language, block.source) for block in blocks_of("```python\\n1\\n```\\nText.\\n```\\nls\\n```\\n")]
    [('python', '1\\n'), ('', 'ls\\n')]
    """
    found: list[Block] = []
    opened: tuple[str, int] | None = None
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"\s*(?:```+|~~~+)\s*(.*)", line)
        if fence is None:
            inside.append(line)
        elif opened is None:
            opened, inside = (fence.group(1), number), []
        else:
            found.append(Block(opened[0], "".join(f"{one}\n" for one in inside), opened[1]))
            opened = None
    assert opened is None, f"the fence of line {opened} is not closed"
    return found


def page_blocks(page: str) -> list[Block]:
    """The fenced blocks of a page of the repository."""
    return blocks_of((ROOT / page).read_text(encoding="utf-8"))


def python_blocks(page: str) -> list[str]:
    """The Python of a page that runs."""
    return [block.source for block in page_blocks(page) if block.language == "python"]


def missing_models(page: str) -> list[str]:
    """The named models that a page's Python loads and that are not on this machine."""
    text = "".join(python_blocks(page))
    return [name for name, file in found_models().items() if file is None and f'load_model("{name}")' in text]


def run_blocks(page: str) -> dict[str, Any]:
    """Run a page's Python in one namespace, and return that."""
    names: dict[str, Any] = {"__name__": "page"}
    blocks = python_blocks(page)
    assert blocks, f"{page} has no Python"
    for block in blocks:
        exec(compile(block, page, "exec", dont_inherit=True), names)
    return names


def assert_fits(page: Any, picture: str, *, width: int, within: str, scrolls: str, folder: Path) -> None:
    """Nothing of ``within`` reaches beyond the screen, except inside of what ``scrolls``; and something is drawn."""
    path = Path(SCREENSHOTS or folder) / picture
    # A picture of the whole page takes longer than all other steps together.
    page.screenshot(path=str(path), full_page=SCREENSHOTS is not None)
    assert path.stat().st_size > 20_000
    assert page.evaluate("document.documentElement.scrollWidth") == width
    outside = page.evaluate(
        """([within, scrolls]) => [...document.querySelectorAll(within)].filter((node) => {
            const box = node.getBoundingClientRect();
            return !node.closest(scrolls) && box.width > 0 && (box.right > innerWidth + 1 || box.left < -1);
        }).map((node) => node.outerHTML.slice(0, 120))""",
        [f"{within} *", scrolls],
    )
    assert outside == []
