"""Attention that is not learned: uniform over what a query sees, or all on one position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, normalise, visible
from attnlab.registry import register
from attnlab.shapes import Float

__all__ = ["Position", "Uniform"]

UNREAD = {
    "keys_hidden_from_all_may_be_nan": "queries and keys are not read, so the output has no gradient by them",
    "a_bias_moves_the_weights": "there are no scores to add it to; only what a bias hides counts",
}


@register("uniform")
@dataclass(frozen=True)
class Uniform(Mechanism):
    """W_ij = 1 / (the keys that query i sees): attention before it is learned (KTIW, 3.2).

    >>> Uniform().weights(AttentionCall(*torch.randn(3, 1, 1, 2, 4), causal=True)).tolist()
    [[[[1.0, 0.0], [0.5, 0.5]]]]
    """

    exempt = UNREAD

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        return normalise(_seen(call))


@register("position", examples=("position", "position:at=2"))
@dataclass(frozen=True)
class Position(Mechanism):
    """All weight on the key number ``at`` of those a query sees, counted from 0; none where it sees fewer.

    What a model answers under it is the lexical probe of that position (KTIW, Eq. 4).
    """

    at: int = 0

    exempt = UNREAD

    def __post_init__(self) -> None:
        if isinstance(self.at, bool) or not isinstance(self.at, int) or self.at < 0:
            raise ValueError(f"at must be a position counted from 0, got {self.at!r}")

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        seen = _seen(call)
        return seen * (seen.cumsum(-1) == self.at + 1)


def _seen(call: AttentionCall) -> Float[Tensor, "b h q k"]:
    """1 where a query sees a key, else 0."""
    seen = visible(call)
    ones = torch.ones(call.sizes, dtype=call.q.dtype, device=call.q.device)
    return ones if seen is None else ones * seen
