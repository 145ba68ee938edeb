"""KeyDiff: the keys least like the others (Park et al., 2025, arXiv 2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from attnlab.caches import KeyScore, Moment, policy
from attnlab.shapes import Float

__all__ = ["KeyDiff"]


@policy("keydiff")
@dataclass(frozen=True)
class KeyDiff(KeyScore):
    """-cos(k_j, mean_i k_i / |k_i|) over the keys held: needs neither queries nor values.

    Park et al. were the first to evict by the similarity of keys alone.
    """

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        k = moment.call.k
        # Places without a key hold zeros, which stay zeros.
        anchor = normalize(k, dim=-1).sum(2, keepdim=True) / moment.held.sum(-1).clamp_min(1)[..., None, None]
        return -cosine_similarity(k, anchor, dim=-1)

    def recent(self, budget: int) -> int:
        return 0
