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
# Seconds below which it is not said how many are left.
SHORT = 2.0

Item = TypeVar("Item")


class Progress:
    """Steps done of the steps expected, on standard error.

    Without a terminal nothing is shown, or with ``plain`` a line for each part that is finished, and for what is being
    done where no line came for some seconds, with the time that is left; ``at_once`` makes the first stage a line too.
    """

    def __init__(self, name: str, *, plain: bool = False, at_once: bool = False) -> None:
        self.name, self.plain = name, plain and not sys.stderr.isatty()
        style = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
        self.bar = tqdm(total=1, desc=name, disable=None, bar_format=style, leave=False, dynamic_ncols=True)
        self._quiet_until = time.monotonic() + (0 if at_once else QUIET)
        # What comes before the first step, such as reading a model, says nothing of how long a step takes.
        self._first_step_at: float | None = None
        # The step that stands for the start is taken back with the first ones that are expected.
        self.expected = self.done = 0
        self._stage: str | None = None

    def expect(self, steps: int) -> None:
        """This many more steps are to come."""
        if self._first_step_at is None:
            self._first_step_at = time.monotonic()
            self.bar.reset()
        self.expected += steps
        self.bar.total = self.expected
        self.bar.refresh()

    def stage(self, what: str) -> None:
        """What is being done now."""
        self._stage = what
        self.bar.set_description(f"{self.name}: {what}")
        if time.monotonic() >= self._quiet_until:
            self.finished(what)

    def step(self, steps: int = 1) -> None:
        """This many steps are done."""
        self.done += steps
        self.bar.update(steps)
        if self._stage is not None and time.monotonic() >= self._quiet_until:
            self.finished(self._stage)

    def finished(self, part: str) -> None:
        """One part is finished, which stays to be read where there is no bar."""
        self._quiet_until = time.monotonic() + QUIET
        if self.plain:
            print(f"{self.name}: {part}{self._left()}", file=sys.stderr, flush=True)

    def _left(self) -> str:
        """The time that the steps to come take, if they go as those before; nothing where it is not known or short."""
        if self._first_step_at is None or not 0 < self.done < self.expected:
            return ""
        seconds = (time.monotonic() - self._first_step_at) / self.done * (self.expected - self.done)
        return f", about {tqdm.format_interval(seconds)} left" if seconds >= SHORT else ""

    def close(self) -> None:
        """Take the bar away."""
        self.bar.close()


class _Shown:
    """The progress of what runs in this process, without handing it from function to function."""

    progress: Progress | None = None


@contextmanager
def showing(name: str, *, at_once: bool = True) -> Iterator[None]:
    """Inside, ``each`` and ``note`` show the progress of what is called ``name``; elsewhere they are silent.

    Without a terminal the first line comes ``at_once``, or after some seconds.
    """
    _Shown.progress = Progress(name, plain=True, at_once=at_once)
    try:
        yield
    finally:
        _Shown.progress.close()
        _Shown.progress = None


def note(what: str) -> None:
    """What has just been done, or is being done; without a terminal at most one line in some seconds."""
    if _Shown.progress is not None:
        _Shown.progress.stage(what)


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
