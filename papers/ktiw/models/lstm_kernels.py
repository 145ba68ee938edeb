"""Kernels of stacked LSTMs: a step's nonlinearities and their gradients, and products summed in one order.

A slice of a step has its own stride from member to member; within a member it is contiguous.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["cell_back_step", "cell_step", "multiply"]

BLOCK = 512
SIDE, DEPTH = 64, 32
# Three products of 10-bit mantissas on tensor cores: as exact as float32, and as fast.
PRECISION = "tf32x3"


@triton.jit
def _tanh(x):
    e = tl.exp(-2 * tl.abs(x))
    size = (1 - e) / (1 + e)
    return tl.where(x < 0, -size, size)


@triton.jit
def _places(total, m, b, BLOCK: tl.constexpr):
    """(inside the tensor, member, place of a state in it, place of its first gate in it) of this program's states."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = i % (b * m)
    return i < total, i // (b * m), within, within // m * 4 * m + within % m


@triton.jit
def _cell(
    inputs, recurrent, before, active, after, hidden, total, m, b, input_s, before_s, active_s, after_s, hidden_s,
    BLOCK: tl.constexpr,
):  # fmt: skip
    inside, s, state, gate = _places(total, m, b, BLOCK)
    inputs += s * input_s + gate
    recurrent += s * 4 * m * b + gate
    active += s * active_s + gate
    i = tl.sigmoid(tl.load(inputs, mask=inside) + tl.load(recurrent, mask=inside))
    f = tl.sigmoid(tl.load(inputs + m, mask=inside) + tl.load(recurrent + m, mask=inside))
    g = _tanh(tl.load(inputs + 2 * m, mask=inside) + tl.load(recurrent + 2 * m, mask=inside))
    o = tl.sigmoid(tl.load(inputs + 3 * m, mask=inside) + tl.load(recurrent + 3 * m, mask=inside))
    c = f * tl.load(before + s * before_s + state, mask=inside) + i * g
    tl.store(active, i, mask=inside)
    tl.store(active + m, f, mask=inside)
    tl.store(active + 2 * m, g, mask=inside)
    tl.store(active + 3 * m, o, mask=inside)
    tl.store(after + s * after_s + state, c, mask=inside)
    tl.store(hidden + s * hidden_s + state, o * _tanh(c), mask=inside)


@triton.jit
def _cell_back(
    grad_h, dh, grad_c, dc, active, before, after, dgates, total, m, b, grad_h_s, grad_c_s, active_s, before_s, after_s,
    dgates_s, BLOCK: tl.constexpr,
):  # fmt: skip
    inside, s, state, gate = _places(total, m, b, BLOCK)
    active += s * active_s + gate
    i, f = tl.load(active, mask=inside), tl.load(active + m, mask=inside)
    g, o = tl.load(active + 2 * m, mask=inside), tl.load(active + 3 * m, mask=inside)
    later = s * m * b + state
    h = tl.load(grad_h + s * grad_h_s + state, mask=inside) + tl.load(dh + later, mask=inside)
    squashed = _tanh(tl.load(after + s * after_s + state, mask=inside))
    c = tl.load(grad_c + s * grad_c_s + state, mask=inside) + tl.load(dc + later, mask=inside)
    c += h * o * (1 - squashed * squashed)
    dgates += s * dgates_s + gate
    tl.store(dgates, c * g * i * (1 - i), mask=inside)
    tl.store(dgates + m, c * tl.load(before + s * before_s + state, mask=inside) * f * (1 - f), mask=inside)
    tl.store(dgates + 2 * m, c * i * (1 - g * g), mask=inside)
    tl.store(dgates + 3 * m, h * squashed * o * (1 - o), mask=inside)
    tl.store(dc + later, c * f, mask=inside)


def cell_step(inputs: Tensor, recurrent: Tensor, before: Tensor, active: Tensor, after: Tensor, hidden: Tensor) -> None:
    """The gates after their nonlinearities, the cells and the states of one step into ``active, after, hidden``."""
    total, (_, b, m) = before.numel(), before.shape
    strides = [t.stride(0) for t in (inputs, before, active, after, hidden)]
    grid = (triton.cdiv(total, BLOCK),)
    _cell[grid](inputs, recurrent, before, active, after, hidden, total, m, b, *strides, BLOCK=BLOCK)


def cell_back_step(
    grad_h: Tensor,
    dh: Tensor,
    grad_c: Tensor,
    dc: Tensor,
    active: Tensor,
    before: Tensor,
    after: Tensor,
    dgates: Tensor,
) -> None:
    """The gradient of one step's gates into ``dgates``, and of the earlier cell in the place of the later one's."""
    total, (_, b, m) = dc.numel(), dc.shape
    strides = [t.stride(0) for t in (grad_h, grad_c, active, before, after, dgates)]
    grid = (triton.cdiv(total, BLOCK),)
    _cell_back[grid](
        grad_h, dh, grad_c, dc, active, before, after, dgates, total, m, b, *strides, BLOCK=BLOCK
    )  # fmt: skip


@triton.jit
def _multiply(
    a, b, c, m, n, k, a_s, a_m, a_k, b_s, b_k, b_n, c_s, c_m,
    SIDE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    wide = tl.cdiv(n, SIDE)
    rows = tl.program_id(0) // wide * SIDE + tl.arange(0, SIDE)
    columns = tl.program_id(0) % wide * SIDE + tl.arange(0, SIDE)
    member = tl.program_id(1).to(tl.int64)
    a += member * a_s + rows[:, None] * a_m
    b += member * b_s + columns[None, :] * b_n
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, k, DEPTH):
        at = start + tl.arange(0, DEPTH)
        x = tl.load(a + at[None, :] * a_k, mask=(rows[:, None] < m) & (at[None, :] < k), other=0.0)
        y = tl.load(b + at[:, None] * b_k, mask=(at[:, None] < k) & (columns[None, :] < n), other=0.0)
        total = tl.dot(x, y, total, input_precision=PRECISION)
    seen = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + member * c_s + rows[:, None] * c_m + columns[None, :], total, mask=seen)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """a (s, m, k) @ b (s, k, n) in float32, each product summed in one order whatever else is in the batch."""
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        raise ValueError(f"these products are of float32, got {a.dtype} and {b.dtype}; use torch.bmm")
    s, m, k = a.shape
    n = b.shape[2]
    out = a.new_empty(s, m, n)
    grid = (triton.cdiv(m, SIDE) * triton.cdiv(n, SIDE), s)
    sizes = (m, n, k, *a.stride(), *b.stride(), *out.stride()[:2])
    _multiply[grid](a, b, out, *sizes, SIDE=SIDE, DEPTH=DEPTH, PRECISION=PRECISION, num_warps=4)
    return out
