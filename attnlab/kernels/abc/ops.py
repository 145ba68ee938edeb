"""The passes as operators, which torch.compile does not look into: fakes say what they return."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.kernels.abc.backward_pass import backward
from attnlab.kernels.abc.forward_pass import forward
from attnlab.kernels.abc.plan import chunk_count, plan_for
from attnlab.kernels.abc.records import Inputs, State, StateGradients, buffer_layout, empty_state

__all__ = ["abc_forward"]


@torch.library.custom_op("attnlab::abc_forward", mutates_args=())
def abc_forward(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, visible: Tensor | None,
    first_k: Tensor | None, first_v: Tensor | None, first_z: Tensor | None, cu_seqlens: Tensor | None,
    causal: bool, scale: float, train: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``forward`` as an operator: out, the last K~, V~ and z, and the buffer that the backward pass needs."""
    inputs = Inputs(q, k, v, s, visible, first_k, first_v, first_z, cu_seqlens)
    out, last, buffer = forward(inputs, causal, scale, train)
    return out, *last, buffer


@abc_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, visible: Tensor | None,
    first_k: Tensor | None, first_v: Tensor | None, first_z: Tensor | None, cu_seqlens: Tensor | None,
    causal: bool, scale: float, train: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    b, d = q.shape[0], q.shape[3]
    g, n = k.shape[1], s.shape[3]
    plan = plan_for(d, n, q.dtype, train)
    rows = b if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chunks = chunk_count(b, s.shape[2], plan.chunk, None if cu_seqlens is None else rows)
    size = buffer_layout(q.shape, s.shape, plan, chunks, rows, causal, train).size
    return torch.empty_like(q), *empty_state(rows, g, n, d, q.device), q.new_empty(size, dtype=torch.uint8)


@torch.library.custom_op("attnlab::abc_backward", mutates_args=())
def abc_backward(
    do: Tensor, dk: Tensor | None, dv: Tensor | None, dz: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, last_k: Tensor, last_v: Tensor, last_z: Tensor, saved: Tensor,
    visible: Tensor | None, first_k: Tensor | None, first_v: Tensor | None, first_z: Tensor | None,
    cu_seqlens: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``backward`` as an operator; the last three results are empty where there is no first state."""
    inputs = Inputs(q, k, v, s, visible, first_k, first_v, first_z, cu_seqlens)
    last, d_last = State(last_k, last_v, last_z), StateGradients(dk, dv, dz)
    d_q, d_k, d_v, d_s, *d_first = (
        t.contiguous() for t in backward(do, d_last, inputs, last, saved, causal, scale)
    )  # fmt: skip
    if not d_first:
        d_first = [q.new_empty(0) for _ in range(3)]
    return d_q, d_k, d_v, d_s, d_first[0], d_first[1], d_first[2]


@abc_backward.register_fake
def _(
    do: Tensor, dk: Tensor | None, dv: Tensor | None, dz: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, last_k: Tensor, last_v: Tensor, last_z: Tensor, saved: Tensor,
    visible: Tensor | None, first_k: Tensor | None, first_v: Tensor | None, first_z: Tensor | None,
    cu_seqlens: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    grads = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v, s)]
    if first_k is None:
        return *grads, q.new_empty(0), q.new_empty(0), q.new_empty(0)
    return *grads, *(torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in (last_k, last_v, last_z))


def _save_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, s, visible, *first, cu_seqlens, causal, scale, _ = inputs
    ctx.save_for_backward(q, k, v, s, *output[1:], visible, *first, cu_seqlens)
    ctx.causal, ctx.scale = causal, scale
    ctx.set_materialize_grads(False)


def _gradient(ctx, do, dk, dv, dz, *_):  # type: ignore[no-untyped-def]
    q, k, v, s, last_k, last_v, last_z, *rest = ctx.saved_tensors
    saved, visible, *first, cu_seqlens = rest
    if do is None:
        do = torch.zeros_like(q)
    grads = abc_backward(
        do, dk, dv, dz, q, k, v, s, last_k, last_v, last_z, saved, visible, *first, cu_seqlens, ctx.causal, ctx.scale
    )  # fmt: skip
    d_first = grads[4:] if first[0] is not None else (None, None, None)
    return *grads[:4], None, *d_first, None, None, None, None


abc_forward.register_autograd(_gradient, setup_context=_save_context)
