"""A run's progress: one line that is rewritten on a terminal, one line for each evaluation elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Mapping

__all__ = ["ProgressLine"]


class ProgressLine:
    """Rate and time left on standard error; ``quiet`` (ranks other than the first) writes nothing.

    ``tokens`` are those of a step, where they are known: the rate is theirs then.
    """

    def __init__(self, steps: int, *, start: int = 0, quiet: bool = False, tokens: int | None = None) -> None:
        self.steps, self.quiet, self.tokens = steps, quiet, tokens
        self.live = sys.stderr.isatty() and not quiet
        self.shown = time.perf_counter()
        # The last ten seconds, so that compilation and evaluations soon stop counting in the rate.
        self.recent = deque([(self.shown, start)], maxlen=50)
        self.loss: float | None = None

    def step(self, step: int) -> None:
        """Rewrite the line, at most five times a second."""
        now = time.perf_counter()
        if not self.live or (now - self.shown < 0.2 and step < self.steps):
            return
        self.shown = now
        self.recent.append((now, step))
        since, first = self.recent[0]
        rate = (step - first) / max(now - since, 1e-9)
        loss = "" if self.loss is None else f"  loss {self.loss:.4f}"
        left = duration((self.steps - step) / rate) if rate else "?"
        speed = f"{rate:.1f} steps/s" if self.tokens is None else f"{rate * self.tokens:,.0f} tokens/s"
        self._write(f"\r\x1b[Kstep {step}/{self.steps}{loss}  {speed}  {left} left")

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """One lasting line: the evaluation's values."""
        if not self.quiet:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in _once(values).items())
            clear = "\r\x1b[K" if self.live else ""
            self._write(f"{clear}step {step}/{self.steps}  {shown}\n")

    def close(self) -> None:
        """End the terminal's line."""
        if self.live:
            self._write("\n")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _once(values: Mapping[str, float]) -> dict[str, float]:
    """The values without that of the only term of a loss, which is the loss itself.

    >>> _once({"valid/loss": 2.0, "valid/causal-lm": 2.0, "test/loss": 3.0, "test/mlm": 2.5, "test/guidance": 0.5})
    {'valid/loss': 2.0, 'test/loss': 3.0, 'test/mlm': 2.5, 'test/guidance': 0.5}
    """
    sets = Counter(name.rpartition("/")[0] for name in values)

    def repeats(name: str, value: float) -> bool:
        own, _, term = name.rpartition("/")
        return term != "loss" and sets[own] == 2 and value == values.get(f"{own}/loss")

    return {name: value for name, value in values.items() if not repeats(name, value)}


def duration(seconds: float) -> str:
    """Seconds as hours, minutes and seconds.

    >>> duration(3725)
    '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
