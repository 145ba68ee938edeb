"""A prompt that is read once, and its cache as each of several policies would leave it.

``al.evicting`` reads the prompt itself. Where many policies are compared on one prompt, its queries, keys and values
are noted here once, and handed to each policy's cache as if the model had just made them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.evict import evicting
from attnlab.adapters.module_state import open_site
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
    # Why the calls cannot be handed to a cache, where a module attends more than once.
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
        return Prefill(self.ids[rows], calls, self.unshared)

    def keys_and_values(self) -> KeysAndValues:
        """The keys and values of every token: the full cache."""
        return [(call.k, call.v) for _, (_, call) in sorted(self.calls.items())]


@torch.no_grad()
def read_prefill(model: nn.Module, ids: Int[Tensor, "b n"]) -> Prefill:
    """Read prompts without padding by a decoder of transformers, with its own attention."""
    adapter = adapter_of(model)
    calls: dict[int, tuple[Site, AttentionCall]] = {}
    twice: list[str] = []

    def note(site: Site, call: AttentionCall, _mech: Mechanism, _output: Tensor) -> None:
        layer = int(getattr(site.module, "layer_idx", site.layer))
        if layer in calls:
            twice.append(site.name)
        calls[layer] = (site, replace(call, x=None))

    with adapter.attach(dict.fromkeys(adapter.sites(), Frame(note=note))):
        # The body alone: nobody needs the logits of every token of a prompt.
        model.base_model(ids, use_cache=False)  # type: ignore[operator]
    return Prefill(ids, calls, f"{twice[0]} attends more than once" if twice else None)


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
