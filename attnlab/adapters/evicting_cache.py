"""A transformers cache of bounded size: the keys and values that a policy keeps, and the number of tokens read."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from attnlab.adapters.masks import Seen, seen_by, version_of
from attnlab.adapters.module_state import open_site
from attnlab.adapters.protocol import CachedKeys
from attnlab.attention import AttentionCall
from attnlab.caches.contract import Place
from attnlab.caches.kept_keys import KeptKeys
from attnlab.caches.kv_policy import KVPolicy
from attnlab.caches.layers import KeysOfLayers, LayerPool
from attnlab.shapes import Bool, Int

__all__ = ["EvictingCache", "EvictingLayer", "refuse_states", "whole_prompts"]

# What each row sees is stored in rows of a multiple of so many columns.
COLUMNS = 256


class EvictingLayer(DynamicLayer):
    """The keys and values of one layer that are left; ``kept`` holds them, without padding."""

    is_croppable = False

    def __init__(self, policy: KVPolicy, layer: int, pool: LayerPool) -> None:
        self.kept = KeptKeys(policy, layer, pool)
        super().__init__()
        self.updated = False
        # Whether the model attends to the keys as it caches them, so that they can be read where they lie.
        self.read_as_cached = False
        # The new keys that the model was given, in place of all.
        self.stepped: Tensor | None = None

    @property
    def past(self) -> KeptKeys:
        """What is held, under the name that it has in every layer of bounded size."""
        return self.kept

    @property
    def keys(self) -> Tensor | None:
        """Copies, or views, of the keys that are left: (b, g, the most of a head, d), others padded before theirs."""
        return self.kept.padded("keys")

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        _refuse_tensor(value)

    @property
    def values(self) -> Tensor | None:
        """The same of values."""
        return self.kept.padded("values")

    @values.setter
    def values(self, value: Tensor | None) -> None:
        _refuse_tensor(value)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take in the new keys and values, and give the model all that it attends to.

        In a call after which nothing is evicted these are the new ones: ``step`` reads the others where they lie.
        """
        self.is_initialized, self.stepped = True, None
        if self.read_as_cached and self.kept.steps(key_states):
            self.kept.append(key_states, value_states)
            self.stepped = key_states
            given = key_states, value_states
        else:
            given = self.kept.extend(key_states, value_states)
        self.updated = True
        return given

    def cached_keys(self) -> CachedKeys:
        """The keys at hand in the call under way; an error if that call did not bring its own to this cache."""
        if not self.updated:
            raise ValueError(
                "this call's keys did not come through the cache; inside evicting(model, policy) as cache, pass "
                "past_key_values=cache to the model, which must attend once to what it caches"
            )
        self.updated = False
        whole = None if self.stepped is None else self.kept.as_call()
        return CachedKeys(self.kept.length, self.kept.columns, self.kept.ragged, whole, self.kept.bias)

    def step(self, q: Tensor, k: Tensor, *, scale: float, visible: Tensor | None) -> Tensor:
        """The outputs of new tokens over the keys where they lie."""
        assert self.stepped is k
        self.updated, self.stepped = False, None
        return self.kept.attend(q, scale=scale, visible=visible)

    def evict(self, call: AttentionCall, place: Place, *, handed_on: bool) -> None:
        """Keep what the policy chooses after this call; ``handed_on`` is as ``hands_keys_on`` says."""
        pending = self.kept.pending
        assert pending is not None
        if pending.keys.shape[:3] != call.k.shape[:3]:
            cached, used = tuple(pending.keys.shape), tuple(call.k.shape)
            raise ValueError(
                f"the model caches {cached} in place of keys {used}, and makes keys from it at every step (latent "
                "attention), so no head can evict a key of its own"
            )
        self.read_as_cached = handed_on and call.k is pending.keys and call.v is pending.values
        if self.kept.waits:
            self.kept.cut_after_rereading(call, place)
        else:
            self.kept.cut(call, place)

    def get_seq_length(self, *_: Any) -> int:
        """How many tokens were read, by which new ones are numbered."""
        return self.kept.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """As of a cache that kept every key."""
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.kept.length + length, 0

    def reorder_cache(self, beam_idx: Int[Tensor, " n"]) -> None:
        """Row i becomes what row ``beam_idx[i]`` was."""
        self.kept.select(beam_idx.long())

    def batch_select_indices(self, indices: Int[Tensor, " n"]) -> None:
        """Keep these rows."""
        self.kept.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.kept.store is not None:
            self.kept.select(torch.arange(self.kept.store.rows).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.is_initialized = self.updated = False
        self.stepped = None
        self.kept = self.kept.emptied()

    def crop(self, *_: Any) -> None:
        """Refused: evicted keys cannot come back."""
        raise ValueError("an evicting cache cannot be cropped: evicted keys are gone; decode without assistance")


class _Session:
    """What a context and all copies of its cache share: which of them a call brought last; None: the context ended."""

    def __init__(self) -> None:
        self.cache: EvictingCache | None = None

    def __deepcopy__(self, _memo: Any) -> _Session:
        return self


class EvictingCache(KeysOfLayers, Cache):
    """A Hugging Face cache of bounded size; pass it as ``past_key_values``.

    ``copy.deepcopy`` gives one that goes on by itself: a prompt is compressed once for many questions.
    """

    def __init__(self, policy: KVPolicy, layers: int) -> None:
        self.session = _Session()
        self.session.cache = self
        self.pool = LayerPool()
        super().__init__(layers=[EvictingLayer(policy, i, self.pool) for i in range(layers)])
        self.policy, self.current, self.rereading = policy, 0, False
        # The last mask that ``columns_seen`` was asked about, its version, and the answer.
        self._answer: tuple[Tensor, int, tuple[bool, Tensor | None]] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append new keys and values to a layer; the attention function that is called next reads them."""
        if self.session.cache is None:
            raise ValueError("the context al.evicting(...) that made this cache has ended; use the cache inside of it")
        self.session.cache = self
        if self.of_call().updated:
            raise ValueError(
                f"layer {self.current} did not attend to the keys that it brought to this cache: the model that is "
                "called is not the one in al.evicting(model, ...), or its call failed; take a new cache, or call "
                "cache.reset()"
            )
        while len(self.layers) <= layer_idx:
            self.layers.append(EvictingLayer(self.policy, len(self.layers), self.pool))
        self.current = layer_idx
        if not self.rereading:
            self.of_call().kept.refuse_waiting()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @contextmanager
    def opened(self, model: nn.Module) -> Iterator[_Session]:
        """Serve a model's calls with this cache and its copies; prompts are read twice where the policy asks for it."""
        hook = None
        if self.policy.score.reads_twice:
            hook = model.register_forward_hook(self._call_ended, with_kwargs=True)
        try:
            yield self.session
        finally:
            self.session.cache = None
            if hook is not None:
                hook.remove()

    def _call_ended(self, model: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any], _output: Any) -> None:
        cache = inputs.get("past_key_values")
        if isinstance(cache, EvictingCache) and cache.session is self.session:
            cache.read_again(model, args, inputs)

    def read_again(self, model: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        """Read the prompt of a call that just ended a second time, if it waits for that."""
        if self.rereading or not self.of_call().kept.waits:
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

    def of_call(self) -> EvictingLayer:
        """The layer whose call is under way; a module that runs several times (HRM) has one for each."""
        layer = self.layers[self.current]
        assert isinstance(layer, EvictingLayer)
        return layer

    def kept_keys(self) -> list[KeptKeys]:
        """Those of the layers."""
        return [layer.kept for layer in self.layers if isinstance(layer, EvictingLayer)]

    def step(
        self, module: nn.Module, q: Tensor, k: Tensor, _v: Tensor, mask: Any, arguments: Mapping[str, Any]
    ) -> tuple[Tensor, None] | None:
        """Let new tokens attend to the keys where they lie; None where the call asks for more than that."""
        layer, opened = self.of_call(), open_site(module)
        if layer.stepped is not k or q.shape[2] != k.shape[2] or q.dtype != k.dtype or opened is None:
            return None
        inputs = opened.inputs.get(threading.get_ident(), {})
        if arguments.get("position_bias") is not None or inputs.get("output_attentions"):
            return None
        same, visible = self.columns_seen(mask, q.shape[0], q.shape[2], layer.kept.length)
        if not same:
            return None
        opened.inputs.pop(threading.get_ident(), None)
        scale = arguments.get("scaling")
        out = layer.step(q, k, scale=q.shape[-1] ** -0.5 if scale is None else scale, visible=visible)
        return out.transpose(1, 2).contiguous(), None

    def columns_seen(self, mask: Any, rows: int, new: int, length: int) -> tuple[bool, Bool[Tensor, "b m c"] | None]:
        """Whether a mask shows the same columns to all heads, and each token itself; and which, None: all so far.

        Layers share a mask, so the answer is remembered.
        """
        if mask is None:
            return new == 1, None
        version = version_of(mask) if isinstance(mask, Tensor) else None
        if self._answer is not None and self._answer[0] is mask and self._answer[1] == version:
            return self._answer[2]
        seen = seen_by(mask, shape=(rows, new, length), causal_module=True, none_is_causal=True)
        # One token stands behind all others, whatever its mask is called.
        in_order = new == 1 or (seen.causal and seen.offset == length - new)
        answer = _columns_of(seen, rows, new) if in_order else (False, None)
        self._answer = None if version is None else (mask, version, answer)
        return answer


@contextmanager
def whole_prompts(model: nn.Module, policy: KVPolicy) -> Iterator[None]:
    """Refuse ``generate(prefill_chunk_size=...)`` where keys are dropped once: after the first part of the prompt."""
    generate: Any = getattr(model, "generate", None)
    if generate is None or policy.schedule == "step":
        yield
        return

    @functools.wraps(generate)
    def generate_from_whole_prompts(*args: Any, **settings: Any) -> Any:
        config = settings.get("generation_config") or (args[1] if len(args) > 1 else None)
        config = getattr(model, "generation_config", None) if config is None else config
        if settings.get("prefill_chunk_size", getattr(config, "prefill_chunk_size", None)) is not None:
            raise ValueError(
                f"prefill_chunk_size has the prompt read in parts, and the cache policy {policy.by!r} drops keys once, "
                "after the first of them; leave it out, or let the policy drop keys after every call (when=step)"
            )
        return generate(*args, **settings)

    before = model.__dict__.get("generate")
    model.__dict__["generate"] = generate_from_whole_prompts
    try:
        yield
    finally:
        del model.__dict__["generate"]
        if before is not None:
            model.__dict__["generate"] = before


def refuse_states(model: Any) -> None:
    """Raise a ValueError if a layer of a model keeps something else of a text than keys and values."""
    name = type(model).__name__
    for number, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(
                f"layer {number} of {name} keeps more of a text than keys and values ({type(layer).__name__}), which "
                "no cache policy holds; take a model that attends in every layer"
            )
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"layers of {name} keep states beside keys and values, which no cache policy holds; take a model that "
            "attends in every layer"
        )


