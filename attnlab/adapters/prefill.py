"""A prompt that is read once, and its cache as each of several policies would leave it.

``al.evicting`` reads the prompt itself. Where many policies are compared on one prompt, its queries, keys and values
are noted here once, and handed to each policy's cache as if the model had just made them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.evict import evicting
from attnlab.adapters.model_files import check_ids
from attnlab.adapters.module_state import cache_layer, open_site
from attnlab.adapters.protocol import Frame, Site, adapter_of
from attnlab.attention import AttentionCall, Mechanism
from attnlab.caches.kv_policy import KVPolicy
from attnlab.caches.shared_scores import SharedScores
from attnlab.mechanisms.softmax import Softmax
from attnlab.shapes import Float, Int
from attnlab.summaries import short_repr

__all__ = ["KeysAndValues", "Prefill", "cache_of", "compressed", "even_keys", "last_logits", "read_prefill"]

# The keys and values of each layer.
KeysAndValues = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Prefill:
    """Prompts of one length, and the attention calls that reading them made, by the layer of the cache."""

    ids: Int[Tensor, "b n"]
    calls: dict[int, tuple[Site, AttentionCall]]
    # What the model caches of each layer: the keys and values of its call, unless it is unshared.
    cached: KeysAndValues
    # Why the calls cannot be handed to a cache: a module attends more than once, or caches something else than keys.
    unshared: str | None = None

    __repr__ = short_repr

    def rows(self, rows: slice) -> Prefill:
        """Some of the prompts."""
        b, names = self.ids.shape[0], ("q", "k", "v", "key_visible", "mask", "bias")

        def some(call: AttentionCall) -> AttentionCall:
            tensors = {name: t for name in names if (t := getattr(call, name)) is not None and t.shape[0] == b}
            # Any: the names are those of tensors.
            changes: dict[str, Any] = {name: t[rows] for name, t in tensors.items()}
            return replace(call, **changes)

        calls = {layer: (site, some(call)) for layer, (site, call) in self.calls.items()}
        return Prefill(self.ids[rows], calls, [(k[rows], v[rows]) for k, v in self.cached], self.unshared)

    def keys_and_values(self) -> KeysAndValues:
        """What the model keeps of every token: the full cache."""
        return self.cached


@torch.no_grad()
def read_prefill(model: nn.Module, ids: Int[Tensor, "b n"]) -> Prefill:
    """Read prompts without padding by a decoder of transformers, with its own attention."""
    from attnlab.adapters.evicting_cache import refuse_states

    refuse_states(model)
    check_ids(model, ids)
    adapter, cache = adapter_of(model), _noting_cache()
    calls: dict[int, tuple[Site, AttentionCall]] = {}
    twice: list[str] = []

    def note(site: Site, call: AttentionCall, _mech: Mechanism, _output: Tensor) -> None:
        number = cache_layer(site.module)
        layer = site.layer if number is None else number
        if layer in calls:
            twice.append(site.name)
        calls[layer] = (site, replace(call, x=None))

    with adapter.attach(dict.fromkeys(adapter.sites(), Frame(note=note))):
        # The body alone: nobody needs the logits of every token of a prompt.
        model.base_model(ids, past_key_values=cache, use_cache=True)  # type: ignore[operator]
    cached = [(layer.keys, layer.values) for layer in cache.layers]
    if not cached:
        raise ValueError(f"{type(model).__name__} keeps no cache of keys and values; take a model that does")
    unshared = f"{twice[0]} attends more than once" if twice else _other_than_calls(cached, calls)
    return Prefill(ids, calls, cached, unshared)


def _noting_cache() -> Any:
    """A transformers cache that holds a prompt's keys and values as the model made them, not copies."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    class NotingCache(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
            while len(self.layers) <= layer_idx:
                self.layers.append(DynamicLayer())
            layer: Any = self.layers[layer_idx]
            layer.lazy_initialization(key_states, value_states)
            layer.keys, layer.values = key_states, value_states
            return key_states, value_states

    return NotingCache()


def _other_than_calls(cached: KeysAndValues, calls: Mapping[int, tuple[Site, AttentionCall]]) -> str | None:
    """Why the layers' calls do not hold what the model caches; None where they do."""
    if sorted(calls) != list(range(len(cached))):
        return f"{len(calls)} layers attend, and {len(cached)} are cached"
    for layer, (k, v) in enumerate(cached):
        site, call = calls[layer]
        if (k.shape, v.shape) != (call.k.shape, call.v.shape):
            return f"{site.name} caches {tuple(k.shape)} in place of keys {tuple(call.k.shape)}"
    return None


@contextmanager
def compressed(
    model: nn.Module, policy: KVPolicy, prefill: Prefill, shared: SharedScores | None = None
) -> Iterator[Any]:
    """``evicting(model, policy)`` whose cache has read the prompts; a policy that reads them twice does so itself.

    ``shared`` has the scores of these prompts that other budgets need too, where keys are cut once.
    """
    with torch.no_grad(), evicting(model, policy) as cache:
        if policy.schedule == "prefill":
            for kept in cache.kept_keys():
                kept.shared = shared
        if policy.score.reads_twice or prefill.unshared or len(cache.layers) != len(prefill.calls):
            last_logits(model, prefill.ids, cache)
        else:
            for layer, (site, call) in sorted(prefill.calls.items()):
                _hand_over(cache, layer, site, call)
        yield cache


def _hand_over(cache: Any, layer: int, site: Site, call: AttentionCall) -> None:
    """Let a layer's cache take in keys and values, and its policy choose, as the attention function does."""
    cache.update(call.k, call.v, layer)
    opened = open_site(site.module)
    assert opened is not None, "inside evicting every layer of the decoder is open"
    opened.cached_keys()
    for frame in opened.frames:
        if frame.note is not None and frame.cached_keys is not None:
            frame.note(site, call, Softmax(), call.v)


def last_logits(
    model: nn.Module, ids: Int[Tensor, "b n"], cache: Any, *, count: int = 1, **inputs: Any
) -> Float[Tensor, "b m v"]:
    """What may follow each of the last ``count`` tokens; not all logits are made where the model can leave some out."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = count
    return model(ids, past_key_values=cache, use_cache=True, **inputs).logits[:, -count:]


def even_keys(cache: Any) -> KeysAndValues | None:
    """A cache's keys and values where all heads and rows of all layers hold as many; None where they differ.

    None too where something is added to the scores of keys, which a plain cache cannot do.
    """
    if any(kept.biased for kept in cache.kept_keys()):
        return None
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    if not all(isinstance(t, Tensor) and t.dim() == 4 for pair in layers for t in pair):
        return None
    lengths = {k.shape[2] for k, _ in layers}
    counts = {int(n) for heads in cache.kept_by_head() for n in heads.unique().tolist()}
    return layers if len(lengths) == 1 and counts == lengths else None


def cache_of(parts: Sequence[KeysAndValues]) -> Any:
    """A transformers cache whose rows are those of all parts, one after the other."""
    from transformers import DynamicCache

    layers = zip(*parts, strict=True)
    return DynamicCache([tuple(torch.cat(tensors) for tensors in zip(*layer, strict=True)) for layer in layers])
