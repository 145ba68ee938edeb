"""ABC with control from the previous layer's memory: linear unified nested attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall
from attnlab.mechanisms._slots import Control, SlotMechanism, check_slots
from attnlab.registry import register
from attnlab.shapes import Float, Int

__all__ = ["AbcLuna", "MemoryMechanism"]


class MemoryMechanism(SlotMechanism, nn.Module):
    """phi_i = [softmax(X~ X^T)]_{:, i}, X~ the previous layer's memory, X the layer's input (ABC, Eq. 16).

    ``call.memory`` is X~, (batch, slots, width of x); a first layer, which is given none, has a learned one.
    """

    seed: int
    first: nn.Parameter | None
    normalise = "read"

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
        return x.to(kind) @ self._memory(call).to(kind).mT * x.shape[-1] ** -0.5

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
        self._start()

    def control(self, call: AttentionCall, places: Int[Tensor, "b k"]) -> Control:
        """One row of attention per slot."""
        return Control(self.logits(call).unsqueeze(1))
