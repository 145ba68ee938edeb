"""The progress of a long command: a bar on a terminal from its first second, a line per finished part elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

__all__ = ["Progress", "each", "note", "showing"]

# Seconds without a line after which the next stage is one, where there is no bar.
QUIET = 10.0


class Progress:
    """Steps done of the steps expected, on standard error.

    Without a terminal nothing is shown, or with ``plain`` a line for each part that is finished, and for what is being
    done where no line came for some seconds.
    """

    def __init__(self, name: str, *, plain: bool = False) -> None:
        self.name, self.plain = name, plain and not sys.stderr.isatty()
        style = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
        self.bar = tqdm(total=1, desc=name, disable=None, bar_format=style, leave=False, dynamic_ncols=True)
        self._last_line = time.monotonic()
        # The step that stands for the start is taken back with the first ones that are expected.
        self.expected = 0

    def expect(self, steps: int) -> None:
        """This many more steps are to come."""
        self.expected += steps
        self.bar.total = self.expected
        self.bar.refresh()

    def stage(self, what: str) -> None:
        """What is being done now."""
        self.bar.set_description(f"{self.name}: {what}")
        if time.monotonic() - self._last_line >= QUIET:
            self._line(what)

    def step(self, steps: int = 1) -> None:
        """This many steps are done."""
        self.bar.update(steps)

    def finished(self, part: str) -> None:
        """One part is finished, which stays to be read where there is no bar."""
        self._line(part)

    def _line(self, what: str) -> None:
        if self.plain:
            self._last_line = time.monotonic()
            print(f"{self.name}: {what}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        self.bar.close()


# The progress of what runs in this process, without handing it from function to function.

Item = TypeVar("Item")
# Seconds between the lines where there is no terminal.
BETWEEN = 5.0


class _Shown:
    """The bar of what runs in this process, and when a line was written last."""

    progress: Progress | None = None
    written: float | None = None


@contextmanager
def showing(name: str) -> Iterator[None]:
    """Inside, ``each`` and ``note`` show the progress of what is called ``name``; elsewhere they are silent."""
    _Shown.progress, _Shown.written = Progress(name, plain=True), None
    try:
        yield
    finally:
        _Shown.progress.close()
        _Shown.progress = None


def note(what: str) -> None:
    """What has just been done, or is being done; without a terminal at most one line in some seconds."""
    progress = _Shown.progress
    if progress is None:
        return
    now = time.monotonic()
    if _Shown.written is None or now - _Shown.written > BETWEEN:
        _Shown.written = now
        progress.finished(what)
    progress.stage(what)


def each(items: Sequence[Item], label: Callable[[Item], str] = str) -> Iterator[Item]:
    """The items one after another; each is a step of what is shown."""
    progress = _Shown.progress
    if progress is not None:
        progress.expect(len(items))
    for number, item in enumerate(items, 1):
        note(f"{label(item)} ({number} of {len(items)})")
        yield item
        if progress is not None:
            progress.step()
