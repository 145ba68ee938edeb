"""Random keys: the control that every other policy has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.caches import KeyScore, Moment, policy
from attnlab.shapes import Float

__all__ = ["RandomKeys"]


@policy("random")
@dataclass(frozen=True)
class RandomKeys(KeyScore):
    """A number drawn once for each token and head; rows of a batch draw alike, so that each is what it is alone."""

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        b, g, n_k = moment.held.shape
        draws = torch.Generator().manual_seed(moment.seed * 1009 + moment.place.layer)
        # Number t of a head belongs to token t, however many are drawn.
        drawn = torch.rand(max(1, *moment.read), g, generator=draws).to(moment.call.k).T.expand(b, -1, -1)
        numbers = moment.numbers().clamp_max(drawn.shape[-1] - 1)
        fresh = drawn.gather(-1, numbers[:, None].expand(-1, g, -1))
        past = moment.past("draw")[..., : n_k - numbers.shape[1]]
        score = moment.gathered.per_key["draw"] = torch.cat([past, fresh], -1)
        return score
