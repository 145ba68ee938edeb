"""A batch of matrix products, each summed in one order whatever else is in the batch."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["multiply"]

SIDE, DEPTH = 64, 32
# Three products of 10-bit mantissas on tensor cores: nearly as exact as float32, and faster.
PRECISION = "tf32x3"


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
    """a (s, m, k) @ b (s, k, n) in float32."""
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        raise ValueError(f"these products are of float32, got {a.dtype} and {b.dtype}; use torch.bmm")
    s, m, k = a.shape
    n = b.shape[2]
    out = a.new_empty(s, m, n)
    grid = (triton.cdiv(m, SIDE) * triton.cdiv(n, SIDE), s)
    sizes = (m, n, k, *a.stride(), *b.stride(), *out.stride()[:2])
    _multiply[grid](a, b, out, *sizes, SIDE=SIDE, DEPTH=DEPTH, PRECISION=PRECISION, num_warps=4)
    return out
