"""ABC_MLP on a GPU: the memory is written, scanned and read by Triton kernels, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.kernels._abc_launch import backward, forward

__all__ = ["abc_attention"]


class _Abc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, s, first_k, first_v, first_z, visible, cu_seqlens, causal, scale):  # type: ignore[no-untyped-def]
        first = None if first_k is None else (first_k, first_v, first_z)
        out, *rest = forward(q, k, v, s, visible, first, cu_seqlens, causal, scale)
        ctx.save_for_backward(q, k, v, s, *rest, visible, cu_seqlens, first_k, first_v, first_z)
        ctx.causal, ctx.scale = causal, scale
        ctx.set_materialize_grads(False)
        return out, *rest[:3]

    @staticmethod
    def backward(ctx, do, dk, dv, dz):  # type: ignore[no-untyped-def]
        *saved, visible, cu_seqlens, first_k, first_v, first_z = ctx.saved_tensors
        first = None if first_k is None else (first_k, first_v, first_z)
        if do is None:
            do = torch.zeros_like(saved[0])
        grads = backward(do, (dk, dv, dz), tuple(saved), visible, first, cu_seqlens, ctx.causal, ctx.scale)
        return *grads, *[None] * (7 - len(grads)), None, None, None, None


def abc_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    control: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    key_visible: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """out_t = V~_t^T softmax(scale K~_t q_t) (ABC, Eqs. 3-5 and Appendix B.1) and the memory (K~, V~, z) at the end."""
    first = state or (None, None, None)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, *last = _Abc.apply(q, k, v, control, *first, key_visible, cu_seqlens, causal, scale)
    return out, tuple(last)
