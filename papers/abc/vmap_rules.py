"""A model under ``torch.func.vmap`` in few launches: rules of our own where torch's are several kernels.

A rule for vmap sees whole tensors, with the axis of the models, and autograd sees what the rule does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, embedding, linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from attnlab.mechanisms._bounded.slots import lengths_unchecked
from attnlab.mechanisms._device import without_kernels

__all__ = ["few_launches"]


@contextmanager
def few_launches() -> Iterator[None]:
    """Inside, calls under vmap take our rules; attention runs no kernels and reads no lengths, which have no rules."""
    with without_kernels(), lengths_unchecked(), _Rules():
        yield


class _Rules(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is linear:
            x, weight, bias = args
            found = (x.flatten(0, -2) @ weight.mT).unflatten(0, x.shape[:-1])
            return found if bias is None else found + bias
        if func is embedding:
            return _Rows.apply(*reversed(args[:2]))
        if func is dropout:
            return _Dropout.apply(*args, options["p"]) if options["training"] and options["p"] else args[0]
        if func is scaled_dot_product_attention:
            assert not options.pop("enable_gqa", False)
            return _Attention.apply(*args, options.pop("attn_mask"), tuple(options.items()))
        return func(*args, **options)


class _Rows(torch.autograd.Function):
    """Rows of a matrix, whose gradient is added up where it belongs: torch's own sorts the tokens first."""

    @staticmethod
    def forward(weight: Tensor, ids: Tensor) -> Tensor:
        return weight[ids]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        weight, ids = inputs
        ctx.save_for_backward(ids)
        ctx.like = weight.shape, weight.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,), (shape, dtype) = ctx.saved_tensors, ctx.like
        found = torch.zeros(shape, dtype=torch.float32, device=grad.device)
        return found.index_add_(0, ids.flatten(), grad.flatten(0, -2).float()).to(dtype), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, weight: Tensor, ids: Tensor) -> tuple[Tensor, int]:
        if in_dims[0] is None:
            return _Rows.apply(weight, ids), in_dims[1]
        weight, ids = (_leading(t, dim, info.batch_size) for t, dim in zip((weight, ids), in_dims, strict=True))
        first = weight.shape[1] * torch.arange(len(weight), device=ids.device).view(-1, *[1] * (ids.dim() - 1))
        return _Rows.apply(weight.flatten(0, 1), ids + first), 0


class _Dropout(torch.autograd.Function):
    """One kernel instead of three."""

    @staticmethod
    def forward(x: Tensor, p: float) -> Tensor:
        return dropout(x, p)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, p: float) -> tuple[Tensor, int]:
        return dropout(x, p), in_dims[0]


class _Attention(torch.autograd.Function):
    """SDPA with the models as rows; torch's rule for its fused form has gradients that are not aligned."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Any) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, **dict(options))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        *tensors, options = args
        rows: list[Any] = [
            None if t is None else _leading(t, dim, info.batch_size).flatten(0, 1)
            for t, dim in zip(tensors, in_dims, strict=False)
        ]
        found = scaled_dot_product_attention(rows[0], rows[1], rows[2], attn_mask=rows[3], **dict(options))
        return found.unflatten(0, (info.batch_size, -1)), 0


def _leading(t: Tensor, dim: int | None, size: int) -> Tensor:
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)
