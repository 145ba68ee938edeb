"""``abc_attention``: what the kernels take, and their gradients in eager PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.kernels.abc.backward_pass import backward
from attnlab.kernels.abc.forward_pass import forward
from attnlab.kernels.abc.ops import abc_forward
from attnlab.kernels.abc.plan import plan_for
from attnlab.kernels.abc.recorded_calls import is_recorded
from attnlab.kernels.abc.records import Inputs, State, StateGradients, call_key

__all__ = ["HEAD_SIZES", "MOST_SLOTS", "abc_attention", "check_sizes", "dense_rows", "supports"]

HEAD_SIZES = tuple(range(32, 257, 16))
MOST_SLOTS = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
) -> tuple[Tensor, State]:
    """out_t = V~_t^T softmax(scale K~_t q_t) (ABC, Eqs. 3-5, Appendix B.1), and the memory (K~, V~, z) at the end.

    ``control`` is log alpha, (b, g, k, n). With ``causal`` the memory is that of the keys up to each query, else of all
    keys. ``state`` is the memory before the first key. ``cu_seqlens`` (sequences + 1) packs sequences into one row,
    and then the states have a row for each sequence. All floating-point inputs have gradients.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    first_k, first_v, first_z = (None, None, None) if state is None else state
    inputs = Inputs(q, k, v, control, key_visible, first_k, first_v, first_z, cu_seqlens)
    train = torch.is_grad_enabled() and _has_gradients(inputs)
    if torch.compiler.is_compiling():
        out, last_k, last_v, last_z, _ = abc_forward(*_prepared(inputs, causal), causal, scale, train)
        return out, State(last_k, last_v, last_z)
    key = call_key(inputs, causal, scale, train)
    if not is_recorded(key):
        inputs = _prepared(inputs, causal)
        key = call_key(inputs, causal, scale, train)
    if train:
        plain = state is None and key_visible is None and cu_seqlens is None
        # The same as the operator ``abc_forward``, with less work on the host.
        out, *last = _Eager.apply((causal, scale, key), *(inputs[:4] if plain else inputs))
        return out, State(*last)
    out, end, _ = forward(inputs, causal, scale, False, key)
    return out, end


def _has_gradients(inputs: Inputs) -> bool:
    q, k, v, control, _, first_k, first_v, first_z, _ = inputs
    if q.requires_grad or k.requires_grad or v.requires_grad or control.requires_grad:
        return True
    return any(t is not None and t.requires_grad for t in (first_k, first_v, first_z))


def _prepared(inputs: Inputs, causal: bool) -> Inputs:
    """The inputs checked, and as the kernels read them: rows are dense, masks and states contiguous."""
    q, k, v, control, visible, first_k, first_v, first_z, cu_seqlens = inputs
    check_sizes(q, k, v, control, causal=causal, cu_seqlens=cu_seqlens)
    q, k, v, control = map(dense_rows, (q, k, v, control))
    if visible is not None and _in_float64(q.shape[3], control.shape[3], q.dtype):
        # Triton 3.6 does not compile float64 products of tiles that are masked by loaded bytes; 8-byte masks work.
        visible = visible.to(torch.int64)
    visible, first_k, first_v, first_z, cu_seqlens = (
        None if t is None else t.contiguous() for t in (visible, first_k, first_v, first_z, cu_seqlens)
    )
    return Inputs(q, k, v, control, visible, first_k, first_v, first_z, cu_seqlens)


@torch.compiler.assume_constant_result
def _in_float64(d: int, slots: int, dtype: torch.dtype) -> bool:
    """Whether calls of these sizes are computed in float64."""
    return plan_for(d, slots, dtype, True).full_dtype == torch.float64


def dense_rows(t: Tensor) -> Tensor:
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
    """Both passes for autograd, which takes host time for every argument: the last five inputs are left out if None."""

    @staticmethod
    def forward(ctx, how, *tensors):  # type: ignore[no-untyped-def]
        causal, scale, key = how
        out, last, buffer = forward(Inputs(*tensors), causal, scale, True, key)
        ctx.save_for_backward(*last, buffer, *tensors)
        ctx.how = how
        ctx.set_materialize_grads(False)
        return out, *last

    @staticmethod
    def backward(ctx, do, dk, dv, dz):  # type: ignore[no-untyped-def]
        last_k, last_v, last_z, buffer, *tensors = ctx.saved_tensors
        if do is None:
            do = torch.zeros_like(tensors[0])
        last, d_last = State(last_k, last_v, last_z), StateGradients(dk, dv, dz)
        grads = backward(do, d_last, Inputs(*tensors), last, buffer, *ctx.how)
        if len(tensors) == 4:
            return None, *grads
        return None, *grads[:4], None, *(grads[4:] or (None, None, None)), None
