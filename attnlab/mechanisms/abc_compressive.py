"""ABC with mean pooling: every c neighbouring tokens share a slot, as in the compressive transformer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.attention import AttentionCall
from attnlab.fields import check_fields
from attnlab.mechanisms._bounded.slots import Control, SlotMechanism, check_slots, one_hot, tokens_so_far
from attnlab.registry import register
from attnlab.shapes import Float, Int

__all__ = ["AbcCompressive"]


@register("abc-compressive", examples=("abc-compressive:slots=3", "abc-compressive:slots=3,length=601"))
@dataclass(frozen=True)
class AbcCompressive(SlotMechanism):
    """phi_i = e_{floor((i - 1) / c) + 1} / c with c = ceil(N / n) (ABC, Eq. 14).

    N is the number of visible tokens, or ``length`` where it is given; causal use needs it given. A slot that is not
    full yet holds a sum divided by c, as if zeros had been appended; ``normalise="read"`` makes it a mean.
    """

    slots: int = 64
    length: int | None = None
    normalise: str = "none"

    by_place = True

    def __post_init__(self) -> None:
        check_fields(self)
        check_slots(self.slots, self.normalise)
        if self.length is not None and (not isinstance(self.length, int) or self.length < 1):
            raise ValueError(f"length must be an int of at least 1 or None, got {self.length!r}")

    def cannot(self) -> dict[str, str]:
        why = "how many tokens share a slot depends on the length, which a prefix does not know; give length="
        return super().cannot() if self.length is not None else {**super().cannot(), "causal": why}

    def alpha(self, call: AttentionCall) -> Float[Tensor, "p n"] | None:
        """Not without ``length``, for then it depends on how many tokens there are, too."""
        return None if self.length is None or call.k.shape[2] > self.length else super().alpha(call)

    def control(self, call: AttentionCall, places: Int[Tensor, "b k"]) -> Control:
        """Slot place // c, weight 1 / c."""
        if self.length is None:
            # Places never decrease, so the last is the number of visible tokens less one.
            total = places[:, -1:] + 1
        else:
            total = torch.full_like(places[:, -1:], self.length)
            tokens = tokens_so_far(places)
            if tokens > self.length:
                raise ValueError(f"{tokens} tokens, but length={self.length}; give a larger length")
        share = (total + self.slots - 1).div(self.slots, rounding_mode="floor").clamp(min=1)
        slot = places.div(share, rounding_mode="floor")
        log = one_hot(slot, self.slots, torch.promote_types(call.q.dtype, torch.float32))
        log = log - torch.where(log == 0, share[..., None].to(log.dtype).log(), 0)
        return Control(log.unsqueeze(1))
