"""SnapKV: the keys that the last queries of the prompt attend to (Li et al., 2024, arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from attnlab.caches import KeyScore, Moment, policy
from attnlab.fields import check_fields, check_int
from attnlab.shapes import Float

__all__ = ["SnapKV"]


@policy("snapkv", examples=("snapkv:window=2,kernel=3",))
@dataclass(frozen=True)
class SnapKV(KeyScore):
    """pool_j(mean_i alpha_ij) over the last ``window`` queries i, the mean over a group's heads.

    Li et al. were the first to let an observation window at the prompt's end vote and to pool the votes over ``kernel``
    neighbouring keys. The keys of the window stay. After every step (``when="step"``, not in the paper) the window's
    rows are those that were computed when its queries were read.
    """

    window: int = 32
    kernel: int = 5

    when = "prefill"

    def __post_init__(self) -> None:
        check_fields(self)
        check_int("window", self.window, least=1)
        check_int("kernel", self.kernel, least=1)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, so that it has a middle, got {self.kernel}")

    def recent(self, budget: int) -> int:
        return self.window

    def least_recent(self) -> int:
        return self.window

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        votes = self._votes(moment)
        # Keys side by side: places that hold none come first, as zeros.
        order = moment.held.to(torch.int8).argsort(dim=-1, stable=True)
        votes = votes.gather(-1, order)
        votes[..., max(0, votes.shape[-1] - self.window) :] = 0
        pooled = avg_pool1d(votes, self.kernel, stride=1, padding=self.kernel // 2)
        return torch.zeros_like(pooled).scatter(-1, order, pooled)

    def _votes(self, moment: Moment) -> Float[Tensor, "b g k"]:
        """The mean of the window's rows of W, each over the heads of a group."""
        rows = moment.last_weights(self.window).mean(2).mT
        if not moment.once:
            past = moment.past("window")
            rows = rows if past.dim() == 3 else torch.cat([past, rows], -1)
            rows = moment.gathered.per_key["window"] = rows[..., -self.window :]
        count = moment.per_row([min(max(1, n), self.window) for n in moment.read])
        return rows.sum(-1) / count
