"""Guidance without a loss: the pattern added to the logits of the guided heads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism
from attnlab.guidance.settings import Guidance
from attnlab.mechanisms.softmax import Softmax
from attnlab.patterns import SpecialTokens, dense, pattern_targets
from attnlab.shapes import Float, Int, Shaped

__all__ = ["LogitBias", "pattern_bias"]


def pattern_bias(
    guidance: Guidance,
    input_ids: Int[Tensor, "b k"],
    *,
    n_heads: int,
    strength: float = 1.0,
    attention_mask: Shaped[Tensor, "b k"] | None = None,
    causal: bool = False,
    tokens: SpecialTokens | None = None,
) -> Float[Tensor, "b h k k"]:
    """strength * t_ij in the guided heads and 0 elsewhere, for self-attention; dense, since logits are."""
    b, n = input_ids.shape
    bias = input_ids.new_zeros(b, n_heads, n, n).float()
    prefix = input_ids.new_ones(1, 1, n, n).bool().tril() if causal else None
    for name, heads in guidance.assign(n_heads).items():
        t = pattern_targets(name, input_ids, attention_mask=attention_mask, causal=causal, tokens=tokens)
        bias[:, heads.start : heads.stop] = strength * dense(t, keys=n, visible=prefix)
    return bias


@dataclass(frozen=True, eq=False)
class LogitBias(Mechanism):
    """Another mechanism whose scaled scores have ``bias`` added: ``swap(model, LogitBias(pattern_bias(...)))``."""

    bias: Float[Tensor, "#b #h q k"]
    inner: Mechanism = field(default_factory=Softmax)

    def cannot(self) -> dict[str, str]:
        return self.inner.cannot()

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        return self.inner.weights(self._biased(call))

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        return self.inner(self._biased(call))

    def _biased(self, call: AttentionCall) -> AttentionCall:
        bias = self.bias.to(call.q)
        return replace(call, bias=bias if call.bias is None else call.bias + bias)
