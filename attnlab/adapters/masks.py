"""From transformers' masks to padding and causality, where they are no more: mechanisms in linear time need that.

One rule says what an additive mask or bias hides, that of ``attnlab.attention``: a value of at most -6e4 (or minus
infinity), or one that lies 5e3 or more below the largest of its row. It covers 0/-1e4 and 0/-1e9 masks, ``finfo.min``
in every precision, and a position bias (ALiBi) with any of them added; softmax gives such a key exactly zero. In a
mask of nothing but zeros and -9e3 or less, the low values hide also where they fill a row. What is hidden leaves the
bias and becomes part of the mask, so that it is hidden from every mechanism and every reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.attention import FAR, LEAST
from attnlab.shapes import Bool, Float
from attnlab.summaries import short_repr

__all__ = [
    "Seen",
    "carried_by",
    "carrying_mask",
    "narrowed",
    "recognise",
    "seen_by",
    "version_of",
    "visible_and_bias",
]

CARRIED = "_attnlab_seen"
# In a mask of two levels, 0 and a low one; bfloat16 rounds -1e4, the highest that models write, to -9,984.
LOW = -9e3


@dataclass(frozen=True, eq=False)
class Seen:
    """Which keys a query sees, as fields of an AttentionCall; ``bias`` is what a mask adds to the visible scores."""

    key_visible: Bool[Tensor, "b k"] | None = None
    causal: bool = False
    offset: int = 0
    mask: Bool[Tensor, "#b #h q k"] | None = None
    bias: Tensor | None = None

    __repr__ = short_repr


def carrying_mask(make: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """``make``, a mask function of transformers, whose mask also carries the structure it was made from.

    None stays None, whose meaning depends on the implementation of attention.
    """

    def make_mask(**arguments: Any) -> Tensor | None:
        mask = make(**arguments)
        if isinstance(mask, Tensor) and mask.dim() == 4:
            setattr(mask, CARRIED, (_structure(mask, arguments), version_of(mask)))
        return mask

    return make_mask


def seen_by(mask: Any, *, shape: tuple[int, int, int], causal_module: bool, none_is_causal: bool) -> Seen:
    """The keys that queries see under an attention function's mask; ``shape`` is (batch, queries, keys).

    ``none_is_causal``: in a causal module, no mask means causal to SDPA, and nothing hidden to eager attention.
    """
    _, n_q, n_k = shape
    if mask is None:
        # One query with nothing masked is a decoding step: it stands after its whole cache.
        if not causal_module or not (none_is_causal or n_q == 1):
            return Seen()
        return Seen(causal=True, offset=n_k - 1 if n_q == 1 else 0)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        raise ValueError(
            f"an attention mask of type {type(mask).__name__} cannot be read; use 'sdpa' or 'eager' attention"
        )
    known = carried_by(mask)
    if known is not None:
        # Masks are made once for all layers; only the layer knows whether it is causal.
        return known if causal_module or known.mask is None else replace(known, causal=False, offset=0)
    if mask.dim() == 2:
        keys = mask.bool()
        return Seen(None if keys.all() else keys, causal_module, n_k - n_q if causal_module else 0)
    return _seen_by_4d(mask, shape=shape, causal_module=causal_module)


def _seen_by_4d(mask: Tensor, *, shape: tuple[int, int, int], causal_module: bool) -> Seen:
    """The structure of a boolean or additive mask that says nothing of its own."""
    b, n_q, n_k = shape
    if mask.shape[-1] not in (1, n_k):
        raise ValueError(
            f"its mask is of {mask.shape[-1]} keys, and the text has {n_k}; a model that makes a mask of its cached "
            "keys needs all of them"
        )
    mask, bias = (mask, None) if mask.dtype == torch.bool else visible_and_bias(mask)
    seen = recognise(mask.expand(b, -1, n_q, n_k), offset=n_k - n_q, causal_module=causal_module)
    return seen if bias is None else replace(seen, bias=bias.expand(-1, -1, n_q, n_k))


def visible_and_bias(additive: Float[Tensor, "#b #h #q k"]) -> tuple[Bool[Tensor, "#b #h #q k"], Tensor | None]:
    """What an additive mask leaves visible, and what it adds there; None where that is nothing.

    >>> visible_and_bias(torch.tensor([[[[0.0, 0.5, -1e4, -torch.inf]]]]))
    (tensor([[[[ True,  True, False, False]]]]), tensor([[[[0.0000, 0.5000, 0.0000, 0.0000]]]]))
    """
    if not additive.dtype.is_floating_point:
        raise ValueError(
            f"a 4D attention mask is bool (True: may be seen) or floating point (added to the scores), got "
            f"{additive.dtype}; a 0/1 mask becomes bool with .bool()"
        )
    low = additive <= LOW
    if bool((low | (additive == 0)).all()):
        return ~low, None
    hidden = (additive <= LEAST) | (additive <= additive.amax(-1, keepdim=True) - FAR)
    bias = additive.masked_fill(hidden, 0)
    return ~hidden, bias if bool(bias.any()) else None


def carried_by(mask: Tensor) -> Seen | None:
    """The structure that a mask was made from; None if it is unknown or the mask was written to since."""
    carried, version = getattr(mask, CARRIED, (None, None))
    return carried if carried is not None and version == version_of(mask) else None


def narrowed(mask: Float[Tensor, "#b #h q k"], visible: Bool[Tensor, "#b #h q k"]) -> Float[Tensor, "#b #h q k"]:
    """An additive mask that also hides what is not ``visible``, and carries the structure of both."""
    both = mask.masked_fill(~visible, torch.finfo(mask.dtype).min)
    known = carried_by(mask)
    if known is not None:
        if not (known.causal and bool((visible | ~_causal(visible, known.offset)).all())):
            known = replace(known, mask=visible if known.mask is None else known.mask & visible)
        setattr(both, CARRIED, (known, version_of(both)))
    return both


def recognise(
    mask: Bool[Tensor, "b h q k"],
    *,
    offset: int,
    causal_module: bool = True,
    real_keys: Bool[Tensor, "b k"] | None = None,
) -> Seen:
    """Padding, or padding and causality with this offset, where the mask is exactly that; the mask itself if not.

    In a causal module a mask that hides everything after the query (a sliding window, chunks, packed sequences) is
    causal too, and stays as a mask beside that. Keys that no query sees are taken for padding, unless ``real_keys``
    says which are: a window hides keys from all queries of a decoding step.
    """
    n_q, n_k = mask.shape[2:]
    keys = mask.flatten(1, 2).any(1) if real_keys is None else real_keys
    key_visible = None if bool(keys.all()) else keys
    if torch.equal(mask, keys[:, None, None, :].expand_as(mask)):
        # A single query cannot tell the two apart: in a causal module it is a decoding step.
        step = causal_module and n_q == 1 and 0 < offset < n_k and not bool(keys[:, offset + 1 :].any())
        return Seen(key_visible, causal=step, offset=offset if step else 0)
    triangle = _causal(mask, offset)
    if torch.equal(mask, (keys[:, None, None, :] & triangle).expand_as(mask)):
        return Seen(key_visible, causal=True, offset=offset)
    if causal_module and not bool((mask & ~triangle).any()):
        return Seen(key_visible, causal=True, offset=offset, mask=mask)
    return Seen(mask=mask)


def version_of(mask: Tensor) -> int | None:
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
    keys = _real_keys(arguments.get("attention_mask"), first_key, n_k)
    real = torch.ones(1, n_k, dtype=torch.bool, device=seen.device) if keys is None else keys
    return recognise(seen, offset=offset, real_keys=real.expand(seen.shape[0], -1))


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
