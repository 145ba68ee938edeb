"""H2O, heavy hitters: the keys that received most attention so far (Zhang et al., 2023, arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnlab.attention import visible
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
    b, h, n_q, n_k = call.sizes
    seen = visible(call)
    if seen is None:
        return call.k.new_full(moment.held.shape, call.groups * n_q)
    seen = seen.expand(b, h, n_q, n_k)
    if moment.real is not None:
        seen = seen & moment.real[:, None, :, None]
    return seen.sum(2).unflatten(1, (-1, call.groups)).sum(2).to(call.k.dtype)
