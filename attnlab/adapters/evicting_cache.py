"""A transformers cache of bounded size: the keys and values that a policy keeps, and the number of tokens read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from attnlab.adapters.evict import KeyRanking, KVPolicy, keep_positions
from attnlab.adapters.protocol import CachedKeys
from attnlab.attention import AttentionCall
from attnlab.shapes import Int

__all__ = ["EvictingCache", "EvictingLayer"]


class EvictingLayer(DynamicLayer):
    """The keys and values of one layer that are left."""

    is_croppable = False

    def __init__(self, policy: KVPolicy, layer: int) -> None:
        super().__init__()
        self.ranking, self.seen = KeyRanking(policy, layer), 0
        self.positions: Tensor | None = None
        self.updated = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new keys and values."""
        if self.positions is not None:
            new = torch.arange(self.seen, self.seen + key_states.shape[-2], device=self.positions.device)
            self.positions = torch.cat([self.positions, new.expand(*self.positions.shape[:2], -1)], -1)
        self.seen += key_states.shape[-2]
        self.updated = True
        return super().update(key_states, value_states, *args, **kwargs)

    def cached_keys(self) -> CachedKeys:
        """The keys at hand in the call under way; an error if that call did not bring its own to this cache."""
        if not self.updated:
            raise ValueError("inside evicting(model, policy) as cache, pass past_key_values=cache to the model")
        self.updated = False
        return CachedKeys(self.seen, self.positions)

    def evict(self, call: AttentionCall) -> None:
        """Keep what the policy chooses after this call."""
        assert self.keys is not None
        assert self.values is not None
        if self.keys.shape[:3] != call.k.shape[:3]:
            cached, used = tuple(self.keys.shape), tuple(call.k.shape)
            raise ValueError(
                f"the model caches {cached} in place of keys {used}, and makes keys from it at every step (latent "
                "attention), so no head can evict a key of its own"
            )
        at = self.ranking.kept_after(call)
        if at is not None:
            self.keys, self.values = (keep_positions(t, at) for t in (self.keys, self.values))
            self.positions = at if self.positions is None else self.positions.gather(-1, at)

    def get_seq_length(self, *_: Any) -> int:
        """How many tokens were read, by which new ones are numbered."""
        return self.seen

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """As of a cache that kept every key."""
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.seen + length, 0

    def reorder_cache(self, beam_idx: Int[Tensor, " n"]) -> None:
        """Row i becomes what row ``beam_idx[i]`` was."""
        super().reorder_cache(beam_idx.long())  # type: ignore[arg-type]
        self._select(beam_idx)

    def batch_select_indices(self, indices: Int[Tensor, " n"]) -> None:
        """Keep these rows."""
        super().batch_select_indices(indices)
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.keys is not None:
            rows = torch.arange(self.keys.shape[0], device=self.keys.device)
            self._select(rows.repeat_interleave(repeats))
        super().batch_repeat_interleave(repeats)

    def _select(self, rows: Int[Tensor, " n"]) -> None:
        self.ranking.select(rows)
        if self.positions is not None:
            self.positions = self.positions[rows.to(self.positions.device)]

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.keys = self.values = self.positions = None
        self.is_initialized = False
        self.ranking, self.seen = KeyRanking(self.ranking.policy, self.ranking.layer), 0

    def crop(self, *_: Any) -> None:
        """Refused: evicted keys cannot come back."""
        raise ValueError("an evicting cache cannot be cropped: evicted keys are gone; decode without assistance")


class EvictingCache(Cache):
    """A Hugging Face cache of bounded size; pass it as ``past_key_values``."""

    def __init__(self, policy: KVPolicy, layers: int) -> None:
        super().__init__(layers=[EvictingLayer(policy, i) for i in range(layers)])
        self.policy, self.current = policy, 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append new keys and values to a layer; the attention function that is called next reads them."""
        while len(self.layers) <= layer_idx:
            self.layers.append(EvictingLayer(self.policy, len(self.layers)))
        self.current = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def of_call(self) -> EvictingLayer:
        """The layer whose call is under way; a module that runs several times (HRM) has one for each."""
        layer = self.layers[self.current]
        assert isinstance(layer, EvictingLayer)
        return layer

    def kept(self) -> list[int]:
        """Keys held by each layer."""
        return [0 if layer.keys is None else layer.keys.shape[-2] for layer in self.layers]  # type: ignore[union-attr]
