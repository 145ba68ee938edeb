"""The bytes of a model's key/value cache: what its attention asks for at a length, and what a cache holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.protocol import Frame, Site, adapter_of
from attnlab.attention import AttentionCall, Mechanism
from attnlab.fields import check_int, expect
from attnlab.trace import Kind

__all__ = ["LayerShape", "cache_bytes", "held_bytes", "layer_shapes"]


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one layer's attention: query heads, key/value heads, widths of keys and values."""

    kind: Kind
    layer: int
    heads: int
    groups: int
    d: int
    e: int
    dtype: torch.dtype

    def bytes(self, mech: Mechanism, length: int) -> int:
        """What a cache holds of one sequence of ``length`` tokens if this layer attends by ``mech``."""
        return self.groups * mech.cache_bytes(length=length, d=self.d, e=self.e, dtype=self.dtype)


def layer_shapes(model: nn.Module) -> list[LayerShape]:
    """The sizes of every layer's attention, from two tokens that the model reads."""
    adapter = adapter_of(model)
    shapes: dict[Site, LayerShape] = {}

    def note(site: Site, call: AttentionCall, _mech: Mechanism, _output: Tensor) -> None:
        heads, (_, groups, _, d), e = call.q.shape[1], call.k.shape, call.v.shape[-1]
        shapes[site] = LayerShape(site.kind, site.layer, heads, groups, d, e, call.k.dtype)

    training = model.training
    try:
        model.eval()
        with torch.no_grad(), adapter.attach(dict.fromkeys(adapter.sites(), Frame(note=note))):
            adapter.logits(torch.tensor([[0, 1]], device=next(model.parameters()).device))
    finally:
        model.train(training)
    return list(shapes.values())


def cache_bytes(model: nn.Module, length: int) -> int:
    """The bytes of the cache that ``model``, converted or not, holds for one sequence of ``length`` tokens."""
    check_int("length", length, least=1)
    adapter = adapter_of(model)
    mechanisms = {(site.kind, site.layer): adapter.mechanism_at(site) for site in adapter.sites()}
    return sum(shape.bytes(mechanisms[shape.kind, shape.layer], length) for shape in layer_shapes(model))


def held_bytes(cache: Any) -> int:
    """The bytes of keys, values and memories that a transformers cache holds, for all of its rows."""
    from transformers import EncoderDecoderCache
    from transformers.cache_utils import Cache

    if isinstance(cache, EncoderDecoderCache):
        return held_bytes(cache.self_attention_cache) + held_bytes(cache.cross_attention_cache)
    expect("cache", cache, Cache, "a cache of transformers, such as past_key_values")
    total = 0
    for layer in cache.layers:
        own = getattr(layer, "past", None)
        if own is not None:
            total += own.nbytes()
        else:
            total += sum(t.nbytes for t in (layer.keys, layer.values) if isinstance(t, Tensor))
    return total
