"""Scores of one prompt for several budgets: computed once where a policy does not ask for the budget."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

from attnlab.caches.contract import KeyScore, Moment
from attnlab.shapes import Float

__all__ = ["SharedScores"]

# What a policy may ask a moment for that depends on the budget.
OF_BUDGET = ("budgets", "recent", "sure")


class SharedScores:
    """Scores by policy and layer. Whether a policy asks for the budget is seen as it scores, so it need not say."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[Tensor, dict[str, Tensor]]] = {}
        # How many were not computed again.
        self.taken = 0

    def of(self, score: KeyScore, moment: Moment) -> Float[Tensor, "b g k"]:
        """``score.score(moment)``, with what that notes of the rows."""
        key = score, moment.place.layer, moment.sinks, moment.seed
        if key in self.known:
            self.taken += 1
            numbers, per_row = self.known[key]
            moment.gathered.per_row.update(per_row)
            return numbers
        watched = _Watched(**{f.name: getattr(moment, f.name) for f in fields(moment)})
        numbers = score.score(watched)
        if not watched.__dict__.get("asked", False):
            self.known[key] = numbers, dict(moment.gathered.per_row)
        return numbers


class _Watched(Moment):
    """A moment that notes whether it was asked for what depends on the budget."""

    def __getattribute__(self, name: str) -> Any:
        if name in OF_BUDGET:
            object.__getattribute__(self, "__dict__")["asked"] = True
        return object.__getattribute__(self, name)
