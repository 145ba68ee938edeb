"""What every test asks of a page: nothing went wrong, nothing was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnlab.pages.explorer import Exploration


@pytest.fixture
def look(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open an exploration; at the end of the test nothing may have been said, raised or requested."""
    opened: list[tuple[Any, list[str]]] = []

    def open_page(shown: Exploration, *, width: int = 1280, scheme: str = "light", fragment: str = "") -> Any:
        path = shown.save(tmp_path / f"page-{len(opened)}.html")
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True, accept_downloads=True
        )
        page = context.new_page()
        trouble: list[str] = []
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: trouble.append(dialog.message))
        own = path.as_uri()
        page.on("request", lambda r: trouble.append(r.url) if not r.url.startswith((own, "blob:", "data:")) else None)
        page.goto(own + (f"#{fragment}" if fragment else ""))
        settle(page)
        opened.append((page, trouble))
        return page

    yield open_page
    for page, trouble in opened:
        page.context.close()
        assert trouble == []


def settle(page: Any) -> None:
    """Wait until what was asked for is drawn."""
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
