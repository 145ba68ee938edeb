"""Heads taken in two parts and joined again with few copies: a part that lies in the whole already is left there.

Whoever computes the first part may write it where the whole has room for it. ``torch.split`` and ``torch.cat`` would
copy both parts, once forward and three times backward, which on a GPU is a good part of what guidance costs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.shapes import Float

__all__ = ["join_heads", "split_heads"]


def split_heads(t: Float[Tensor, "b h q d"], first: int) -> tuple[Tensor, Tensor]:
    """The first heads and the others."""
    return _Split.apply(t, first)


def join_heads(first: Float[Tensor, "b s q d"], others: Float[Tensor, "b u q d"]) -> Float[Tensor, "b h q d"]:
    """The inverse of ``split_heads``."""
    return _Join.apply(first, others)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, first: int) -> tuple[Tensor, Tensor]:
        return t[:, :first], t[:, first:]

    @staticmethod
    def backward(ctx: Any, first: Tensor, others: Tensor) -> tuple[Tensor, None]:
        return _whole(first, others), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, others: Tensor) -> Tensor:
        ctx.first = first.shape[1]
        return _whole(first, others)

    @staticmethod
    def backward(ctx: Any, whole: Tensor) -> tuple[Tensor, Tensor]:
        return whole[:, : ctx.first], whole[:, ctx.first :]


def _whole(first: Tensor, others: Tensor) -> Tensor:
    b, s, n, d = first.shape
    heads = s + others.shape[1]
    base = first._base
    if base is None or base.shape != (b, n, heads, d) or first.stride() != (n * heads * d, d, heads * d, 1):
        base = first.new_empty(b, n, heads, d)
        base[:, :, :s] = first.transpose(1, 2)
    # Through .data: the first part may be saved for the backward pass, and it does not change here.
    base.data[:, :, s:] = others.transpose(1, 2)
    return base.transpose(1, 2)
