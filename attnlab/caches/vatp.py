"""VATP: accumulated attention times the value's norm (Guo et al., 2024, arXiv 2406.12335)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnlab.caches import KeyScore, Moment, policy
from attnlab.caches.h2o import attention_mass
from attnlab.shapes import Float

__all__ = ["VATP"]


@policy("vatp", also="mass-norm")
@dataclass(frozen=True)
class VATP(KeyScore):
    """|v_j|_1 sum_i alpha_ij, over H2O's sum.

    Guo et al. were the first to weigh attention by the value's norm in a cache; Kobayashi et al. (2020) did so to read
    attention.
    """

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        return attention_mass(moment) * moment.call.v.abs().sum(-1)
