"""ABC with control from the previous layer's memory: linear unified nested attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall, hide_unseen
from attnlab.fields import check_fields
from attnlab.mechanisms._bounded.slots import FLOOR, Control, SlotMechanism, check_slots, places_of
from attnlab.registry import register
from attnlab.shapes import Float, Int

__all__ = ["AbcLuna", "MemoryMechanism"]


class MemoryMechanism(SlotMechanism, nn.Module):
    """phi_i = [softmax(X~ X^T)]_{:, i}, X~ the previous layer's memory, X the layer's input (ABC, Eq. 16).

    ``call.memory`` is X~, (batch, slots, width of x); a first layer, which is given none, has a learned one. A model
    hands ``memory_after(call)`` on to the next layer.
    """

    seed: int
    first: nn.Parameter | None
    normalise = "read"
    sparse = False
    reads_memory = True

    def cannot(self) -> dict[str, str]:
        return {
            **super().cannot(),
            "no-x": "the control is computed from what the keys were made from; pass x=",
            "causal": "the previous layer's memory has seen the whole sequence, so the control would leak the future; "
            "use abc-mlp, whose control sees one token at a time",
        }

    def logits(self, call: AttentionCall) -> Float[Tensor, "b k n"]:
        """<X~_l, x_i> / sqrt(m)."""
        x = call.x
        assert x is not None, "refused before"
        if x.shape[1] != call.k.shape[2]:
            raise ValueError(f"the control needs the input of every key, got x for {x.shape[1]} of {call.k.shape[2]}")
        kind = torch.promote_types(x.dtype, torch.float32)
        if x.shape[1] == 0:
            # The later steps of a cross-attention have no new keys.
            return x.new_zeros(x.shape[0], 0, self.slots, dtype=kind)
        return x.to(kind) @ self._memory(call).to(kind).mT * x.shape[-1] ** -0.5

    def memory_after(self, call: AttentionCall) -> Float[Tensor, "b n m"]:
        """X~ of this layer: sum_i phi_i (x) x_i, each slot a mean of the inputs by the same control."""
        self.refuse(call)
        call = hide_unseen(call)
        assert call.x is not None, "refused before"
        log = self.control(call, places_of(call)).log[:, 0]
        if call.key_visible is not None:
            log = log.masked_fill(~call.key_visible.unsqueeze(-1), FLOOR)
        phi = log.softmax(1).masked_fill(log <= FLOOR / 2, 0)
        return (phi.mT @ call.x.to(phi.dtype)).to(call.x.dtype)

    def _memory(self, call: AttentionCall) -> Tensor:
        assert call.x is not None
        b, _, m = call.x.shape
        if call.memory is not None:
            if call.memory.shape != (b, self.slots, m):
                raise ValueError(
                    f"memory must be (batch, slots, width of x) = {(b, self.slots, m)}, got {tuple(call.memory.shape)}"
                )
            return call.memory
        if self.first is None:
            generator = torch.Generator("cpu").manual_seed(self.seed)
            start = torch.randn(self.slots, m, generator=generator, device="cpu")
            self.first = nn.Parameter(start.to(call.q.device))
        if self.first.shape[1] != m:
            raise ValueError(f"the first memory was made for inputs of width {self.first.shape[1]}, got {m}")
        return self.first

    def _start(self) -> None:
        check_slots(self.slots)
        nn.Module.__init__(self)
        self.register_parameter("first", None)


@register("abc-luna", examples=("abc-luna:slots=3",))
@dataclass(eq=False)
class AbcLuna(MemoryMechanism):
    """Control by attention of the previous layer's memory over the tokens (Ma et al., 2021; ABC, A.5); never causal."""

    slots: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        self._start()

    def control(self, call: AttentionCall, places: Int[Tensor, "b k"]) -> Control:
        """One row of attention per slot."""
        return Control(self.logits(call).unsqueeze(1))
