"""``hybrid_attention``: what the kernels take, their launches, and both passes as operators for torch.compile."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from attnlab.kernels.hybrid.backward import key_gradients, query_gradients
from attnlab.kernels.hybrid.read import read
from attnlab.kernels.hybrid.states import sum_back, sum_segments, write_gradients, write_states
from attnlab.kernels.launching import INTERPRETED, Options, launch, with_strides
from attnlab.shapes import Float, Int

__all__ = ["BLOCKS", "MOST_ROWS", "MOST_SINKS", "MOST_SLOTS", "dense_rows", "hybrid_attention", "precision", "supports"]

BLOCKS = (16, 32, 64)
# Rows of key heads: the last axis of a grid.
MOST_ROWS = 65535
MOST_SLOTS = 128
MOST_SINKS = 64
WIDTHS = (16, 128)
# Float32 ended in an illegal memory access on an H200 (Triton 3.6) for an unknown reason, so it stays in PyTorch.
# Triton's interpreter takes it, so that the arithmetic is tested to more digits.
DTYPES = (torch.bfloat16, torch.float16, *((torch.float32,) if INTERPRETED else ()))
# Programs that walk along segments of blocks, for each of k and v: about two on each multiprocessor.
WALKS = 256


def supports(d: int, e: int, dtype: torch.dtype, *, slots: int, window: int, block: int, sinks: int) -> bool:
    """Whether the kernels are made for these sizes."""
    sizes = d == e and WIDTHS[0] <= d <= WIDTHS[1] and slots <= MOST_SLOTS and sinks <= MOST_SINKS
    return sizes and block in BLOCKS and window >= block and dtype in DTYPES


def hybrid_attention(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g t d"],
    v: Float[Tensor, "b g t d"],
    log_alpha: Float[Tensor, "b g t n"],
    *,
    window: int,
    block: int,
    sinks: int,
    mass: bool = True,
    scale: float | None = None,
    starts: Int[Tensor, " b"] | None = None,
) -> Float[Tensor, "b h t d"]:
    """softmax([q k_E, q K~ + log m]) [v_E; V~] of ``abc-hybrid``, causal; with gradients by the first four tensors.

    The first ``starts`` tokens of each row are padding: they are not read, and their outputs are zeros.
    """
    n = log_alpha.shape[3]
    if (
        not supports(q.shape[3], v.shape[3], q.dtype, slots=n, window=window, block=block, sinks=sinks)
        or window % block
    ):
        raise ValueError(
            f"the kernels take heads of {WIDTHS[0]} to {WIDTHS[1]}, up to {MOST_SLOTS} slots and {MOST_SINKS} sinks, "
            f"and blocks of {BLOCKS} of which a window has some, in {DTYPES}; got heads of {q.shape[3]} and "
            f"{v.shape[3]}, {n} slots, {sinks} sinks, blocks of {block}, window {window}, {q.dtype}"
        )
    if k.shape != v.shape or k.shape[:3] != log_alpha.shape[:3] or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q, k, v and log_alpha do not agree: {[tuple(t.shape) for t in (q, k, v, log_alpha)]}")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    starts = None if starts is None else starts.to(torch.int32).contiguous()
    q, k, v, log_alpha = map(dense_rows, (q, k, v, log_alpha))
    return _forward(q, k, v, log_alpha, starts, window, block, sinks, mass, scale)[0]


def dense_rows(t: Tensor) -> Tensor:
    """The tensor with its last axis dense, as the kernels read it."""
    return t if t.stride(3) == 1 else t.contiguous()


def precision(dtype: torch.dtype) -> str:
    """That of products, which matters to float32 alone: three products on tensor cores keep its digits."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


