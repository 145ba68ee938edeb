"""The progress of a long command: a bar on a terminal from its first second, a line per finished part elsewhere."""

from __future__ import annotations

import sys

from tqdm import tqdm

__all__ = ["Progress"]


class Progress:
    """Steps done of the steps expected, on standard error.

    Without a terminal nothing is shown, or with ``plain`` one line for each part that is finished.
    """

    def __init__(self, name: str, *, plain: bool = False) -> None:
        self.name, self.plain = name, plain and not sys.stderr.isatty()
        style = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
        self.bar = tqdm(total=1, desc=name, disable=None, bar_format=style, leave=False, dynamic_ncols=True)
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

    def step(self, steps: int = 1) -> None:
        """This many steps are done."""
        self.bar.update(steps)

    def finished(self, part: str) -> None:
        """One part is finished, which stays to be read where there is no bar."""
        if self.plain:
            print(f"{self.name}: {part}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        self.bar.close()
