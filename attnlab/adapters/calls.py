"""From the arguments that transformers passes to its attention function to an AttentionCall."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.masks import Seen, seen_by
from attnlab.adapters.protocol import Conversion, Site
from attnlab.attention import AttentionCall

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
    tokens_read: int | None = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> AttentionCall:
    """The call; with a bounded ``memory`` it holds the new keys only.

    ``tokens_read`` is given where the cache evicts: of so many tokens only some keys are left, all before the new ones.
    """
    _refuse_unsupported(module, place, kwargs, tokens_read)
    # Torch has no autocast for meta tensors, and raises an error when asked.
    if not query.is_meta and torch.is_autocast_enabled(query.device.type):
        # Rotary positions come out wider than the rest; SDPA would cast here too.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    n_k = key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    past = 0 if memory is None else memory.length - n_k
    if tokens_read is not None:
        # The mask counts evicted keys too. Padding is refused, so that new tokens see every key that is left.
        seen = Seen(causal=True, offset=n_k - query.shape[2])
    else:
        shape = (query.shape[0], query.shape[2], past + n_k)
        seen = seen_by(mask, shape=shape, causal_module=causal, none_is_causal=own == "sdpa")
    if memory is not None:
        seen = _of_new_keys(seen, past)
    if isinstance(place, Conversion) and place.drop_bias:
        position_bias = None
    return AttentionCall(
        query,
        key,
        value,
        x=_x(x, query, n_k),
        key_visible=seen.key_visible,
        causal=seen.causal,
        offset=seen.offset,
        mask=seen.mask,
        bias=_bias(place, query, position_bias, seen.bias),
        scale=scaling,
    )


def _refuse_unsupported(
    module: nn.Module, place: Site | Conversion, kwargs: Mapping[str, Any], tokens_read: int | None
) -> None:
    for name, what in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} ({place.name}) uses {what} ({name}), which no attnlab mechanism can honour; "
                "swap or record other layers, or another model"
            )
    window = kwargs.get("sliding_window")
    if window is None:
        return
    if isinstance(place, Conversion) and "mask" in place.mechanism.cannot():
        raise ValueError(
            f"{place.name} sees only the last {window} tokens (sliding_window), which {place.mechanism!r} "
            "cannot honour; make the model from a config with sliding_window=None, or convert other layers"
        )
    if tokens_read is not None and tokens_read > window:
        raise ValueError(
            f"{place.name} sees only the last {window} tokens (sliding_window), which an evicting cache does not "
            "honour; decode shorter texts, or make the model from a config with sliding_window=None"
        )


def _of_new_keys(seen: Seen, past: int) -> Seen:
    """The call of a bounded memory holds only the keys that are new; ``past`` others were folded in before."""
    key_visible, mask, bias = (None if t is None else t[..., past:] for t in (seen.key_visible, seen.mask, seen.bias))
    return Seen(key_visible, seen.causal, 0, mask, bias)


def _x(x: Any, query: Tensor, n_k: int) -> Tensor | None:
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[0] != query.shape[0]:
        return None
    # A model spread over devices moves its inputs after the hook has seen them.
    return (x if x.shape[1] <= n_k else x[:, x.shape[1] - n_k :]).to(query)


def _bias(
    place: Site | Conversion, query: Tensor, position_bias: Tensor | None, additive: Tensor | None
) -> Tensor | None:
    # T5 gives its cross-attention a bias of zeros, which would only make mechanisms that take no bias refuse.
    if position_bias is not None and place.kind == "cross" and not position_bias.any():
        position_bias = None
    parts = [t.to(query) for t in (position_bias, additive) if t is not None]
    return sum(parts[1:], parts[0]) if parts else None
