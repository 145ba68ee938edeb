"""What a family that attends by code of its own calls instead: what transformers' AttentionInterface is to others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop

from attnlab.attention import repeat_groups

__all__ = ["attend", "own_attention"]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: nn.Dropout | float | None = None,
    implementation: str = "eager",
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """(the heads' outputs as (b, q, h, e), W or None): by contexts and conversions, or as the model itself."""
    from attnlab.adapters.attention_function import function_in_place_of

    p = (dropout.p if isinstance(dropout, nn.Dropout) else dropout or 0.0) if module.training else 0.0
    return function_in_place_of(implementation)(module, query, key, value, mask, dropout=p, **options)


def own_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """What the model itself computes: softmax in float32 or wider, hidden pairs at the least finite number."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_groups(key, groups), repeat_groups(value, groups)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).mT * scaling
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(wide).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = drop(scores.softmax(-1).to(value.dtype), p=dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights
