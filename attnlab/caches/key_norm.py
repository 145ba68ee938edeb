"""Key norm: the keys of smallest length (Devoto et al., 2024, arXiv 2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnlab.caches import KeyScore, Moment, policy
from attnlab.shapes import Float

__all__ = ["KeyNorm"]


@policy("key-norm")
@dataclass(frozen=True)
class KeyNorm(KeyScore):
    """-|k_j|_2: short keys receive much attention in trained decoders.

    Devoto et al. were the first to evict by the key's norm.
    """

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        return -moment.call.k.norm(dim=-1)

    def recent(self, budget: int) -> int:
        return 0
