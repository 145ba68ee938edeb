"""TOVA: drop what the latest query attends to least (Oren et al., 2024, arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnlab.caches import KeyScore, Moment, policy
from attnlab.shapes import Float

__all__ = ["TOVA"]


@policy("tova")
@dataclass(frozen=True)
class TOVA(KeyScore):
    """alpha_nj of the latest query n, the mean over all heads of the layer, which keep the same keys.

    Oren et al. were the first to ask the latest query alone. Its own key stays, which the paper does not demand.
    """

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        return moment.last_weights(1).mean((1, 2, 3)).unsqueeze(1).expand(moment.held.shape)

    def recent(self, budget: int) -> int:
        return 1

    def cannot(self) -> dict[str, str]:
        return {"shared": "all heads of a layer keep the same keys, so they have no budgets to share"}
