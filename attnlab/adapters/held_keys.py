"""The keys and values that a cache holds in each layer, and which of them are there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnlab.caches.kept_keys import KeptKeys
from attnlab.models.cache import KeyValueCache
from attnlab.shapes import Bool, Float
from attnlab.summaries import short_repr
from attnlab.trace import Trace

__all__ = ["HeldKeys", "is_cache", "keys_of_cache"]


@dataclass(frozen=True, eq=False)
class HeldKeys:
    """A layer's keys and values; ``there`` says which places hold one, where heads hold different numbers."""

    k: Float[Tensor, "b g k d"]
    v: Float[Tensor, "b g k e"]
    there: Bool[Tensor, "b g k"] | None = None

    __repr__ = short_repr


def is_cache(source: Any) -> bool:
    """Whether it has layers that hold keys, as caches of transformers and of ``attnlab.models`` do."""
    return hasattr(source, "layers") and not isinstance(source, Trace)


def keys_of_cache(cache: Any) -> dict[int, HeldKeys]:
    """The keys and values of each layer that holds some; a ValueError where they are not those of all its tokens."""
    held = {i: keys for i, layer in enumerate(cache.layers) if (keys := _keys_of_layer(i, layer)) is not None}
    if not held:
        raise ValueError("there are no keys to compact: the cache is empty")
    return held


def _keys_of_layer(number: int, layer: Any) -> HeldKeys | None:
    if isinstance(kept := getattr(layer, "kept", None), KeptKeys):
        return _kept(number, kept)
    if isinstance(layer, KeyValueCache):
        if layer.k is None or layer.v is None:
            return None
        return HeldKeys(layer.k[:, :, : layer.length], layer.v[:, :, : layer.length])
    k, v = getattr(layer, "keys", None), getattr(layer, "values", None)
    if k is None or v is None:
        return None
    read = int(layer.get_seq_length())
    if read > k.shape[2] or hasattr(layer, "_quantized_keys"):
        raise ValueError(
            f"layer {number} of this cache ({type(layer).__name__}) has plain keys of {k.shape[2]} of {read} tokens "
            "(a sliding window, or quantized keys); compact one that holds all of them, such as a DynamicCache"
        )
    # A static cache has room for more.
    return HeldKeys(k[:, :, :read], v[:, :, :read])


def _kept(number: int, kept: KeptKeys) -> HeldKeys | None:
    """Those that a policy left, which stand for their own tokens only."""
    if kept.biased:
        raise ValueError(f"the keys of layer {number} stand for others already (the policy {kept.policy.by!r})")
    k, v, columns = kept.padded("keys"), kept.padded("values"), kept.columns
    if k is None or v is None:
        return None
    return HeldKeys(k, v, columns >= 0 if columns is not None and kept.ragged else None)
