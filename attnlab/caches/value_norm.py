"""Value norm: the keys whose values are longest; the half of VATP that looks at no query."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnlab.caches import KeyScore, Moment, policy
from attnlab.shapes import Float

__all__ = ["ValueNorm"]


@policy("value-norm")
@dataclass(frozen=True)
class ValueNorm(KeyScore):
    """|v_j|_1, without attention: a baseline for what the values alone say (after VATP, Guo et al., 2024)."""

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        return moment.call.v.abs().sum(-1)