def _refuse_tensor(value: Tensor | None) -> None:
    # transformers makes a layer without keys.
    if value is not None:
        raise ValueError(
            "the keys and values of an evicting cache are those that its policy keeps and cannot be set; let the model "
            "read tokens with past_key_values=cache"
        )


def _columns_of(seen: Seen, rows: int, new: int) -> tuple[bool, Bool[Tensor, "b m c"] | None]:
    """Whether the last tokens of each row see the same columns in all heads, and themselves; and which, None: all."""
    if seen.bias is not None or (seen.mask is not None and seen.mask.shape[1] > 1):
        return False, None
    parts = [
        None if seen.key_visible is None else seen.key_visible[:, None],
        None if seen.mask is None else seen.mask[:, 0],
    ]
    known = [part for part in parts if part is not None]
    if not known:
        return True, None
    seen_now = functools.reduce(torch.logical_and, known)
    each, length = seen_now.shape[1:]
    # Rows that lie as far apart for many steps: how a kernel is launched is remembered by its strides.
    visible = seen_now.new_zeros(rows, each, -(-length // COLUMNS) * COLUMNS)[..., :length]
    visible[:] = seen_now
    own = visible[..., length - new :]
    return bool((own if each == 1 else own.diagonal(dim1=1, dim2=2)).all()), visible
