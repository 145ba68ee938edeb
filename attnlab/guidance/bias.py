"""Guidance without a loss: the pattern is added to the logits of the guided heads, for one batch or during training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from attnlab.adapters.protocol import Frame, adapter_of
from attnlab.attention import AttentionCall, Mechanism
from attnlab.guidance.inputs import watch_inputs
from attnlab.guidance.loss import chosen_kind
from attnlab.guidance.settings import Guidance
from attnlab.mechanisms.softmax import Softmax
from attnlab.patterns import SpecialTokens, dense, pattern_targets
from attnlab.shapes import Float, Int, Shaped

__all__ = ["LogitBias", "bias_heads", "pattern_bias"]


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


@dataclass(frozen=True, eq=False)
class _BiasedSoftmax(Softmax):
    """Softmax over scores to which the patterns over the current batch are added."""

    batch_bias: _BatchBias

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        return super().reference(self.batch_bias.biased(call))

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        return super().forward(self.batch_bias.biased(call))


@dataclass(eq=False)
class _BatchBias:
    """The batch that the model reads, and its bias, made when the first layer asks for it."""

    guidance: Guidance
    strength: float
    tokens: SpecialTokens | None
    batch: dict[str, Any] | None = None
    bias: Tensor | None = None

    def begin(self, batch: dict[str, Any]) -> None:
        self.batch, self.bias = batch, None

    def biased(self, call: AttentionCall) -> AttentionCall:
        if self.bias is None:
            if self.batch is None:
                raise ValueError("the model was not called with input_ids, from which the patterns are drawn")
            bias = pattern_bias(
                self.guidance,
                self.batch["input_ids"],
                n_heads=call.q.shape[1],
                strength=self.strength,
                attention_mask=self.batch.get("attention_mask"),
                causal=call.causal,
                tokens=self.tokens,
            )
            self.bias = bias.to(call.q)
        return replace(call, bias=self.bias if call.bias is None else call.bias + self.bias)


@contextmanager
def bias_heads(
    model: nn.Module, guidance: Guidance, *, tokens: SpecialTokens | None = None, strength: float = 1.0
) -> Iterator[None]:
    """Inside the context the guided heads of every self-attention layer have ``strength`` times their pattern added.

    A model that was trained so needs the bias when it is used, too. Models with one kind of self-attention.
    """
    adapter = adapter_of(model)
    sites = adapter.sites()
    kind = chosen_kind([site.kind for site in sites], guidance)
    mech = _BiasedSoftmax(_BatchBias(guidance, strength, tokens))
    with ExitStack() as undo:
        for remove in watch_inputs(model, mech.batch_bias.begin):
            undo.callback(remove)
        undo.enter_context(adapter.attach({s: Frame(mechanism=mech) for s in sites if s.kind == kind}))
        yield
