"""ABC with global tokens: a few places have a slot each, the other tokens are not written."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnlab.attention import AttentionCall
from attnlab.mechanisms._bounded.slots import Control, SlotMechanism, check_slots, one_hot
from attnlab.registry import register
from attnlab.shapes import Int

__all__ = ["AbcGlobal"]


@register("abc-global", examples=("abc-global:slots=2", "abc-global:slots=3,stride=2"))
@dataclass(frozen=True)
class AbcGlobal(SlotMechanism):
    """phi_t = e_i if t is the i-th global token, else 0 (ABC, A.1): every ``stride``-th token, the first n of them."""

    slots: int = 64
    stride: int = 1

    normalise = "read"
    by_place = True

    def __post_init__(self) -> None:
        check_slots(self.slots)
        if isinstance(self.stride, bool) or not isinstance(self.stride, int) or self.stride < 1:
            raise ValueError(f"stride must be an int of at least 1, got {self.stride!r}")

    def control(self, call: AttentionCall, places: Int[Tensor, "b k"]) -> Control:
        """Slot place / stride where that is whole, none elsewhere."""
        slot = places.div(self.stride, rounding_mode="floor").masked_fill(places % self.stride != 0, -1)
        return Control(one_hot(slot, self.slots, call.q.dtype).unsqueeze(1))
