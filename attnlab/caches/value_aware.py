"""Value-aware: the values nearest to the mean output (OVA's ranking, asked of a cache)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnlab.attention import group_product
from attnlab.caches import KeyScore, Moment, policy
from attnlab.shapes import Float

__all__ = ["ValueAware"]


@policy("value-aware")
@dataclass(frozen=True)
class ValueAware(KeyScore):
    """2 <v_j, o> - |v_j|^2, with the mean output o of all queries so far (OVA, Gupta and Berant, 2021, Eq. 3).

    Ours is only its use in a cache, for comparison: it loses to attention mass.
    """

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        v, per_row = moment.call.v, moment.gathered.per_row
        outputs = sum((group_product(W, v).sum((2, 3)) for W in moment.weights()), v.new_zeros(()))
        per_row["outputs"] = total = outputs + per_row.get("outputs", 0)
        mean = total / (moment.per_row(moment.read).clamp_min(1) * moment.call.groups)
        return 2 * (v @ mean.unsqueeze(-1)).squeeze(-1) - v.square().sum(-1)
