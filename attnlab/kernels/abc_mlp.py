"""ABC_MLP on a GPU: the memory is written, scanned and read by Triton kernels, forward and backward."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnlab.kernels._abc_decode import fold_and_read
from attnlab.kernels._abc_launch import State, backward, forward
from attnlab.kernels._abc_ops import abc_forward

__all__ = ["HEAD_SIZES", "MOST_SLOTS", "abc_attention", "abc_step", "check_sizes", "supports"]

HEAD_SIZES = tuple(range(32, 257, 16))
MOST_SLOTS = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Numbers of the memory at a time, and warps, of a decoding step; measured on an H200.
STEP_TILE, STEP_WARPS = 2048, 4


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
    """out_t = V~_t^T softmax(scale K~_t q_t) (ABC, Eqs. 3-5, Appendix B.1), and the memory (K~, V~, z) at the end.

    ``control`` is log alpha, (b, g, k, n). With ``causal`` the memory is that of the keys up to each query, else of all
    keys. ``state`` is the memory before the first key. ``cu_seqlens`` (sequences + 1) packs sequences into one row,
    and then the states have a row for each sequence. Everything has gradients but the integers and masks.
    """
    check_sizes(q, k, v, control, causal=causal, cu_seqlens=cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, control = map(_in_rows, (q, k, v, control))
    if state is not None:
        state = (state[0].contiguous(), state[1].contiguous(), state[2].contiguous())
    if key_visible is not None:
        key_visible = key_visible.contiguous()
    first = state or (None, None, None)
    tensors = (q, k, v, control, *first)
    train = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if torch.compiler.is_compiling():
        out, *last = abc_forward(q, k, v, control, key_visible, *first, cu_seqlens, causal, scale, train)[:4]
    elif train:
        # The same as the operator, with less to do on the host.
        out, *last = _Eager.apply(*tensors, key_visible, cu_seqlens, causal, scale)
    else:
        extras = (key_visible, state, cu_seqlens)
        out, last, _ = forward(q, k, v, control, extras, causal, scale, False)
    return out, (last[0], last[1], last[2])


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
    """The output for one more token; ``state`` (K~, V~, z) and ``count`` are updated in place, in one launch.

    It has no gradients, and may be captured in a CUDA graph.
    """
    check_sizes(q, k, v, control, causal=True, cu_seqlens=None)
    if q.shape[2] != 1:
        raise ValueError(f"a step takes one token, got {q.shape[2]}; use abc_attention(..., state=state)")
    kinds = (torch.float32,), (torch.float32,), (torch.float32, torch.float64)
    if not all(t.is_contiguous() and t.dtype in kind for t, kind in zip(state, kinds, strict=True)):
        raise ValueError("the state is updated in place: K~ and V~ float32, z float32 or float64, all contiguous")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, control = map(_in_rows, (q, k, v, control))
    if key_visible is not None:
        # A column of a longer mask is not.
        key_visible = key_visible.contiguous()
    out = torch.empty_like(q)
    launch = _step if torch.compiler.is_compiling() else _launch_step
    launch(q, k, v, control, *state, key_visible, count, out, scale)
    return out


@torch.library.custom_op("attnlab::abc_step", mutates_args=("memory_k", "memory_v", "memory_z", "count", "out"))
def _step(
    q: Tensor, k: Tensor, v: Tensor, control: Tensor, memory_k: Tensor, memory_v: Tensor, memory_z: Tensor,
    visible: Tensor | None, count: Tensor | None, out: Tensor, scale: float,
) -> None:  # fmt: skip
    _launch_step(q, k, v, control, memory_k, memory_v, memory_z, visible, count, out, scale)


def _launch_step(
    q: Tensor, k: Tensor, v: Tensor, control: Tensor, memory_k: Tensor, memory_v: Tensor, memory_z: Tensor,
    visible: Tensor | None, count: Tensor | None, out: Tensor, scale: float,
) -> None:  # fmt: skip
    b, h, _, d = q.shape
    g, n = control.shape[1], control.shape[3]
    wide, heads = triton.next_power_of_2(d), triton.next_power_of_2(h // g)
    padded = triton.next_power_of_2(n)
    tile = max(1, min(padded, STEP_TILE // (wide * heads)))
    fold_and_read[(b, g)](
        q, k, v, control, visible, memory_k, memory_v, memory_z, count, out,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *control.stride()[:2], *out.stride()[:2], g, n, scale,
        R=h // g, RP=heads, NP=padded, BN=tile, D=d, BD=wide,
        MASKED=visible is not None, COUNTED=count is not None, num_warps=STEP_WARPS,
    )  # fmt: skip


def _in_rows(t: Tensor) -> Tensor:
    """The tensor with its last axis dense, as the kernels read it."""
    return t if t.stride(3) == 1 else t.contiguous()


def supports(call_width: int, value_width: int, slots: int, dtype: torch.dtype) -> bool:
    """Whether the kernels are made for these sizes."""
    return call_width == value_width and call_width in HEAD_SIZES and slots <= MOST_SLOTS and dtype in DTYPES


def check_sizes(q: Tensor, k: Tensor, v: Tensor, control: Tensor, *, causal: bool, cu_seqlens: Tensor | None) -> None:
    """Raise unless the kernels are made for these shapes and dtypes."""
    b, h, n_q, d = q.shape
    g, n_k, n = control.shape[1:]
    if k.shape != (b, g, n_k, d) or v.shape != k.shape:
        raise ValueError(
            f"k and v must be (batch, heads of control, length of control, width of q) = {(b, g, n_k, d)}, "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if h % g:
        raise ValueError(f"query heads must be a multiple of key heads, got {h} and {g}")
    if d not in HEAD_SIZES or not 1 <= n <= MOST_SLOTS:
        raise ValueError(
            f"the kernels take head sizes from {HEAD_SIZES[0]} to {HEAD_SIZES[-1]} in steps of 16 and up to "
            f"{MOST_SLOTS} slots, got {d} and {n}"
        )
    if q.dtype not in DTYPES or {k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(f"q, k and v must share float32, bfloat16 or float16, got {q.dtype}, {k.dtype}, {v.dtype}")
    if causal and n_q != n_k:
        raise ValueError(
            f"causal attention needs as many queries as keys, got {n_q} and {n_k}; pass the past as state="
        )
    if cu_seqlens is not None and (b != 1 or n_q != n_k):
        raise ValueError(f"packed sequences come as one row of queries and keys, got batch {b}, {n_q} and {n_k}")


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, s, first_k, first_v, first_z, visible, cu_seqlens, causal, scale):  # type: ignore[no-untyped-def]
        first = None if first_k is None else (first_k, first_v, first_z)
        out, last, buffer = forward(q, k, v, s, (visible, first, cu_seqlens), causal, scale, True)
        ctx.save_for_backward(q, k, v, s, *last, buffer, visible, cu_seqlens, first_k, first_v, first_z)
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
            do, (dk, dv, dz), (q, k, v, s), tuple(rest[:3]), rest[3], (visible, first, cu_seqlens),
            ctx.causal, ctx.scale,
        )  # fmt: skip
        return *grads, *[None] * (11 - len(grads))
