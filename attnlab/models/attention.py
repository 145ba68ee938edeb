"""Multi-head attention as a layer: it makes q, k and v, hands them to its mechanism, and projects the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.functional import linear

from attnlab.attention import AttentionCall, LayerCache, Mechanism
from attnlab.models.cache import BoundedMemoryStep, KeyValueCache, SourceCache, refuse_other_mechanism
from attnlab.models.config import Kind, TransformerConfig, specs_per_layer
from attnlab.models.open_contexts import OpenContexts, refuse_replica
from attnlab.models.positions import rotate
from attnlab.registry import mechanism
from attnlab.shapes import Bool, Float, Int
from attnlab.summaries import short_repr

__all__ = ["Attention", "AttentionLayer", "Carried", "Observer", "attentions", "make_mechanisms", "put_mechanism"]


@dataclass
class Carried:
    """The memory that one layer hands on to the next, where its mechanism has one (LUNA, shared workspace)."""

    memory: Tensor | None = None

    __repr__ = short_repr


class AttentionLayer(nn.Module):
    """An attention layer that ``swap``, ``record``, ``guide`` and the readings find in a model.

    A subclass sets ``mechanism``, its attention, and ``out``, a module whose ``weight`` is W_O. It attends by
    ``run_mechanism``. A mechanism with parameters is a submodule, so it trains, saves and loads with the model.

    Inside ``swap`` the last of ``replacements`` attends. Each of ``observers`` is called with (this layer, the call,
    the mechanism, its output). Both belong to open contexts: a copy follows them while they last, and a saved layer has
    none.
    """

    mechanism: Mechanism
    out: nn.Module

    def __init__(self, *, kind: Kind, layer: int) -> None:
        super().__init__()
        self.kind, self.layer = kind, layer
        self.replacements: OpenContexts[Mechanism] = OpenContexts()
        self.observers: OpenContexts[Observer] = OpenContexts()

    def current_mechanism(self) -> Mechanism:
        """The mechanism by which the layer attends now."""
        return [self.mechanism, *self.replacements][-1]

    def run_mechanism(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """The mechanism's output for a call, which observers see too."""
        mech = self.current_mechanism()
        if getattr(self, "_is_replica", False):
            # Only here, since a compiled graph that reads the layer's number serves that layer alone.
            replaced = mech if self.replacements else None
            refuse_replica(self, f"{self.kind} layer {self.layer}", notes=bool(self.observers), mechanism=replaced)
        output = mech(call)
        self.tell_observers(call, mech, output)
        return output

    def tell_observers(self, call: AttentionCall, mech: Mechanism, output: Float[Tensor, "b h q e"]) -> None:
        """Show observers a call that was answered."""
        for observer in self.observers:
            observer(self, call, mech, output)


Observer = Callable[[AttentionLayer, AttentionCall, Mechanism, Tensor], None]


