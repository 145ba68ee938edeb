"""The past of a converted layer in a transformers cache: its mechanism's bounded memory in place of keys and values."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from attnlab.adapters.module_state import Installed
from attnlab.attention import AttentionCall, Mechanism
from attnlab.models.cache import BoundedMemoryStep
from attnlab.trace import Kind

__all__ = ["MemoryLayer", "cache_layers", "memory_layer", "refuse_second_call"]


class MemoryLayer(CacheLayerMixin):
    """One layer's past, of a size that does not grow: what the mechanism's ``make_cache`` returns.

    transformers calls ``update`` with keys and values before the attention function runs; that function then calls
    ``answer``, which folds them in. A module that reads ``keys`` back (a cross-attention's second step) gets none.
    """

    is_sliding = False

    def __init__(self, mechanism: Mechanism) -> None:
        super().__init__()
        self.mechanism = mechanism
        self.past: Any = None
        self.length = 0
        # Whether new keys wait to be folded in.
        self.waiting = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start with an empty memory."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.past = self.mechanism.make_cache(key_states.shape[0], 0)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens in and let them pass to the attention function."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.length += key_states.shape[2]
        self.waiting = True
        # Copies: an empty view would keep the keys of the whole prompt in memory.
        self.keys, self.values = key_states[:, :, :0].clone(), value_states[:, :, :0].clone()
        return key_states, value_states

    def answer(self, call: AttentionCall) -> tuple[Mechanism, AttentionCall, Tensor]:
        """Answer a call that holds only new keys: the mechanism that W can be asked of, the call and the output."""
        past = self.length - call.k.shape[2]
        if call.k.shape[2] and not self.waiting:
            refuse_second_call(self.mechanism)
        self.waiting = False
        call, out = self.past.attend(self.mechanism, call, key_visible=call.key_visible)
        return (BoundedMemoryStep(self.mechanism, past) if past else self.mechanism), call, out

    def get_seq_length(self, *_: Any) -> int:
        """How many tokens were folded in, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """As of a cache that kept every key: other layers may, and masks are made once for all."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.length + int(new), 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget everything."""
        self.past = self.keys = self.values = None
        self.length, self.is_initialized, self.waiting = 0, False, False

    def offload(self) -> None:
        """Nothing: the memory is small."""

    prefetch = offload

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was."""
        if self.past is None or self.keys is None or self.values is None:
            return
        rows = beam_idx.to(self.keys.device)
        self.past.select(rows)
        self.keys, self.values = self.keys[rows], self.values[rows]

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.keys is not None:
            rows = torch.arange(self.keys.shape[0], device=self.keys.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def crop(self, *_: Any) -> None:
        """Refused: what is folded in cannot be taken out."""
        raise ValueError(
            f"{self.mechanism!r} keeps a memory that tokens cannot be taken out of again, which this way of decoding "
            "(assisted or speculative) needs; use greedy, sampling or beam search"
        )


def refuse_second_call(mechanism: Mechanism) -> NoReturn:
    """Raise a ValueError: a module attended again to what its memory holds already."""
    raise ValueError(
        f"it attends more than once in a forward pass, and {mechanism!r} has one memory for a layer; convert a model "
        "whose layers attend once, or use a mechanism that keeps every key"
    )


def memory_layer(cache: Any, index: int | None, installed: Installed, *, swapped: bool) -> MemoryLayer | None:
    """The memory of a converted module in its cache; it takes the place of an empty layer, unless swapped."""
    layers = cache_layers(cache, installed.kind)
    if index is None or layers is None:
        raise ValueError(f"{installed.name} was given a {type(cache).__name__}, which cannot hold a bounded memory")
    while len(layers) <= index:
        layers.append(DynamicLayer())
    layer = layers[index]
    if swapped and isinstance(layer, MemoryLayer):
        raise ValueError(
            f"{installed.name} is swapped, but this cache is that of its own attention, which keeps no keys; "
            "begin with an empty cache inside the swap"
        )
    if swapped:
        return None
    if isinstance(layer, MemoryLayer):
        return layer
    if not isinstance(layer, DynamicLayer) or layer.get_seq_length() > 0:
        filled = "of another kind" if not isinstance(layer, DynamicLayer) else "with keys of another attention"
        raise ValueError(
            f"{installed.name} is converted and keeps a memory of constant size, but was given a cache {filled} "
            f"({type(layer).__name__}); call without past_key_values and cache_implementation, or with DynamicCache()"
        )
    layers[index] = MemoryLayer(installed.mechanism)
    return layers[index]


def cache_layers(cache: Any, kind: Kind) -> list[Any] | None:
    """The layers of a transformers cache for attention of this kind; None for a cache of another making."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.cross_attention_cache if kind == "cross" else cache.self_attention_cache
    return getattr(cache, "layers", None)
