"""ABC_MLP on a GPU: the memory is written, scanned and read by Triton kernels, forward and backward."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from attnlab.kernels.abc.decode import fold_and_read, fold_and_read_group
from attnlab.kernels.abc.launch import Inputs, State, backward, forward, key_of
from attnlab.kernels.abc.launcher import Options, launch
from attnlab.kernels.abc.ops import abc_forward
from attnlab.kernels.abc.plan import plan_for
from attnlab.kernels.abc.recipes import is_known

__all__ = ["HEAD_SIZES", "MOST_SLOTS", "abc_attention", "abc_step", "check_sizes", "supports"]

HEAD_SIZES = tuple(range(32, 257, 16))
MOST_SLOTS = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The most numbers and slots of a tile and warps of a decoding step, for one query head and for several; measured on an
# H200.
STEP, GROUPED_STEP = (1024, 8, 1), (4096, 256, 8)


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
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    first_k, first_v, first_z = (None, None, None) if state is None else state
    inputs = (q, k, v, control, key_visible, first_k, first_v, first_z, cu_seqlens)
    extra = state is not None or key_visible is not None or cu_seqlens is not None
    train = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or control.requires_grad
        or (state is not None and any(t.requires_grad for t in state))
    )  # fmt: skip
    if torch.compiler.is_compiling():
        inputs = _prepared(inputs, causal)
        out, *last = abc_forward(*inputs, causal, scale, train)[:4]
        return out, (last[0], last[1], last[2])
    key = key_of(inputs, causal, scale, train)
    if not is_known(key):
        inputs = _prepared(inputs, causal)
        key = key_of(inputs, causal, scale, train)
    if train:
        # The same as the operator, with less to do on the host.
        out, *last = _Eager.apply((causal, scale, key), *(inputs if extra else inputs[:4]))
    else:
        out, last, _ = forward(inputs, causal, scale, False, key)
    return out, (last[0], last[1], last[2])


def _prepared(inputs: Inputs, causal: bool) -> Inputs:
    """The same as the kernels read them: rows are dense, and what is not q, k, v or control altogether."""
    q, k, v, control, visible, first_k, first_v, first_z, cu_seqlens = inputs
    check_sizes(q, k, v, control, causal=causal, cu_seqlens=cu_seqlens)
    q, k, v, control = map(_in_rows, (q, k, v, control))
    if visible is not None and _in_float64(q.shape[3], control.shape[3], q.dtype):
        # As wide as what it hides: products of float64 of which a byte decides do not compile (Triton 3.6).
        visible = visible.to(torch.int64)
    visible, first_k, first_v, first_z, cu_seqlens = (
        None if t is None else t.contiguous() for t in (visible, first_k, first_v, first_z, cu_seqlens)
    )
    return q, k, v, control, visible, first_k, first_v, first_z, cu_seqlens


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
    step = _step if torch.compiler.is_compiling() else _launch_step
    step(q, k, v, control, *state, key_visible, count, out, scale)
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
    tensors = (q, k, v, control, visible, memory_k, memory_v, memory_z, count, out)
    numbers = (
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *control.stride()[:2], *out.stride()[:2], g, n, scale,
    )  # fmt: skip
    kernel = fold_and_read if h == g else fold_and_read_group
    launch(kernel, (g, b, 1), tensors, numbers, _step_options(h // g, n, d, visible is not None, count is not None))


@lru_cache(maxsize=4096)
def _step_options(heads: int, slots: int, d: int, masked: bool, counted: bool) -> Options:
    """Constants of a decoding step."""
    wide, several, padded = (triton.next_power_of_2(size) for size in (d, heads, slots))
    numbers, most, warps = STEP if heads == 1 else GROUPED_STEP
    options = {
        "NP": padded, "BN": max(1, min(padded, most, numbers // (wide * several))), "D": d, "BD": wide,
        "FULL": d == wide and slots == padded, "MASKED": masked, "COUNTED": counted, "num_warps": warps,
    }  # fmt: skip
    return tuple((options if heads == 1 else {"R": heads, "RP": several, **options}).items())


@torch.compiler.assume_constant_result
def _in_float64(d: int, slots: int, dtype: torch.dtype) -> bool:
    """Whether calls of these sizes are computed in float64."""
    return plan_for(d, slots, dtype, True).full == torch.float64


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
    """Autograd takes its time for every argument, so that the last five come only if they are not all None."""

    @staticmethod
    def forward(ctx, how, *given):  # type: ignore[no-untyped-def]
        causal, scale, key = how
        inputs = given if len(given) == 9 else (*given, None, None, None, None, None)
        out, last, buffer = forward(inputs, causal, scale, True, key)
        ctx.save_for_backward(*last, buffer, *given)
        ctx.how = how
        ctx.set_materialize_grads(False)
        return out, *last

    @staticmethod
    def backward(ctx, do, dk, dv, dz):  # type: ignore[no-untyped-def]
        last_k, last_v, last_z, buffer, *given = ctx.saved_tensors
        inputs = tuple(given) if len(given) == 9 else (*given, None, None, None, None, None)
        if do is None:
            do = torch.zeros_like(given[0])
        grads = backward(do, (dk, dv, dz), inputs, (last_k, last_v, last_z), buffer, *ctx.how)
        if len(given) == 4:
            return None, *grads
        return None, *grads[:4], None, *(grads[4:] or (None, None, None)), None
