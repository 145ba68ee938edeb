"""ABC with a learned control vector for each position: Linformer, also causal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall
from attnlab.fields import check_fields
from attnlab.mechanisms._bounded.pooled import Pooling
from attnlab.mechanisms._bounded.slots import Control, SlotMechanism, check_slots, places_of, tokens_so_far
from attnlab.registry import register
from attnlab.shapes import Float, Int
from attnlab.sizes import check_bytes

__all__ = ["AbcLinformer"]


@register("abc-linformer", examples=("abc-linformer:slots=3,length=601",))
@dataclass(eq=False)
class AbcLinformer(SlotMechanism, nn.Module):
    """phi_t = column t of a learned n x N matrix W^LF (ABC, Eq. 6), one matrix for keys, values and all heads.

    Nothing is normalised and weights may be negative, as in Linformer. ``length`` is N; position t is the t-th visible
    token. The paper ties W^LF across layers, as the best and smallest setting of Wang et al. (2020b).
    """

    slots: int = 64
    length: int = 512
    tied: bool = True
    seed: int = 0

    normalise = "none"
    sparse = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_slots(self.slots)
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 1:
            raise ValueError(f"length must be an int of at least 1 (Linformer's N), got {self.length!r}")
        size = 4 * self.length * self.slots
        check_bytes(f"a matrix of {self.length} x {self.slots}", size, instead="take fewer slots, or a smaller length")
        nn.Module.__init__(self)
        self.tied_across_layers = self.tied
        start = torch.randn(
            self.length, self.slots, generator=torch.Generator("cpu").manual_seed(self.seed), device="cpu"
        )
        # Scaled so that a slot is about as large as one key for every N.
        self.weight = nn.Parameter((start * self.length**-0.5).to(torch.get_default_device()))

    def control(self, call: AttentionCall, places: Int[Tensor, "b k"]) -> Control:
        """The columns of the tokens' places."""
        self._check(tokens_so_far(places))
        # A token of padding at the very start has place -1; nothing of it is written.
        phi = self.weight[places.clamp(min=0)].unsqueeze(1)
        return Control(torch.zeros_like(phi).detach(), phi)

    def shared(self, call: AttentionCall) -> Pooling:
        """The first columns."""
        self._check(call.k.shape[2])
        # Layers that share this control may be on several devices.
        return Pooling(self.weight[: call.k.shape[2]].to(call.q.device).mT[None, None])

    def alpha(self, call: AttentionCall) -> Float[Tensor, "p n"]:
        """All columns."""
        if call.k.shape[2] > self.length:
            self._check(tokens_so_far(places_of(call)))
        return self.weight.to(call.q.device)

    def _check(self, tokens: int) -> None:
        if tokens > self.length:
            raise ValueError(
                f"{tokens} tokens, but this Linformer learned a control for {self.length} "
                f"(length={self.length}); shorten the input or make it with a larger length"
            )
