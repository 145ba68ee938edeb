"""The progress of an experiment, on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from attnlab.progress import Progress

__all__ = ["each", "note", "showing"]

Item = TypeVar("Item")
# Seconds between the lines where there is no terminal.
BETWEEN = 5.0


class _Shown:
    """The bar of the experiment that runs in this process, and when a line was written last."""

    progress: Progress | None = None
    written: float | None = None


@contextmanager
def showing(name: str) -> Iterator[None]:
    """Inside, ``each`` and ``note`` show the progress of the experiment ``name``; elsewhere they are silent."""
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
    progress.stage(what)
    now = time.monotonic()
    if _Shown.written is None or now - _Shown.written > BETWEEN:
        _Shown.written = now
        progress.finished(what)


def each(items: Sequence[Item], label: Callable[[Item], str] = str) -> Iterator[Item]:
    """The items one after another; each is a step of the experiment."""
    progress = _Shown.progress
    if progress is not None:
        progress.expect(len(items))
    for number, item in enumerate(items, 1):
        note(f"{label(item)} ({number} of {len(items)})")
        yield item
        if progress is not None:
            progress.step()
