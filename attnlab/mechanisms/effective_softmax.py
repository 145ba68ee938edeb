"""Softmax attention whose weights are the effective ones: the same output, and only the part of W that makes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, mask_with_bias
from attnlab.mechanisms._effective import effective_map
from attnlab.mechanisms.softmax import Softmax
from attnlab.registry import register
from attnlab.shapes import Float

__all__ = ["EffectiveSoftmax"]


@register("effective-softmax")
@dataclass(frozen=True)
class EffectiveSoftmax(Mechanism):
    """W = A - P_LN(V)(A), A the softmax attention (Sun and Marasović, 2021, section 2); rows need not sum to one.

    It stands in for softmax at evaluation, where a map that is read should be what reaches the output.
    """

    def is_exact(self, call: AttentionCall) -> bool:
        return True

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        weights, _, _ = effective_map(
            Softmax().reference(call),
            call.v,
            key_visible=call.key_visible,
            causal=call.causal,
            offset=call.offset,
            mask=mask_with_bias(call),
        )
        return weights

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        return Softmax().forward(call)
