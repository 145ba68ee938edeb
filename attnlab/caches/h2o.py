"""H2O, heavy hitters: the keys that received most attention so far (Zhang et al., 2023, arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.attention import grouped, query_chunks, visible
from attnlab.caches import KeyScore, Moment, policy
from attnlab.fields import check_fields
from attnlab.shapes import Float

__all__ = ["H2O", "attention_mass"]


@policy("h2o", also="mass", examples=("h2o", "h2o:average=true"))
@dataclass(frozen=True)
class H2O(KeyScore):
    """sum_i alpha_ij over all queries so far, half of the budget for the latest keys.

    H2O was the first to evict by accumulated attention, with Scissorhands (Liu et al., 2023). ``average`` divides by
    the number of queries that could see the key, which takes away the advantage of old keys.
    """

    average: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        mass = attention_mass(moment)
        return mass / moment.add("queries", _queries(moment)).clamp_min(1) if self.average else mass


def attention_mass(moment: Moment) -> Float[Tensor, "b g k"]:
    """The attention that each key received from all queries so far."""
    return moment.add("mass", sum((W.sum((2, 3)) for W in moment.weights()), moment.call.k.new_zeros(())))


def _queries(moment: Moment) -> Float[Tensor, "b g k"]:
    """How many queries of this call, over the heads of a group, could see each key."""
    call = moment.call
    count, first = call.k.new_zeros(moment.held.shape), 0
    for part in query_chunks(call):
        b, h, n_q, n_k = part.sizes
        seen = visible(part)
        seen = call.q.new_ones(1, 1, 1, 1, dtype=torch.bool) if seen is None else seen
        if moment.real is not None:
            seen = seen & moment.real[:, None, first : first + n_q, None]
        first += n_q
        count += grouped(seen.expand(b, h, n_q, n_k).sum(2), call.groups).sum(2).to(count.dtype)
    return count
