"""ABC with random control: each token goes into a slot drawn by lot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from attnlab.attention import AttentionCall
from attnlab.fields import check_fields
from attnlab.mechanisms._bounded.slots import Control, SlotMechanism, check_slots, one_hot
from attnlab.registry import register
from attnlab.shapes import Int

__all__ = ["AbcRandom", "drawn_slots", "random_slot"]

# Layers of the same number but of another kind draw other slots.
KINDS = ("encoder", "decoder", "cross")

N = TypeVar("N", int, Tensor)


@register("abc-random", examples=("abc-random:slots=3", "abc-random:slots=3,normalise=read,one_draw=true"))
@dataclass(frozen=True)
class AbcRandom(SlotMechanism):
    """phi_t = e_i, i drawn uniformly over the slots for each token, head and layer (ABC, A.2 and Eq. 3).

    The draw is a function of ``seed``, ``stream``, the key/value head and t, the number of the token among the visible
    ones. So W is the same each time it is asked for, decoding one token at a time gives what the whole sequence gives,
    and a row gives what it gives alone and without its padding. A sequence has nothing else that all of these keep:
    hence two sequences share a draw, and another ``seed`` is another draw. Layers of a model get a ``stream`` each.

    Slots hold sums, which grow with the length. ``normalise="read"`` makes them means, and ``one_draw=true`` draws once
    for all heads, layers and streams; both together are not the paper's, but they are the way of abc-mlp to keep a long
    sequence in range.
    """

    slots: int = 64
    seed: int = 0
    normalise: str = "none"
    one_draw: bool = False
    stream: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_slots(self.slots, self.normalise)
        if not self.one_draw:
            why = "each key/value head draws slots of its own, so repeating heads adds draws"
            object.__setattr__(self, "exempt", {"grouped_queries_equal_repeated_keys": why})

    @property
    def by_place(self) -> bool:
        """Whether the number of a token is all that its slot depends on: not if heads differ."""
        return self.one_draw

    def in_layer(self, kind: str, layer: int) -> AbcRandom:
        """The same with a stream for this layer, unless one was given."""
        if self.one_draw or self.stream is not None:
            return self
        return replace(self, stream=len(KINDS) * layer + KINDS.index(kind))

    def control(self, call: AttentionCall, places: Int[Tensor, "b k"]) -> Control:
        """One slot for each place and head."""
        return Control(one_hot(self.slots_of(places, call.k.shape[1]), self.slots, call.q.dtype))

    def slots_of(self, places: Int[Tensor, "b k"], heads: int) -> Int[Tensor, "b h k"]:
        """The slot of each place in each key/value head; h is 1 where all heads have the same."""
        if self.one_draw:
            return random_slot(places, self.slots, seed=self.seed)[:, None]
        return drawn_slots(places, heads, self.slots, seed=self.seed, stream=self.stream or 0)


def drawn_slots(
    places: Int[Tensor, "b k"], heads: int, slots: int, *, seed: int, stream: int
) -> Int[Tensor, "b {heads} k"]:
    """A slot for each head and place, the same on every device and in every longer sequence."""
    head = torch.arange(heads, device=places.device)
    drawn_by = _mixed(_mixed(_mixed(seed + 1) + stream + 1) + head + 1)
    # Not a sum of the two: the places of one head would be those of another, shifted.
    return torch.remainder(_mixed(_mixed((places + 1) * 0x9E3779B1)[:, None] ^ drawn_by[:, None]), slots)


def random_slot(places: Int[Tensor, "b k"], slots: int, *, seed: int) -> Int[Tensor, "b k"]:
    """A slot for each place, by hashing: place t has the same slot on every device and in every longer sequence."""
    return torch.remainder(_mixed((places + 1) * 0x9E3779B1 + seed * 0x85EBCA6B), slots)


def _mixed(h: N) -> N:
    """Two rounds of a 32-bit mix, in int64: products stay below 2^63."""
    for _ in range(2):
        h = h & 0xFFFFFFFF
        h = ((h ^ (h >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
        h = h ^ (h >> 15)
    return h
