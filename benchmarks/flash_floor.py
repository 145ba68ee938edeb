# mypy: ignore-errors
"""Causal flash attention without statistics, by Triton: the least time that ``kernels.statistics`` can take."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["flash"]


@triton.jit
def _flash(
    Q, K, V, Out, Reach, qh, qn, kh, kn, vh, vn, oh, on, n, scale, GROUPS: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    h = tl.program_id(1)
    i, d = start + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(Q + h * qh + i[:, None] * qn + d[None, :])
    K += h // GROUPS * kh
    V += h // GROUPS * vh
    c = scale * 1.4426950408889634
    top, total = tl.full([BM], -1e30, tl.float32), tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, D], tl.float32)
    tiles = tl.cdiv(start + BM, BN)
    for t in range(tiles):
        lo = (tiles - 1 - t) * BN
        j = lo + tl.arange(0, BN)
        s = tl.dot(q, tl.load(K + j[None, :] * kn + d[:, None]))
        v = tl.load(V + j[:, None] * vn + d[None, :])
        if lo + BN > start:
            s = tl.where(j[None, :] <= tl.load(Reach + i)[:, None], s, -1e30)
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s * c - (new * c)[:, None])
        shrink = tl.exp2((top - new) * c)
        top, total = new, total * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None])
    tl.store(Out + h * oh + i[:, None] * on + d[None, :], (out / total[:, None]).to(Out.dtype.element_ty))


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: tuple[int, int, int, int]) -> torch.Tensor:
    """Causal attention of one text; ``tile``: rows, keys, warps and stages, and whole tiles make up the text."""
    _, h, n, d = q.shape
    out = torch.empty(1, n, h, d, dtype=q.dtype, device=q.device).transpose(1, 2)
    reach = torch.arange(n, dtype=torch.int32, device=q.device)
    rows, keys, warps, stages = tile
    strides = [t.stride(axis) for t in (q, k, v, out) for axis in (1, 2)]
    _flash[(n // rows, h)](
        q, k, v, out, reach, *strides, n, d**-0.5, h // k.shape[1], d, rows, keys, num_warps=warps, num_stages=stages
    )  # fmt: skip
    return out
