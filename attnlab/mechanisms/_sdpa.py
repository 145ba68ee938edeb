"""torch's softmax attention, with the NaN that its CPU kernel loses put back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnlab.attention import repeat_groups
from attnlab.shapes import Bool, Float

__all__ = ["sdpa"]


def sdpa(
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b g k d"],
    v: Float[Tensor, "b g k e"],
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float,
) -> Float[Tensor, "b h q e"]:
    """``scaled_dot_product_attention``; a query whose scores are all NaN gets NaN, where torch's CPU kernel gives 0."""
    groups = q.shape[1] // k.shape[1]
    out: Tensor = scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=groups > 1
    )
    if q.device.type != "cpu" or torch.compiler.is_compiling():
        return out
    try:
        # One column tells of nearly every call that no row is zero.
        if not bool((out.detach()[..., :1] == 0).any()):
            return out
    except RuntimeError:
        # Inside a transform such as vmap no number can be read.
        return out
    zeros = (out.detach() == 0).all(-1)
    sees = _sees_nan(q.detach(), repeat_groups(k.detach(), groups), attn_mask, is_causal)
    return out.masked_fill((zeros & sees).unsqueeze(-1), torch.nan)


def _sees_nan(
    q: Float[Tensor, "b h q d"], k: Float[Tensor, "b h k d"], attn_mask: Tensor | None, is_causal: bool
) -> Bool[Tensor, "b h q"]:
    """Whether a query that sees a key is NaN itself or sees one that is."""
    of_keys = k.isnan().any(-1).unsqueeze(2)
    if is_causal:
        attn_mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    if attn_mask is None:
        return q.isnan().any(-1) | of_keys.any(-1)
    seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -torch.inf
    return (q.isnan().any(-1) & seen.any(-1)) | (of_keys & seen).any(-1)
