"""A transformers cache of bounded size: the keys and values that a policy keeps, and the number of tokens read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from attnlab.adapters.protocol import CachedKeys
from attnlab.attention import AttentionCall
from attnlab.caches.contract import Place
from attnlab.caches.kept_keys import KeptKeys, LayerPool
from attnlab.caches.kv_policy import KVPolicy
from attnlab.shapes import Int

__all__ = ["EvictingCache", "EvictingLayer"]


class EvictingLayer(DynamicLayer):
    """The keys and values of one layer that are left."""

    is_croppable = False

    def __init__(self, policy: KVPolicy, layer: int, pool: LayerPool) -> None:
        super().__init__()
        self.kept = KeptKeys(policy, layer, pool)
        self.updated = False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new keys and values."""
        self.kept.extend(key_states.shape[-2])
        self.updated = True
        return super().update(key_states, value_states, *args, **kwargs)

    def cached_keys(self) -> CachedKeys:
        """The keys at hand in the call under way; an error if that call did not bring its own to this cache."""
        if not self.updated:
            raise ValueError("inside evicting(model, policy) as cache, pass past_key_values=cache to the model")
        self.updated = False
        return CachedKeys(self.kept.length, self.kept.columns, self.kept.ragged, self.kept.bias)

    def evict(self, call: AttentionCall, place: Place) -> None:
        """Keep what the policy chooses after this call."""
        assert self.keys is not None
        assert self.values is not None
        if self.keys.shape[:3] != call.k.shape[:3]:
            cached, used = tuple(self.keys.shape), tuple(call.k.shape)
            raise ValueError(
                f"the model caches {cached} in place of keys {used}, and makes keys from it at every step (latent "
                "attention), so no head can evict a key of its own"
            )
        again = self.kept.waits
        at = self.kept.cut_after_rereading(call, place) if again else self.kept.cut(call, place)
        if at is not None:
            self.leave(at)

    def leave(self, at: Int[Tensor, "b g n"]) -> None:
        """Keep the keys at these places, or what the policy put there."""
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = self.kept.take(self.keys, self.values, at)

    def get_seq_length(self, *_: Any) -> int:
        """How many tokens were read, by which new ones are numbered."""
        return self.kept.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """As of a cache that kept every key."""
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.kept.length + length, 0

    def reorder_cache(self, beam_idx: Int[Tensor, " n"]) -> None:
        """Row i becomes what row ``beam_idx[i]`` was."""
        super().reorder_cache(beam_idx.long())  # type: ignore[arg-type]
        self.kept.select(beam_idx)

    def batch_select_indices(self, indices: Int[Tensor, " n"]) -> None:
        """Keep these rows."""
        super().batch_select_indices(indices)
        self.kept.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.keys is not None:
            rows = torch.arange(self.keys.shape[0], device=self.keys.device)
            self.kept.select(rows.repeat_interleave(repeats))
        super().batch_repeat_interleave(repeats)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.keys = self.values = None
        self.is_initialized = False
        self.kept = KeptKeys(self.kept.policy, self.kept.layer, self.kept.pool)

    def crop(self, *_: Any) -> None:
        """Refused: evicted keys cannot come back."""
        raise ValueError("an evicting cache cannot be cropped: evicted keys are gone; decode without assistance")


class EvictingCache(Cache):
    """A Hugging Face cache of bounded size; pass it as ``past_key_values``."""

    def __init__(self, policy: KVPolicy, layers: int) -> None:
        self.pool = LayerPool()
        super().__init__(layers=[EvictingLayer(policy, i, self.pool) for i in range(layers)])
        self.pool.layers = self.layers
        self.policy, self.current, self.rereading = policy, 0, False

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append new keys and values to a layer; the attention function that is called next reads them."""
        while len(self.layers) <= layer_idx:
            self.layers.append(EvictingLayer(self.policy, len(self.layers), self.pool))
        self.current = layer_idx
        if not self.rereading:
            self.of_call().kept.refuse_waiting()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @contextmanager
    def reading_twice(self, model: nn.Module) -> Iterator[None]:
        """Let the model read its prompt a second time before keys are dropped, where the policy asks for that."""
        if not self.policy.score.reads_twice:
            yield
            return
        hook = model.register_forward_hook(self._read_again, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _read_again(self, model: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any], _output: Any) -> None:
        if self.rereading or inputs.get("past_key_values") is not self or not self.of_call().kept.waits:
            return
        length = self.get_seq_length()
        config: Any = model.config
        most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        if most is not None and 2 * length > most:
            raise ValueError(
                f"the cache policy {self.policy.by!r} reads the prompt of {length} tokens twice, and the model has "
                f"{most} positions; shorten the prompt, or choose another policy"
            )
        names = ("input_ids", "inputs_embeds")
        prompt = {name: inputs[name] for name in names if inputs.get(name) is not None} or {"input_ids": args[0]}
        self.rereading = True
        try:
            with torch.no_grad():
                model(**prompt, past_key_values=self, use_cache=True)
        finally:
            self.rereading = False

    def evict(self, call: AttentionCall, place: Place) -> None:
        """Keep what the policy chooses after the call under way; layers that share budgets are cut with the last."""
        self.of_call().evict(call, place)
        if self.current == len(self.layers) - 1:
            self.pool.cut()

    def of_call(self) -> EvictingLayer:
        """The layer whose call is under way; a module that runs several times (HRM) has one for each."""
        layer = self.layers[self.current]
        assert isinstance(layer, EvictingLayer)
        return layer

    def kept(self) -> list[int]:
        """The most keys that a head of each layer holds."""
        return [0 if layer.keys is None else layer.keys.shape[-2] for layer in self.layers]  # type: ignore[union-attr]

    def kept_by_head(self) -> list[Int[Tensor, "b g"]]:
        """For each layer that has read tokens, the keys that every head of every row holds."""
        return [layer.kept.counts(layer.keys) for layer in self.layers if layer.keys is not None]  # type: ignore[union-attr]

    def certificates(self) -> list[Any]:
        """For each layer, how good what the policy put in the place of its keys is; None where it put nothing."""
        return [layer.kept.certificate for layer in self.layers if isinstance(layer, EvictingLayer)]
