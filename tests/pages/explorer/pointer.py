"""What tests do with the explorer's page: point at a cell, read its value, save a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .conftest import settle

Look = Callable[..., Any]

MINUS = "\N{MINUS SIGN}"


def point_at(page: Any, query: int, key: int, pane: int = 0) -> str:
    """Put the pointer on a cell; returns the text of the readout."""
    canvas = page.locator(".x-large").nth(pane)
    canvas.scroll_into_view_if_needed()
    left, over, size, x, y = map(float, canvas.get_attribute("data-frame").split())
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + left + (key + 0.5 - x) * size, box["y"] + over + (query + 0.5 - y) * size)
    settle(page)
    return page.locator(".x-readout").nth(pane).inner_text()


def value_and_error(readout: str) -> tuple[float, float]:
    """(value, error) in a readout."""
    value, error = re.search(r": (\S+) ± (\S+)$", readout.replace(MINUS, "-")).groups()
    # Both are rounded for reading, the error to two digits.
    return float(value), float(error) * 1.06


def save(page: Any, kind: str) -> bytes:
    with page.expect_download() as waiting:
        page.click(f"[data-export={kind}]")
    return Path(waiting.value.path()).read_bytes()


def title(page: Any) -> str:
    return page.inner_text(".x-head h2")
