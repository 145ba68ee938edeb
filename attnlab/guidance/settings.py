"""The settings of attention guidance, and the weight of its loss over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from attnlab.fields import check_fields, expect
from attnlab.guidance.heads import assign_heads
from attnlab.patterns import pattern_names
from attnlab.trace import Kind

__all__ = ["Guidance"]


@dataclass(frozen=True)
class Guidance:
    """Which heads are pulled to which pattern, and how strongly: L = L_task + alpha(t) L_AG (AG, eq. 4).

    ``heads`` says how many heads each pattern has in every layer; or ``fraction`` (lambda) of each layer's heads is
    shared out among ``patterns``, every one of which is guided in some layer. alpha is ``alpha0`` for the share
    ``hold`` of the run and then falls linearly to 0 at the last of ``steps``; ``schedule="constant"`` never falls.
    ``reduction="paper"`` averages over n x n cells, so the term shrinks like 1/n: the paper's alpha0 of 10 or 100
    belongs to n = 512. "row" sums over keys and averages over queries, which is n times as much: for the same pull
    divide alpha0 by n.

    >>> [Guidance(heads={"next": 1}, alpha0=10, hold=0.5, steps=5).weight(step) for step in range(5)]
    [10.0, 10.0, 10.0, 5.0, 0.0]
    """

    heads: Mapping[str, int] | None = None
    fraction: float | None = None
    patterns: tuple[str, ...] = ("next", "prev", "first", "period", "delim")
    alpha0: float | int = 10.0
    # A share of the run. With 0.3 our masked language models left their plateau (papers/guidance).
    hold: float = 0.3
    # None: whatever trains the model fills in the length of its run, as guide_trainer does.
    steps: int | None = None
    schedule: Literal["linear", "constant"] = "linear"
    reduction: Literal["paper", "row"] = "paper"
    # None: every layer.
    layers: tuple[int, ...] | None = None
    # None: the model's self-attention, of which it may have one kind.
    kind: Kind | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_heads()
        for name in self.names:
            if name not in pattern_names():
                raise ValueError(f"no pattern named {name!r}; the patterns are {', '.join(pattern_names())}")
        if self.schedule not in ("linear", "constant"):
            raise ValueError(f"schedule must be 'linear' or 'constant', got {self.schedule!r}")
        if self.reduction not in ("paper", "row"):
            raise ValueError(f"reduction must be 'paper' or 'row', got {self.reduction!r}")
        if self.alpha0 < 0:
            raise ValueError(f"alpha0 must not be negative, got {self.alpha0}")
        if not 0 <= self.hold < 1:
            raise ValueError(
                f"hold is a share of the run, at least 0 and below 1, got {self.hold}; for the first 200 of 1,000 "
                "steps give 0.2"
            )
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    def _check_heads(self) -> None:
        if (self.heads is None) == (self.fraction is None):
            raise ValueError('give either heads={"next": 1, ...} or fraction=0.5, and not both')
        if self.fraction is not None and not (0 < self.fraction <= 1 and self.patterns):
            raise ValueError(f"fraction must lie in (0, 1] and have patterns to share, got {self.fraction}")
        if len(set(self.patterns)) < len(self.patterns):
            raise ValueError(f"patterns names one twice: {', '.join(self.patterns)}")
        if self.heads is not None:
            expect("heads", self.heads, Mapping, 'a mapping such as {"next": 1, "prev": 2}')
        for name, count in (self.heads or {}).items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"heads[{name!r}] must be a number of heads, got {count!r}")
        if self.heads is not None and not sum(self.heads.values()):
            raise ValueError("heads guides no head; give at least one pattern a head")

    @property
    def names(self) -> tuple[str, ...]:
        """The patterns that heads are guided to."""
        return self.patterns if self.heads is None else tuple(name for name, count in self.heads.items() if count)

    @property
    def label(self) -> str:
        """The guided patterns in one word, such as next+prev."""
        return "+".join(self.names)

    def assign(self, n_heads: int, *, layer: int = 0, n_layers: int = 1) -> dict[str, range]:
        """The heads of each pattern in a layer of ``n_heads``, number ``layer`` of ``n_layers`` guided ones.

        By default a model of one guided layer: patterns for which it has too few heads are refused.
        """
        return assign_heads(
            self.heads,
            fraction=self.fraction,
            patterns=self.patterns,
            n_heads=n_heads,
            layer=layer,
            n_layers=n_layers,
        )

    def over(self, steps: int) -> Guidance:
        """The same for a run of ``steps`` steps, where none were given."""
        return self if self.steps is not None else replace(self, steps=steps)

    def weight(self, step: int) -> float:
        """alpha(t) at step t, the first of which is 0; in a run of two or more steps it is 0 at the last."""
        if self.schedule == "constant":
            return float(self.alpha0)
        if self.steps is None:
            raise ValueError(
                "alpha falls to 0 at the last step, and the length of the run is not known: give "
                "Guidance(steps=...), or schedule='constant'"
            )
        elapsed = min(1.0, step / max(1, self.steps - 1))
        return float(self.alpha0 if elapsed <= self.hold else self.alpha0 * (1 - elapsed) / (1 - self.hold))
