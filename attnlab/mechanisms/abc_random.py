"""ABC with random control: each token goes into a slot drawn by lot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.attention import AttentionCall
from attnlab.mechanisms._bounded.slots import Control, SlotMechanism, check_slots, one_hot
from attnlab.registry import register
from attnlab.shapes import Int

__all__ = ["AbcRandom", "random_slot"]


@register("abc-random", examples=("abc-random:slots=3", "abc-random:slots=2,normalise=none"))
@dataclass(frozen=True)
class AbcRandom(SlotMechanism):
    """phi_t = e_i with i uniform over the slots (ABC, A.2), the same i for the t-th visible token in every call.

    A slot holds the mean of its tokens; ``normalise="none"`` gives Eq. 3's sum, which grows with the length.
    """

    slots: int = 64
    seed: int = 0
    normalise: str = "read"

    by_place = True

    def __post_init__(self) -> None:
        check_slots(self.slots, self.normalise)

    def control(self, call: AttentionCall, places: Int[Tensor, "b k"]) -> Control:
        """One slot per place."""
        return Control(one_hot(random_slot(places, self.slots, seed=self.seed), self.slots, call.q.dtype)[:, None])


def random_slot(places: Int[Tensor, "b k"], slots: int, *, seed: int) -> Int[Tensor, "b k"]:
    """A slot for each place, by hashing: place t has the same slot on every device and in every longer sequence."""
    # Two rounds of a 32-bit mix, in int64: products stay below 2^63.
    h = (places + 1) * 0x9E3779B1 + seed * 0x85EBCA6B
    for _ in range(2):
        h = h & 0xFFFFFFFF
        h = ((h ^ (h >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
        h = h ^ (h >> 15)
    return torch.remainder(h, slots)
