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
from attnlab.guidance.loss import chosen_kind, guided_numbers, refuse_hidden_pattern, refuse_missing
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
    layer: int = 0,
    n_layers: int = 1,
) -> Float[Tensor, "b h k k"]:
    """strength * t_ij in the guided heads and 0 elsewhere, for self-attention; dense, since logits are.

    The heads are those of guided layer number ``layer`` of ``n_layers``: layers differ where they take turns. With
    ``causal`` a pattern of later tokens is refused.
    """
    b, n = input_ids.shape
    text: dict[str, Any] = {"attention_mask": attention_mask, "tokens": tokens}
    bias = input_ids.new_zeros(b, n_heads, n, n).float()
    prefix = input_ids.new_ones(1, 1, n, n).bool().tril() if causal else None
    for name, heads in guidance.assign(n_heads, layer=layer, n_layers=n_layers).items():
        t = pattern_targets(name, input_ids, causal=causal, **text)
        refuse_hidden_pattern(name, t, input_ids, **text)
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
    layer: int

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        return super().reference(self.batch_bias.biased(self.layer, call))

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        return super().forward(self.batch_bias.biased(self.layer, call))


@dataclass(eq=False)
class _BatchBias:
    """The batch that the model reads, and the biases over it, each made when the first layer needs it."""

    guidance: Guidance
    strength: float
    tokens: SpecialTokens | None
    # The numbers of the guided layers.
    layers: tuple[int, ...]
    batch: dict[str, Any] | None = None
    # By the heads of each pattern; layers that guide the same heads share a bias.
    biases: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def begin(self, batch: dict[str, Any]) -> None:
        self.batch, self.biases = batch, {}

    def biased(self, layer: int, call: AttentionCall) -> AttentionCall:
        place = {"layer": self.layers.index(layer), "n_layers": len(self.layers)}
        key = tuple(self.guidance.assign(call.q.shape[1], **place).items())
        if key not in self.biases:
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
                **place,
            )
            self.biases[key] = bias.to(call.q)
        bias = self.biases[key]
        return replace(call, bias=bias if call.bias is None else call.bias + bias)


@contextmanager
def bias_heads(
    model: nn.Module, guidance: Guidance, *, tokens: SpecialTokens | None = None, strength: float = 1.0
) -> Iterator[None]:
    """Inside the context the guided heads have ``strength`` times their pattern added to their logits.

    A model that was trained so needs the bias when it is used, too. Models with one kind of self-attention.
    """
    adapter = adapter_of(model)
    kind = chosen_kind([site.kind for site in adapter.sites()], guidance)
    sites = [site for site in adapter.sites() if site.kind == kind]
    numbers = [site.layer for site in sites]
    refuse_missing(numbers, guidance, kind)
    bias = _BatchBias(guidance, strength, tokens, guided_numbers(numbers, guidance))
    frames = {s: Frame(mechanism=_BiasedSoftmax(bias, s.layer)) for s in sites if s.layer in bias.layers}
    with ExitStack() as undo:
        for remove in watch_inputs(model, bias.begin):
            undo.callback(remove)
        undo.enter_context(adapter.attach(frames))
        yield
