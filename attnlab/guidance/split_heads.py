"""Heads split in two parts and joined again with few copies: a part that already lies in the whole is not copied.

A kernel may write the first part into memory that has room for the whole. ``torch.split`` and ``torch.cat`` would copy
both parts, once forward and three times backward, which on a GPU is a good part of what guidance costs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.shapes import Float

__all__ = ["join_heads", "split_heads"]

# A type of sixteen bytes; only its size matters.
CHUNK = torch.complex128


def split_heads(first: int, *tensors: Float[Tensor, "b h _ _"]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The first heads of each tensor, and the others of each."""
    parts = _Split.apply(first, *tensors)
    return parts[: len(tensors)], parts[len(tensors) :]


def join_heads(first: Float[Tensor, "b s q d"], others: Float[Tensor, "b u q d"]) -> Float[Tensor, "b h q d"]:
    """The inverse of ``split_heads``."""
    return _Join.apply(first, others)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        parts = (*(t[:, :first] for t in tensors), *(t[:, first:] for t in tensors))
        ctx.shapes = [part.shape for part in parts]
        return parts

    @staticmethod
    def backward(ctx: Any, *parts: Tensor | None) -> tuple[Tensor | None, ...]:
        half, wholes = len(parts) // 2, list[Tensor | None]()
        for i in range(half):
            first, others = parts[i], parts[half + i]
            # A part that was not used has no gradient; where the other part has one, it is 0.
            if first is None and others is not None:
                first = others.new_zeros(ctx.shapes[i])
            if others is None and first is not None:
                others = first.new_zeros(ctx.shapes[half + i])
            wholes.append(None if first is None or others is None else _whole(first, others))
        return None, *wholes


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
        _copy(first.transpose(1, 2), base[:, :, :s])
    # Through .data: the first part may be saved for the backward pass, and it does not change here.
    _copy(others.transpose(1, 2), base.data[:, :, s:])
    return base.transpose(1, 2)


def _copy(source: Tensor, target: Tensor) -> None:
    """Sixteen bytes at a time where rows allow it: element by element a strided copy has half the speed on a GPU."""
    source, target = source.detach(), target.detach()
    if _in_chunks(source) and _in_chunks(target):
        source, target = source.view(CHUNK), target.view(CHUNK)
    target.copy_(source)


def _in_chunks(t: Tensor) -> bool:
    *steps, last = t.stride()
    each = CHUNK.itemsize // t.element_size()
    return last == 1 and t.data_ptr() % CHUNK.itemsize == 0 and not any(n % each for n in (t.shape[-1], *steps))