class Attention(AttentionLayer):
    """Multi-head attention (Vaswani et al., 2017, 3.2.2) with any mechanism in the place of the softmax."""

    def __init__(self, config: TransformerConfig, *, kind: Kind, layer: int, mechanism: Mechanism) -> None:
        super().__init__(kind=kind, layer=layer)
        self.heads = config.heads
        self.rotary = config.positions == "rotary" and kind != "cross"
        # The rows of q, then of k, then of v: one matrix product where all three have the same input.
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)
        self.mechanism = mechanism

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
        call = self._with_carried_memory(call, carried)
        if cache is None:
            return self._project_output(self.run_mechanism(call))
        # The place of the first new token says whether the cache holds earlier ones; only observers need to know.
        past = int(positions[:, 0].max()) if self.observers else 0
        return self._project_output(self._run_with_cache(call, cache, key_visible, past=past))

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
        n_source = source.shape[1]
        if cache is None:
            k, v = self._project(source, 1, 3)
        elif cache.state is not None:
            refuse_other_mechanism(cache.state, cache.made_by, self.current_mechanism())
            k = v = q[:, :, :0]
            source, source_visible = source[:, :0], None if source_visible is None else source_visible[:, :0]
        elif cache.k is not None and cache.v is not None:
            k, v = cache.k, cache.v
        else:
            k, v = self._project(source, 1, 3)
            cache.state = self.current_mechanism().make_cache(h.shape[0], n_source)
            if cache.state is not None:
                cache.made_by = self.current_mechanism()
            else:
                cache.k, cache.v = k, v
        call = AttentionCall(q, k, v, x=source.to(q.dtype), key_visible=source_visible)
        call = self._with_carried_memory(call, carried)
        if cache is None or cache.state is None:
            return self._project_output(self.run_mechanism(call))
        past = n_source - k.shape[2]
        return self._project_output(self._run_with_cache(call, cache.state, source_visible, past=past))

    def make_cache(self, batch: int, capacity: int) -> LayerCache:
        """An empty past: the mechanism's own (its ``make_cache``) if it has one, else every key and value."""
        own = self.current_mechanism().make_cache(batch, capacity)
        return KeyValueCache(capacity) if own is None else own

    def _run_with_cache(
        self, call: AttentionCall, cache: LayerCache, key_visible: Bool[Tensor, "b k"] | None, *, past: int
    ) -> Float[Tensor, "b h q e"]:
        """The output over the cached keys, of which there are ``past``, and the call's own."""
        mech = self.current_mechanism()
        call, output = cache.attend(mech, call, key_visible=key_visible)
        keeps_keys = isinstance(cache, KeyValueCache)
        self.tell_observers(call, mech if keeps_keys or not past else BoundedMemoryStep(mech, past), output)
        return output

    def _with_carried_memory(self, call: AttentionCall, carried: Carried | None) -> AttentionCall:
        """The call with the previous layer's memory; this layer's takes its place for the next."""
        mech = self.current_mechanism()
        if carried is None or not mech.reads_memory or call.k.shape[2] == 0:
            return call
        if carried.memory is not None:
            call = replace(call, memory=carried.memory.to(call.q.dtype))
        carried.memory = mech.memory_after(call)
        return call

    def _project(self, t: Float[Tensor, "b n m"], first: int, last: int) -> list[Float[Tensor, "b h n d"]]:
        """Those of q, k and v (0, 1, 2) from ``first`` up to ``last``."""
        rows = slice(first * t.shape[-1], last * t.shape[-1])
        weight, bias = self.qkv.weight[rows], self.qkv.bias
        parts = linear(t, weight, None if bias is None else bias[rows]).chunk(last - first, dim=-1)
        return [self._split(part) for part in parts]

    def _split(self, t: Float[Tensor, "b n m"]) -> Float[Tensor, "b h n d"]:
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _project_output(self, output: Float[Tensor, "b h q e"]) -> Float[Tensor, "b q m"]:
        return self.out(output.transpose(1, 2).flatten(2))


def make_mechanisms(config: TransformerConfig, kind: Kind) -> list[Mechanism]:
    """The mechanisms of a kind's layers; layers with the same spec share one that says ``tied_across_layers = True``.

    ABC ties its control across layers (ABC, 4); otherwise every layer has parameters of its own.
    """
    tied: dict[str, Mechanism] = {}
    made = []
    for layer, spec in enumerate(specs_per_layer(config, kind)):
        mech = tied.get(spec) or mechanism(spec).in_layer(kind, layer)
        if mech.tied_across_layers:
            tied[spec] = mech
        made.append(mech)
    return made


def attentions(model: nn.Module, kinds: tuple[Kind, ...] = ("encoder", "decoder", "cross")) -> list[AttentionLayer]:
    """The model's attention layers of these kinds, in the order they run."""
    return [m for m in model.modules() if isinstance(m, AttentionLayer) and m.kind in kinds]


def put_mechanism(layer: AttentionLayer, mech: Mechanism) -> None:
    """Give the layer another mechanism for good; ``attnlab.swap`` replaces it for a while."""
    # A module and a plain object live in different tables of nn.Module; leave the old one's before entering the new.
    del layer.mechanism
    layer.mechanism = mech
