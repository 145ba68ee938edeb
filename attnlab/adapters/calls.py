"""From the arguments that transformers passes to its attention function to an AttentionCall."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.masks import Seen, recognise, seen_by, visible_and_bias
from attnlab.adapters.module_state import cache_layer
from attnlab.adapters.protocol import CachedKeys, Conversion, Site
from attnlab.attention import AttentionCall, repeat_groups

__all__ = ["make_call"]

# Arguments of some models' attention functions that change W in a way that no AttentionCall can express.
UNSUPPORTED = {
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "indices": "keys chosen by an indexer",
    "block_indices": "blocks of keys chosen by an indexer",
    "cache": "a paged cache",
}


def make_call(
    module: nn.Module,
    place: Site | Conversion,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *,
    x: Any,
    own: str,
    memory: Any = None,
    cached_keys: CachedKeys | None = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> AttentionCall:
    """The call; with a bounded ``memory`` it holds the new keys only, with ``cached_keys`` those that are not evicted.

    Masks and biases of the model cover the keys of all tokens.
    """
    _refuse_unsupported(module, place, kwargs)
    # Torch has no autocast for meta tensors, and raises an error when asked.
    if not query.is_meta and torch.is_autocast_enabled(query.device.type):
        # Rotary positions come out wider than the rest; SDPA would cast here too.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if cached_keys is not None and cached_keys.kept is not None:
        key, value = cached_keys.kept
    n_k = key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    past = 0 if memory is None else memory.length - n_k
    length = past + n_k if cached_keys is None else cached_keys.tokens_read
    seen = seen_by(
        mask,
        shape=(query.shape[0], query.shape[2], length),
        # Under a mask, the keys of another sequence have no order that a query stands in.
        causal_module=_is_causal(place, causal, mask, query.shape[2]),
        none_is_causal=own == "sdpa",
    )
    if isinstance(place, Conversion) and place.drop_bias:
        position_bias = None
    seen = _with_position_bias(seen, place, query, position_bias, length)
    if memory is not None:
        seen = _of_new_keys(seen, past)
    elif cached_keys is not None:
        seen = _of_cached_keys(seen, cached_keys, query, n_k)
    return AttentionCall(
        query,
        key,
        value,
        x=_x(x, query, n_k),
        key_visible=seen.key_visible,
        causal=seen.causal,
        offset=seen.offset,
        mask=seen.mask,
        bias=seen.bias,
        scale=scaling,
    )


def _is_causal(place: Site | Conversion, said: bool, mask: Any, n_q: int) -> bool:
    """Whether a call is one of causal attention, where the module says whether it is; its mask has the last word."""
    if mask is None and n_q > 1:
        return said
    return place.kind == "decoder" or (said and (mask is None or place.kind != "cross"))


def _refuse_unsupported(module: nn.Module, place: Site | Conversion, kwargs: Mapping[str, Any]) -> None:
    for name, what in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} uses {what} ({name}), which no attnlab mechanism can honour; "
                "swap or record other layers, or another model"
            )
    if isinstance(place, Conversion) and "mask" in place.mechanism.cannot():
        for name, what in _windows(module, kwargs).items():
            raise ValueError(
                f"it sees only {what} ({name}), which {place.mechanism!r} cannot honour; "
                f"{'make the model from a config with sliding_window=None, or ' * (name == 'sliding_window')}"
                "convert other layers"
            )


def _windows(module: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, str]:
    """What limits a module to some of the tokens before, however short the text of this call: {its name: in words}."""
    windows = {}
    if kwargs.get("sliding_window") is not None:
        windows["sliding_window"] = f"the last {kwargs['sliding_window']} tokens"
    # Any: fields of a config differ from family to family.
    config: Any = getattr(module, "config", None)
    layer = cache_layer(module)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and layer is not None and layer < len(kinds) and kinds[layer] == "chunked_attention":
        windows["attention_chunk_size"] = f"the tokens of its chunk of {config.attention_chunk_size}"
    # GPT-Neo.
    if getattr(module, "attention_type", None) == "local" and hasattr(config, "window_size"):
        windows["window_size"] = f"the last {config.window_size} tokens"
    return windows


def _of_new_keys(seen: Seen, past: int) -> Seen:
    """The call of a bounded memory holds only the keys that are new; ``past`` others were folded in before."""
    key_visible, mask, bias = (None if t is None else t[..., past:] for t in (seen.key_visible, seen.mask, seen.bias))
    return Seen(key_visible, seen.causal, 0, mask, bias)


def _x(x: Any, query: Tensor, n_k: int) -> Tensor | None:
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[0] != query.shape[0]:
        return None
    # A model spread over devices moves its inputs after the hook has seen them.
    return (x if x.shape[1] <= n_k else x[:, x.shape[1] - n_k :]).to(query)


def _with_position_bias(
    seen: Seen, place: Site | Conversion, query: Tensor, position_bias: Tensor | None, n_k: int
) -> Seen:
    """The model's position bias added to that of the mask; what it hides is hidden."""
    # T5 gives its cross-attention a bias of zeros, which would only make mechanisms that take no bias refuse.
    if position_bias is not None and place.kind == "cross" and not position_bias.any():
        position_bias = None
    bias = seen.bias
    if position_bias is not None:
        visible, position_bias = visible_and_bias(position_bias)
        if not bool(visible.all()):
            seen = _with_hidden(seen, place, visible, query, n_k)
    parts = [t.to(query) for t in (position_bias, bias) if t is not None]
    return replace(seen, bias=sum(parts[1:], parts[0]) if parts else None)


def _with_hidden(seen: Seen, place: Site | Conversion, visible: Tensor, query: Tensor, n_k: int) -> Seen:
    """What is seen of what a bias shows: where all of the mask is in the bias (UMT5), with the mask's structure."""
    if seen.causal or seen.key_visible is not None or seen.mask is not None:
        return replace(seen, mask=visible if seen.mask is None else seen.mask & visible)
    b, _, n_q, _ = query.shape
    return recognise(visible.expand(b, -1, n_q, n_k), offset=n_k - n_q, causal_module=place.kind == "decoder")


def _of_cached_keys(seen: Seen, cached: CachedKeys, query: Tensor, n_k: int) -> Seen:
    """What new tokens see of the keys that were not evicted, all of which come before the new ones."""
    b, h, n_q, _ = query.shape
    if not seen.causal and n_q > 1:
        raise ValueError("an evicting cache takes a causal mask only: here a token sees later tokens")
    mask, bias = seen.mask, seen.bias
    if cached.positions is None:
        return Seen(seen.key_visible, causal=True, offset=n_k - n_q, mask=mask, bias=bias)
    if seen.key_visible is not None:
        keys = seen.key_visible[:, None, None, :].expand(-1, -1, n_q, -1)
        mask = keys if mask is None else mask & keys
    positions = repeat_groups(cached.positions, h // cached.positions.shape[1]).unsqueeze(2).expand(-1, -1, n_q, -1)
    at = positions.clamp(min=0).long()
    mask, bias = (None if t is None else t.expand(b, h, n_q, -1).gather(-1, at) for t in (mask, bias))
    if cached.ragged:
        mask = positions >= 0 if mask is None else mask & (positions >= 0)
    if (of_keys := cached.bias(query)) is not None:
        bias = of_keys if bias is None else bias + of_keys
    return Seen(causal=True, offset=n_k - n_q, mask=mask, bias=bias)
