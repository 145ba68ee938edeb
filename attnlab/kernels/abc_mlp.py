"""ABC_MLP on a GPU: the memory is written, scanned and read by Triton kernels, forward and backward."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnlab.kernels._abc_decode import fold_and_read
from attnlab.kernels._abc_launch import Extras, Grads, State, chunks_backward, chunks_forward
from attnlab.kernels._abc_plan import plan_for
from attnlab.kernels._abc_segments import segments_backward, segments_forward

__all__ = ["abc_attention", "abc_step"]


def forward(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, extras: Extras, causal: bool, scale: float
) -> tuple[Tensor, State, list[Tensor]]:
    plan = plan_for(q.shape[3], s.shape[3], q.dtype)
    if causal and plan.along and q.shape[2]:
        return segments_forward(q, k, v, s, extras, scale, plan)
    return chunks_forward(q, k, v, s, extras, causal, scale, plan)


def backward(
    do: Tensor,
    d_last: Grads,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    last: State,
    saved: list[Tensor],
    extras: Extras,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    q, _, _, s = inputs
    plan = plan_for(q.shape[3], s.shape[3], q.dtype)
    if do.stride(3) != 1:
        do = do.contiguous()
    if causal and plan.along and q.shape[2]:
        return segments_backward(do, d_last, inputs, last, saved, extras, scale, plan)
    return chunks_backward(do, d_last, inputs, last, saved, extras, causal, scale, plan)


class _Abc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, s, first_k, first_v, first_z, visible, cu_seqlens, causal, scale):  # type: ignore[no-untyped-def]
        first = None if first_k is None else (first_k, first_v, first_z)
        out, last, saved = forward(q, k, v, s, (visible, first, cu_seqlens), causal, scale)
        ctx.save_for_backward(q, k, v, s, *last, *saved, visible, cu_seqlens, first_k, first_v, first_z)
        ctx.causal, ctx.scale = causal, scale
        ctx.set_materialize_grads(False)
        return out, *last

    @staticmethod
    def backward(ctx, do, dk, dv, dz):  # type: ignore[no-untyped-def]
        q, k, v, s, *rest = ctx.saved_tensors
        *rest, visible, cu_seqlens, first_k, first_v, first_z = rest
        first = None if first_k is None else (first_k, first_v, first_z)
        if do is None:
            do = torch.zeros_like(q)
        grads = backward(
            do, (dk, dv, dz), (q, k, v, s), tuple(rest[:3]), rest[3:], (visible, first, cu_seqlens),
            ctx.causal, ctx.scale,
        )  # fmt: skip
        return *grads, *[None] * (11 - len(grads))


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
    state: State | None = None,
) -> tuple[Tensor, State]:
    """out_t = V~_t^T softmax(scale K~_t q_t) (ABC, Eqs. 3-5 and Appendix B.1) and the memory (K~, V~, z) at the end."""
    first = state or (None, None, None)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, *last = _Abc.apply(q, k, v, control, *first, key_visible, cu_seqlens, causal, scale)
    return out, tuple(last)


def abc_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    control: Tensor,
    state: State,
    *,
    scale: float | None = None,
    key_visible: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """The output for one more token; ``state`` (K~, V~, z) and ``count`` are updated in place, in one launch."""
    b, h, _, d = q.shape
    g, n = control.shape[1], control.shape[3]
    out = torch.empty_like(q)
    wide, heads = triton.next_power_of_2(d), triton.next_power_of_2(h // g)
    padded = triton.next_power_of_2(n)
    tile = max(1, min(padded, 8192 // (wide * heads)))
    fold_and_read[(b, g)](
        q, k, v, control, key_visible, *state, count, out,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *control.stride()[:2], *out.stride()[:2],
        g, n, q.shape[-1] ** -0.5 if scale is None else scale,
        R=h // g, RP=heads, NP=padded, BN=tile, D=d, BD=wide,
        MASKED=key_visible is not None, COUNTED=count is not None, num_warps=4 if tile * wide <= 4096 else 8,
    )  # fmt: skip
    return out
