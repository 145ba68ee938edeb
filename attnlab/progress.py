"""The progress of a long command: a bar on a terminal from its first second, a line per finished part elsewhere."""

from __future__ import annotations

import math
import sys
import time

from tqdm import tqdm

__all__ = ["Progress"]

# Seconds without a line after which the next stage is one, where there is no bar.
QUIET = 10.0


class Progress:
    """Steps done of the steps expected, on standard error.

    Without a terminal nothing is shown, or with ``plain`` a line for the first stage, for each part that is finished,
    and for what is being done where no line came for some seconds.
    """

    def __init__(self, name: str, *, plain: bool = False) -> None:
        self.name, self.plain = name, plain and not sys.stderr.isatty()
        style = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
        self.bar = tqdm(total=1, desc=name, disable=None, bar_format=style, leave=False, dynamic_ncols=True)
        self._last_line = -math.inf
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
