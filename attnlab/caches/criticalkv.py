"""CriticalKV: attention, then attention times what the value adds after W_O (Feng et al., 2025, arXiv 2502.03805)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.attention import grouped
from attnlab.caches.contract import Moment, ranks
from attnlab.caches.registry import policy
from attnlab.caches.snapkv import SnapKV
from attnlab.shapes import Float

__all__ = ["CriticalKV"]


@policy("criticalkv", examples=("criticalkv:window=2,kernel=3",))
@dataclass(frozen=True)
class CriticalKV(SnapKV):
    """SnapKV's scores a_j for the ``first`` half of the budget, then (a_j + epsilon) |W_O v_j|_1.

    |W_O v_j|_1 is the mean over the heads of a group. Feng et al. were the first to choose keys by a bound on the error
    of the output after W_O.
    """

    first: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.first <= 1:
            raise ValueError(f"first must be a share from 0 to 1, got {self.first}")
        if self.epsilon < 0:
            raise ValueError(f"epsilon must be at least 0, got {self.epsilon}")

    def cannot(self) -> dict[str, str]:
        return {"shared": "its two stages divide the budget of each head"}

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        votes = super().score(moment)
        sure = moment.sure.sum(-1, keepdim=True)
        stage = moment.per_row([int(budget * self.first) for budget in moment.budgets]) - sure
        among_others = ranks(votes.masked_fill(moment.sure | ~moment.held, -torch.inf))
        second = (votes + self.epsilon) * self._added(moment)
        return second.masked_fill(~moment.sure & (among_others < stage), torch.inf)

    def _added(self, moment: Moment) -> Float[Tensor, "b g k"]:
        """|W_O v_j|_1 of each key, the mean over the query heads that read it."""
        projection, call = moment.place.projection, moment.call
        if projection is None:
            raise ValueError(
                "criticalkv asks what a value adds after W_O, and the output projection of this layer is not known"
            )
        heads, width = call.q.shape[1], call.v.shape[-1]
        parts = grouped(projection.to(call.v).T.reshape(1, heads, width, -1), call.groups)[0]
        norms = [(call.v @ part).norm(p=1, dim=-1) for part in parts.unbind(1)]
        return torch.stack(norms).mean(0)
