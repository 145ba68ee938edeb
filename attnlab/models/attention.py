"""Multi-head attention as a layer: it makes q, k and v, hands them to its mechanism, and projects what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.functional import linear

from attnlab.attention import AttentionCall, LayerCache, Mechanism
from attnlab.mechanisms._device import to_model_device
from attnlab.models.cache import KeyValueCache, SourceCache
from attnlab.models.config import Kind, TransformerConfig, specs_per_layer
from attnlab.models.positions import rotate
from attnlab.registry import mechanism
from attnlab.shapes import Bool, Float, Int

__all__ = ["Attention", "Carried", "Observer", "attentions", "make_mechanisms", "put_mechanism", "swapped"]


@dataclass
class Carried:
    """The memory that one layer hands on to the next, where its mechanism has one (LUNA, shared workspace)."""

    memory: Tensor | None = None


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al., 2017, 3.2.2) with any mechanism in the place of the softmax.

    A mechanism with parameters is a submodule, so it trains, saves and loads with the model. Whoever wants to see the
    calls appends to ``observers``; each is called with (this layer, the call, the mechanism's output).
    """

    def __init__(self, config: TransformerConfig, *, kind: Kind, layer: int, mechanism: Mechanism) -> None:
        super().__init__()
        self.kind, self.layer = kind, layer
        self.heads = config.heads
        self.rotary = config.positions == "rotary" and kind != "cross"
        # The rows of q, then of k, then of v: one matrix product where all three have the same input.
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)
        self.mechanism = mechanism
        self.observers: list[Observer] = []

    def forward(
        self,
        h: Float[Tensor, "b q m"],
        *,
        positions: Int[Tensor, "#b q"],
        key_visible: Bool[Tensor, "b k"] | None = None,
        cache: LayerCache | None = None,
        carried: Carried | None = None,
    ) -> Float[Tensor, "b q m"]:
        """Self-attention; with a cache, ``h`` is the new tokens and ``key_visible`` covers the old ones too."""
        q, k, v = (self._split(t) for t in self.qkv(h).chunk(3, dim=-1))
        if self.rotary:
            q, k = rotate(q, positions), rotate(k, positions)
        new_visible = key_visible if key_visible is None else key_visible[:, -k.shape[2] :]
        # Under autocast h is wider than q.
        call = AttentionCall(q, k, v, x=h.to(q.dtype), key_visible=new_visible, causal=self.kind == "decoder")
        call = self._hand_on(call, carried)
        if cache is None:
            return self._finish(call, self.mechanism(call))
        return self._finish(*cache.attend(self.mechanism, call, key_visible=key_visible))

    def cross(
        self,
        h: Float[Tensor, "b q m"],
        *,
        source: Float[Tensor, "b k m"],
        source_visible: Bool[Tensor, "b k"] | None = None,
        cache: SourceCache | None = None,
        carried: Carried | None = None,
    ) -> Float[Tensor, "b q m"]:
        """Cross-attention: queries from ``h``, keys and values from ``source``, made once where there is a cache."""
        (q,) = self._project(h, 0, 1)
        if cache is None:
            k, v = self._project(source, 1, 3)
        elif cache.state is not None:
            k = v = q[:, :, :0]
            source, source_visible = source[:, :0], None if source_visible is None else source_visible[:, :0]
        elif cache.k is not None and cache.v is not None:
            k, v = cache.k, cache.v
        else:
            k, v = self._project(source, 1, 3)
            cache.state = self.mechanism.make_cache(h.shape[0], source.shape[1])
            if cache.state is None:
                cache.k, cache.v = k, v
        call = self._hand_on(AttentionCall(q, k, v, x=source.to(q.dtype), key_visible=source_visible), carried)
        if cache is not None and cache.state is not None:
            return self._finish(*cache.state.attend(self.mechanism, call, key_visible=source_visible))
        return self._finish(call, self.mechanism(call))

    def make_cache(self, batch: int, capacity: int) -> LayerCache:
        """An empty past: the mechanism's own (its ``make_cache``) if it has one, else every key and value."""
        own = self.mechanism.make_cache(batch, capacity)
        return KeyValueCache(capacity) if own is None else own

    def _hand_on(self, call: AttentionCall, carried: Carried | None) -> AttentionCall:
        """The call with the previous layer's memory; this layer's takes its place for the next."""
        if carried is None or not self.mechanism.reads_memory or call.k.shape[2] == 0:
            return call
        if carried.memory is not None:
            call = replace(call, memory=carried.memory.to(call.q.dtype))
        carried.memory = self.mechanism.memory_after(call)
        return call

    def _project(self, t: Float[Tensor, "b n m"], first: int, last: int) -> list[Float[Tensor, "b h n d"]]:
        """Those of q, k and v (0, 1, 2) from ``first`` up to ``last``."""
        rows = slice(first * t.shape[-1], last * t.shape[-1])
        weight, bias = self.qkv.weight[rows], self.qkv.bias
        parts = linear(t, weight, None if bias is None else bias[rows]).chunk(last - first, dim=-1)
        return [self._split(part) for part in parts]

    def _split(self, t: Float[Tensor, "b n m"]) -> Float[Tensor, "b h n d"]:
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _finish(self, call: AttentionCall, output: Float[Tensor, "b h q e"]) -> Float[Tensor, "b q m"]:
        for observer in self.observers:
            observer(self, call, output)
        return self.out(output.transpose(1, 2).flatten(2))


Observer = Callable[[Attention, AttentionCall, Tensor], None]


def make_mechanisms(config: TransformerConfig, kind: Kind) -> list[Mechanism]:
    """The mechanisms of a kind's layers; layers with the same spec share one that says ``tied_across_layers = True``.

    ABC ties its control across layers (ABC, 4); without that word every layer has parameters of its own.
    """
    tied: dict[str, Mechanism] = {}
    made = []
    for spec in specs_per_layer(config, kind):
        mech = tied.get(spec) or mechanism(spec)
        if mech.tied_across_layers:
            tied[spec] = mech
        made.append(mech)
    return made


def attentions(model: nn.Module, kinds: tuple[Kind, ...] = ("encoder", "decoder", "cross")) -> list[Attention]:
    """The model's attention layers of these kinds, in the order they run."""
    return [m for m in model.modules() if isinstance(m, Attention) and m.kind in kinds]


@contextmanager
def swapped(
    model: nn.Module, mech: Mechanism | str, *, kinds: tuple[Kind, ...] = ("encoder", "decoder", "cross")
) -> Iterator[None]:
    """Run the model with another mechanism in its layers of these kinds; undone on exit, also after an error."""
    new = to_model_device(model, mechanism(mech))
    layers = attentions(model, kinds)
    if not layers:
        raise ValueError(f"this model has no attention of kind {', '.join(kinds)}")
    old = [layer.mechanism for layer in layers]
    try:
        for layer in layers:
            put_mechanism(layer, new)
        yield
    finally:
        for layer, mech_before in zip(layers, old, strict=True):
            put_mechanism(layer, mech_before)


def put_mechanism(layer: Attention, mech: Mechanism) -> None:
    """Make the layer attend by another mechanism."""
    # A module and a plain object live in different tables of nn.Module; leave the old one's before entering the new.
    del layer.mechanism
    layer.mechanism = mech
