"""How tests open the explorer and wait for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnlab.pages.explorer import Exploration
from tests.pages.conftest import OpenPage


@pytest.fixture
def look(open_page: OpenPage, tmp_path: Path) -> Callable[..., Any]:
    """Save an exploration under a new name, open it, and wait until it is drawn."""
    names = itertools.count()

    def open_exploration(exploration: Exploration, **screen: Any) -> Any:
        page = open_page(exploration.save(tmp_path / f"page-{next(names)}.html"), **screen)
        settle(page)
        return page

    return open_exploration


def settle(page: Any) -> None:
    """Wait until the page has drawn its state."""
    page.wait_for_selector("html[data-drawn]:not([data-drawing])", state="attached")


def until(page: Any, condition: str) -> None:
    """Wait for a condition in JavaScript; the page's policy forbids playwright's own way, which is eval."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(25)
    raise AssertionError(f"never came true: {condition}")


def press(page: Any, *keys: str) -> None:
    """Press keys, one after the other, each drawn before the next."""
    for key in keys:
        page.keyboard.press(key)
        settle(page)
