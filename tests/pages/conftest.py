"""One tab for all tests of a process: each test opens its files in it, on a screen of its choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

OpenPage = Callable[..., Any]


@dataclass
class Tab:
    """A browser tab, and what went wrong in it or was requested from elsewhere."""

    page: Any
    file: str = ""
    trouble: list[str] = field(default_factory=list)

    def listen(self) -> None:
        self.page.on("console", lambda message: self.trouble.append(message.text))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("dialog", lambda dialog: self.trouble.append(dialog.message))
        self.page.on("request", self._note_request)

    def _note_request(self, request: Any) -> None:
        if not request.url.startswith((self.file, "blob:", "data:image/")):
            self.trouble.append(request.url)


@pytest.fixture(scope="session")
def tab(browser: Any) -> Iterator[Tab]:
    """A new tab costs as much as many tests do, so there is one; it is offline."""
    context = browser.new_context(offline=True, accept_downloads=True)
    tab = Tab(context.new_page())
    tab.listen()
    yield tab
    context.close()


@pytest.fixture
def open_page(tab: Tab) -> Iterator[OpenPage]:
    """Open a file on a screen; at the end of the test no error, message or request may have come from it."""
    tab.trouble.clear()

    def open_file(path: Path, *, width: int = 1280, scheme: str = "light", fragment: str = "") -> Any:
        page = tab.page
        # Away from the page, or the pointer of the last test would hover over this one.
        page.mouse.move(0, 0)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        tab.file = path.as_uri()
        page.goto(tab.file + (f"#{fragment}" if fragment else ""))
        return page

    yield open_file
    tab.page.goto("about:blank")
    assert tab.trouble == []
