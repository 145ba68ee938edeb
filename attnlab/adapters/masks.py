"""From transformers' masks to padding and causality, where they are no more: mechanisms in linear time need that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlab.shapes import Bool

__all__ = ["Seen", "carried_by", "carrying_mask", "recognise", "seen_by"]

CARRIED = "_attnlab_seen"


@dataclass(frozen=True, eq=False)
class Seen:
    """Which keys a query sees, as fields of an AttentionCall; ``bias`` is a mask that also adds to scores."""

    key_visible: Bool[Tensor, "b k"] | None = None
    causal: bool = False
    offset: int = 0
    mask: Bool[Tensor, "#b #h q k"] | None = None
    bias: Tensor | None = None


def carrying_mask(make: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """``make``, a mask function of transformers, whose mask also carries the structure it was made from.

    None stays None, whose meaning depends on the implementation of attention.
    """

    def make_mask(**arguments: Any) -> Tensor | None:
        mask = make(**arguments)
        if isinstance(mask, Tensor) and mask.dim() == 4:
            setattr(mask, CARRIED, (_structure(mask, arguments), _version(mask)))
        return mask

    return make_mask


def seen_by(mask: Any, *, shape: tuple[int, int, int], causal_module: bool, none_is_causal: bool) -> Seen:
    """The keys that queries see under an attention function's mask; ``shape`` is (batch, queries, keys).

    ``none_is_causal``: in a causal module, no mask means causal to SDPA, and nothing hidden to eager attention.
    """
    b, n_q, n_k = shape
    if mask is None:
        if not (causal_module and none_is_causal):
            return Seen()
        # One query with nothing masked is a decoding step: it stands after its whole cache.
        return Seen(causal=True, offset=n_k - 1 if n_q == 1 else 0)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        raise ValueError(
            f"an attention mask of type {type(mask).__name__} cannot be read; use 'sdpa' or 'eager' attention"
        )
    known = carried_by(mask)
    if known is not None:
        return known
    if mask.dim() == 2:
        seen = mask.bool()
        return Seen(None if seen.all() else seen, causal_module, n_k - n_q if causal_module else 0)
    mask = mask.expand(b, -1, n_q, n_k)
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not bool(((mask == 0) | hidden).all()):
            return Seen(bias=mask)
        mask = ~hidden
    return recognise(mask, offset=n_k - n_q, decoding=causal_module)


def carried_by(mask: Tensor) -> Seen | None:
    """The structure that a mask was made from; None if it is unknown or the mask was written to since."""
    carried, version = getattr(mask, CARRIED, (None, None))
    return carried if carried is not None and version == _version(mask) else None


def recognise(mask: Bool[Tensor, "b h q k"], *, offset: int, decoding: bool = True) -> Seen:
    """Padding, or padding and causality with this offset, where the mask is exactly that; the mask itself if not."""
    if mask.shape[1] == 1:
        keys = mask[:, 0].any(1)
        key_visible = None if bool(keys.all()) else keys
        if torch.equal(mask, keys[:, None, None, :].expand_as(mask)):
            # A single query cannot tell the two apart: in a causal module it is a decoding step.
            step = decoding and mask.shape[2] == 1 and 0 < offset == mask.shape[3] - 1
            return Seen(key_visible, causal=step, offset=offset if step else 0)
        if torch.equal(mask, keys[:, None, None, :] & _causal(mask, offset)):
            return Seen(key_visible, causal=True, offset=offset)
    return Seen(mask=mask)


def _version(mask: Tensor) -> int | None:
    """A number that every write in place changes; None for inference tensors, which do not count writes."""
    return None if mask.is_inference() else mask._version


def _structure(mask: Tensor, arguments: dict[str, Any]) -> Seen:
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    n_k, first_key = int(arguments["kv_length"]), int(arguments.get("kv_offset", 0))
    offset = int(arguments.get("q_offset", 0)) - first_key
    pattern = arguments["mask_function"]
    if pattern is causal_mask_function or pattern is bidirectional_mask_function:
        causal = pattern is causal_mask_function
        keys = _real_keys(arguments.get("attention_mask"), first_key, n_k)
        return Seen(keys, causal, offset if causal else 0)
    seen = mask if mask.dtype == torch.bool else mask == 0
    return recognise(seen, offset=offset)


def _real_keys(padding: Tensor | None, first: int, n_k: int) -> Tensor | None:
    """The slice of the 2D mask that these keys have; keys beyond its end (a static cache's empty places) are hidden."""
    if padding is None:
        return None
    keys = padding[:, first : first + n_k].bool()
    if keys.shape[1] < n_k:
        keys = torch.nn.functional.pad(keys, (0, n_k - keys.shape[1]))
    return None if bool(keys.all()) else keys


def _causal(mask: Tensor, offset: int) -> Tensor:
    _, _, n_q, n_k = mask.shape
    i = torch.arange(n_q, device=mask.device)
    j = torch.arange(n_k, device=mask.device)
    return j <= i[:, None] + offset