@lru_cache(maxsize=1024)
def _options(kernel: str, d: int, heads: int, slots: int, sinks: int, window: int, block: int, mass: bool,
             dtype: torch.dtype, padded: bool, segment: int) -> Options:  # fmt: skip
    """The constants of a kernel, in the order of all kernels' parameters, and its warps."""
    columns, slot_tile = max(16, triton.next_power_of_2(d)), max(16, triton.next_power_of_2(slots))
    most_rows, key_tile = 128 if kernel == "read" else 64, block
    while key_tile < 64 and window % (2 * key_tile) == 0:
        key_tile *= 2
    head_tile = min(triton.next_power_of_2(heads), max(1, most_rows // block))
    values: dict[str, Any] = {
        "R": heads, "RT": head_tile, "W": window, "KT": key_tile, "SEG": segment, "C": block, "S": sinks,
        "SP": max(16, triton.next_power_of_2(sinks)), "N": slots, "NP": slot_tile, "D": d, "BD": columns, "MASS": mass,
        "PREC": precision(dtype), "PADDED": padded,
    }  # fmt: skip
    rows = slot_tile if kernel != "read" else head_tile * block
    names = (query_gradients, key_gradients, read, sum_segments, write_states, sum_back, write_gradients)
    taken = next(k.arg_names for k in names if k.__name__ == kernel)
    most = 4096 if kernel in ("query_gradients", "write_gradients") else 8192
    warps = 8 if rows * columns > most or dtype == torch.float32 else 4
    return (*((name, value) for name, value in values.items() if name in taken), ("num_warps", warps))


class _Launches:
    """The launches of one call: its sizes, and what all kernels take."""

    def __init__(self, q: Tensor, k: Tensor, x: Tensor, starts: Tensor | None, window: int, block: int, sinks: int,
                 mass: bool, scale: float) -> None:  # fmt: skip
        self.b, self.h, self.t, self.d = q.shape
        self.g, self.n, self.sinks, self.scale = k.shape[1], x.shape[3], sinks, scale
        self.rows, self.blocks = self.b * self.g, triton.cdiv(self.t, block)
        self.states = max(0, self.blocks - window // block)
        self.segment = max(4, triton.next_power_of_2(triton.cdiv(self.states * self.rows, WALKS)))
        self.segments = triton.cdiv(self.states, self.segment)
        self.how = (self.d, self.h // self.g, self.n, sinks, window, block, mass, q.dtype, starts is not None)

    def launch(self, kernel: Any, grid: tuple[int, int, int], tensors: dict[str, Any], **numbers: Any) -> None:
        """Strides of the tensors that ``numbers`` names by their letter, then its other numbers."""
        options = _options(kernel.__name__, *self.how, self.segment)
        launch(kernel, grid, tensors, with_strides(numbers), options)

    def totals(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of keys and values, and of masses, of all segments but one."""
        count = max(0, self.segments - 1)
        return _empty(like, self.rows, count, 2, self.n, self.d), _empty(like, self.rows, count, self.n)


@torch.library.custom_op("attnlab::hybrid_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor, starts: Tensor | None, window: int, block: int, sinks: int, mass: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output, log-sum-exps, states and log m."""
    call = _Launches(q, k, x, starts, window, block, sinks, mass, scale)
    out, lse, states, log_mass = _results(q, k, x, call.states)
    if starts is not None:
        out.zero_()
    if call.states and call.n:
        total, sums = call.totals(q)
        walk = {"k": k, "v": v, "x": x, "starts": starts}
        sizes = {"k": k, "v": v, "x": x, "T": call.t, "G": call.g, "NS": call.states}
        if call.segments > 1:
            grid = (call.segments - 1, 2, call.rows)
            call.launch(sum_segments, grid, {**walk, "total": total, "mass": sums}, **sizes)
            total, sums = total.cumsum(1), sums.cumsum(1)
        written = {"total": total, "mass": sums, "states": states, "log_mass": log_mass}
        call.launch(write_states, (call.segments, 2, call.rows), {**walk, **written}, **sizes)
    parts = triton.cdiv(call.h // call.g, dict(_options("read", *call.how, call.segment))["RT"])
    call.launch(
        read,
        (call.blocks, parts, call.rows),
        {"q": q, "k": k, "v": v, "starts": starts, "states": states, "log_mass": log_mass, "out": out, "lse": lse},
        q=q, k=k, v=v, o=out, T=call.t, G=call.g, NS=call.states, scale=scale,
    )  # fmt: skip
    return out, lse, states, log_mass


def _empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _results(q: Tensor, k: Tensor, x: Tensor, states: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (b, g, _, d), n = k.shape, x.shape[3]
    return (
        torch.empty_like(q),
        _empty(q, *q.shape[:3]),
        _empty(q, b, g, states, 2, n, d, dtype=q.dtype),
        _empty(q, b, g, states, n),
    )


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor, starts: Tensor | None, window: int, block: int, sinks: int, mass: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _results(q, k, x, max(0, -(-q.shape[2] // block) - window // block))


@torch.library.custom_op("attnlab::hybrid_backward", mutates_args=())
def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, x: Tensor, starts: Tensor | None, out: Tensor, lse: Tensor,
    states: Tensor, log_mass: Tensor, window: int, block: int, sinks: int, mass: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and d log alpha."""
    call = _Launches(q, k, x, starts, window, block, sinks, mass, scale)
    do = dense_rows(do)
    dq, dk, dv, dx = _gradients(out, k, x)
    if starts is not None:
        for t in (dq, dk, dv, dx):
            t.zero_()
    d_states, d_mass, delta = torch.empty_like(states), torch.empty_like(log_mass), torch.empty_like(lse)
    d_sinks = _empty(q, call.b, call.g, call.blocks, 2, sinks, call.d)
    inputs = {"q": q, "k": k, "v": v, "starts": starts}
    call.launch(
        query_gradients,
        (call.blocks, call.rows, 1),
        {**inputs, "states": states, "log_mass": log_mass, "out": out, "lse": lse, "do": do, "dq": dq,
         "d_states": d_states, "d_mass": d_mass, "d_sinks": d_sinks, "delta": delta},
        q=q, k=k, v=v, o=out, d=do, T=call.t, G=call.g, NS=call.states, scale=scale,
    )  # fmt: skip
    call.launch(
        key_gradients,
        (call.blocks, call.rows, 1),
        {**inputs, "lse": lse, "delta": delta, "do": do, "dk": dk, "dv": dv},
        q=q, k=k, v=v, d=do, g=dk, T=call.t, G=call.g, NB=call.blocks, scale=scale,
    )  # fmt: skip
    if sinks:
        _add_sinks(dk, dv, d_sinks.sum(2), starts)
    if starts is None:
        # Of tokens that no state holds.
        dx[:, :, call.states * block :].zero_()
    if call.states and call.n:
        _add_states(call, (k, v, x, starts), (d_states, d_mass, log_mass), (dk, dv, dx))
    return dq, dk, dv, dx


def _add_sinks(dk: Tensor, dv: Tensor, sums: Float[Tensor, "b g two s d"], starts: Tensor | None) -> None:
    """Add the gradients of sinks to those of the first tokens."""
    if starts is None:
        first = min(sums.shape[3], dk.shape[2])
        dk[:, :, :first] += sums[:, :, 0, :first]
        dv[:, :, :first] += sums[:, :, 1, :first]
        return
    places = (starts.long()[:, None] + torch.arange(sums.shape[3], device=dk.device)).clamp(max=dk.shape[2] - 1)
    index = places[:, None, :, None].expand_as(sums[:, :, 0])
    dk.scatter_add_(2, index, sums[:, :, 0].to(dk.dtype))
    dv.scatter_add_(2, index, sums[:, :, 1].to(dv.dtype))


def _add_states(
    call: _Launches, inputs: tuple[Tensor | None, ...], of_states: tuple[Tensor, ...], written: tuple[Tensor, ...]
) -> None:
    """Add what the gradients of states give back to dk and dv, and write d log alpha."""
    (k, v, x, starts), (dk, dv, dx) = inputs, written
    named = dict(zip(("d_states", "d_mass", "log_mass"), of_states, strict=True))
    total, sums = call.totals(dk)
    if call.segments > 1:
        grid = (call.segments - 1, 2, call.rows)
        call.launch(sum_back, grid, {**named, "total": total, "mass": sums}, NS=call.states)
        total, sums = (t.flip(1).cumsum(1).flip(1) for t in (total, sums))
    call.launch(
        write_gradients,
        (call.segments, call.rows, 1),
        {"k": k, "v": v, "x": x, "starts": starts, **named, "total": total, "mass": sums, "dk": dk, "dv": dv, "dx": dx},
        k=k, v=v, x=x, d=dk, T=call.t, G=call.g, NS=call.states,
    )  # fmt: skip


def _gradients(out: Tensor, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dk, dv, dx = (_empty(t, *t.shape, dtype=t.dtype) for t in (k, k, x))
    return torch.empty_like(out), dk, dv, dx


@_backward.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, x: Tensor, starts: Tensor | None, out: Tensor, lse: Tensor,
    states: Tensor, log_mass: Tensor, window: int, block: int, sinks: int, mass: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _gradients(out, k, x)


def _save_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, window, block, sinks, mass, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.how = window, block, sinks, mass, scale
    # Zeros for states that have no gradient would be as large as these.
    ctx.set_materialize_grads(False)


def _gradient(ctx, do, *_):  # type: ignore[no-untyped-def]
    do = torch.zeros_like(ctx.saved_tensors[0]) if do is None else do
    grads = _backward(do, *ctx.saved_tensors, *ctx.how)
    return *grads, *(None,) * 6


_forward.register_autograd(_gradient, setup_context=_save_context)
