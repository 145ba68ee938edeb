"""The settings of attention guidance, and the weight of its loss over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from attnlab.guidance.heads import assign_heads
from attnlab.patterns import pattern_names
from attnlab.trace import Kind

__all__ = ["Guidance"]


@dataclass(frozen=True)
class Guidance:
    """Which heads are pulled to which pattern, and how strongly: L = L_task + alpha(t) L_AG (AG, eq. 4).

    ``heads`` says how many heads each pattern has; or ``fraction`` (lambda) of the heads is shared out among
    ``patterns``. alpha is ``alpha0`` for ``hold`` steps and then falls linearly to 0 at the last of ``steps``;
    ``schedule="constant"`` never falls. ``reduction="paper"`` averages over n x n cells, so the term shrinks like 1/n:
    the paper's alpha0 of 10 or 100 belongs to n = 512. "row" sums over keys and averages over queries, which is n times
    as much: for the same pull divide alpha0 by n.

    >>> Guidance(heads={"next": 1}, alpha0=10, hold=2, steps=7).weight(4)
    5.0
    """

    heads: Mapping[str, int] | None = None
    fraction: float | None = None
    patterns: tuple[str, ...] = ("next", "prev", "first", "period", "delim")
    alpha0: float | int = 10.0
    hold: int = 20_000
    steps: int | None = None
    schedule: Literal["linear", "constant"] = "linear"
    reduction: Literal["paper", "row"] = "paper"
    # None: every layer.
    layers: tuple[int, ...] | None = None
    # None: the model's self-attention, of which it may have one kind.
    kind: Kind | None = None

    def __post_init__(self) -> None:
        self._check_heads()
        for name in self.names:
            if name not in pattern_names():
                raise ValueError(f"no pattern named {name!r}; the patterns are {', '.join(pattern_names())}")
        if self.schedule not in ("linear", "constant"):
            raise ValueError(f"schedule must be 'linear' or 'constant', got {self.schedule!r}")
        if self.reduction not in ("paper", "row"):
            raise ValueError(f"reduction must be 'paper' or 'row', got {self.reduction!r}")
        if self.alpha0 < 0 or self.hold < 0:
            raise ValueError(f"alpha0 and hold must not be negative, got {self.alpha0} and {self.hold}")

    def _check_heads(self) -> None:
        if (self.heads is None) == (self.fraction is None):
            raise ValueError('give either heads={"next": 1, ...} or fraction=0.5, and not both')
        if self.fraction is not None and not (0 < self.fraction <= 1 and self.patterns):
            raise ValueError(f"fraction must lie in (0, 1] and have patterns to share, got {self.fraction}")
        for name, count in (self.heads or {}).items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"heads[{name!r}] must be a number of heads, got {count!r}")
        if self.heads is not None and not sum(self.heads.values()):
            raise ValueError("heads guides no head; give at least one pattern a head")

    @property
    def names(self) -> tuple[str, ...]:
        """The patterns that heads are guided to."""
        return self.patterns if self.heads is None else tuple(self.heads)

    def assign(self, n_heads: int) -> dict[str, range]:
        """The heads of each pattern in a layer of ``n_heads``."""
        return assign_heads(self.heads, fraction=self.fraction, patterns=self.patterns, n_heads=n_heads)

    def weight(self, step: int) -> float:
        """alpha(t) at step t, the first of which is 0."""
        if self.schedule == "constant" or step <= self.hold:
            return float(self.alpha0)
        if self.steps is None:
            raise ValueError("schedule='linear' falls to 0 at the last step: give steps=, or schedule='constant'")
        last = self.steps - 1
        return self.alpha0 * max(0, last - step) / max(1, last - self.hold)
