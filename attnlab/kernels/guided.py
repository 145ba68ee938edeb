"""Softmax attention that also gives each row's squared error to a pattern; no map and no dense target is ever stored.

A target is told by labels: t_ij = value_i where row i and key j bear the same label, and 0 elsewhere. With
m_i = sum_j w_ij [labels agree] a row's error is sum_j (w_ij - t_ij)^2 = sum_j w_ij^2 - 2 value_i m_i + constant_i, so
two sums beside the output are all that the forward pass adds to flash attention (Dao, 2023). In the backward pass

    dL/ds_ij = w_ij (<do_i, v_j> + c_i (w_ij - value_i [labels agree]) - delta_i),  c_i = 2 weight_i dL/derror_i,

where delta_i is <do_i, o_i> plus c_i (sum_j w_ij^2 - value_i m_i).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlab.shapes import Bool, Float, Int

__all__ = ["BLOCKS", "Blocks", "PackedLabels", "guided_attention"]

LOG2E: Any = tl.constexpr(1.4426950408889634)


class Blocks(NamedTuple):
    """Rows and keys of a tile, warps, and stages of the pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


# For heads of up to 64, and for wider ones: the forward pass, dq, and dk with dv.
BLOCKS = {
    64: (Blocks(128, 64, 4, 3), Blocks(128, 64, 4, 3), Blocks(64, 128, 8, 3)),
    256: (Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(32, 64, 4, 2)),
}


@triton.jit
def _scores(q, k, i, j, seen, offset, scale, CAUSAL: tl.constexpr, CUT: tl.constexpr, EXACT: tl.constexpr):
    """The scores of a tile in base 2; minus infinity where a row may not see a key."""
    s = tl.dot(q, k, input_precision="ieee" if EXACT else "tf32") * (scale * LOG2E)
    if CUT:
        s = tl.where(seen, s, -float("inf"))
    if CAUSAL:
        s = tl.where(j <= i + offset, s, -float("inf"))
    return s


@triton.jit
def _forward(
    Q, K, V, Out, Lse, Error, Slope, Rows, Keys, Value, Constant, Weight, Group, Visible,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
    H, G, n_q, n_k, offset, scale,
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, CUT: tl.constexpr, EXACT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BM
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    bg = b * G + tl.load(Group + h)
    i, d = start + tl.arange(0, BM), tl.arange(0, BD)
    in_q, in_d = i < n_q, d < D
    q = tl.load(Q + b * qb + h * qh + i[:, None] * qn + d[None, :], mask=in_q[:, None] & in_d[None, :], other=0.0)
    label = tl.load(Rows + bg * n_q + i, mask=in_q, other=-1)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    squares = tl.zeros([BM], tl.float32)
    matched = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, BD], tl.float32)
    last = n_k
    if CAUSAL:
        last = tl.minimum(n_k, tl.maximum(start + BM + offset, 0))
    K += b * kb + h * kh
    V += b * vb + h * vh
    for lo in range(0, last, BN):
        j = lo + tl.arange(0, BN)
        in_k = j < n_k
        # Hidden keys are not loaded: NaN there must not spread.
        seen = in_k
        if PADDED:
            seen = tl.load(Visible + b * n_k + j, mask=in_k, other=0) != 0
        k = tl.load(K + j[None, :] * kn + d[:, None], mask=seen[None, :] & in_d[:, None], other=0.0)
        v = tl.load(V + j[:, None] * vn + d[None, :], mask=seen[:, None] & in_d[None, :], other=0.0)
        keys = tl.load(Keys + bg * n_k + j, mask=in_k, other=-2)
        s = _scores(q, k, i[:, None], j[None, :], seen[None, :], offset, scale, CAUSAL, CUT, EXACT)
        new = tl.maximum(top, tl.max(s, 1))
        # A row that has seen nothing yet must not subtract infinities.
        base = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        squares = squares * shrink * shrink + tl.sum(p * p, 1)
        matched = matched * shrink + tl.sum(tl.where(label[:, None] == keys[None, :], p, 0.0), 1)
        out = out * shrink[:, None]
        out = tl.dot(p.to(v.dtype), v, out, input_precision="ieee" if EXACT else "tf32")
        top = new
    some = total > 0
    norm = 1.0 / tl.where(some, total, 1.0)
    squares = squares * norm * norm
    matched = matched * norm
    at = bg * n_q + i
    value = tl.load(Value + at, mask=in_q, other=0.0)
    weight = tl.load(Weight + at, mask=in_q, other=0.0)
    constant = tl.load(Constant + at, mask=in_q, other=0.0)
    row = tl.program_id(1).to(tl.int64) * n_q + i
    tl.store(Error + row, weight * (squares - 2 * value * matched + constant), mask=in_q)
    tl.store(Slope + row, squares - value * matched, mask=in_q)
    # In the backward pass an empty row's weights are exp2(s - inf) = 0.
    tl.store(Lse + row, tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("inf")), mask=in_q)
    out = out * norm[:, None]
    tl.store(
        Out + b * ob + h * oh + i[:, None] * on + d[None, :],
        out.to(Out.dtype.element_ty),
        mask=in_q[:, None] & in_d[None, :],
    )


@triton.jit
def _row_terms(
    Out, Grad, ErrorGrad, Slope, Weight, Group, Delta, Pull,
    ob, oh, on, gb, gh, gn, H, G, n_q,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """delta_i and c_i of every row."""
    i, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BD)
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    in_q = i < n_q
    inside = in_q[:, None] & (d < D)[None, :]
    out = tl.load(Out + b * ob + h * oh + i[:, None] * on + d[None, :], mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(Grad + b * gb + h * gh + i[:, None] * gn + d[None, :], mask=inside, other=0.0).to(tl.float32)
    row = tl.program_id(1).to(tl.int64) * n_q + i
    weight = tl.load(Weight + (b * G + tl.load(Group + h)) * n_q + i, mask=in_q, other=0.0)
    pull = 2 * weight * tl.load(ErrorGrad + row, mask=in_q, other=0.0)
    slope = tl.load(Slope + row, mask=in_q, other=0.0)
    tl.store(Delta + row, tl.sum(out * grad, 1) + pull * slope, mask=in_q)
    tl.store(Pull + row, pull, mask=in_q)


@triton.jit
def _backward_q(
    Q, K, V, Grad, Lse, Delta, Pull, Rows, Keys, Value, Group, Visible, DQ,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, gb, gh, gn, xb, xh, xn,
    H, G, n_q, n_k, offset, scale,
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, CUT: tl.constexpr, EXACT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BM
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    bg = b * G + tl.load(Group + h)
    i, d = start + tl.arange(0, BM), tl.arange(0, BD)
    in_q, in_d = i < n_q, d < D
    inside = in_q[:, None] & in_d[None, :]
    q = tl.load(Q + b * qb + h * qh + i[:, None] * qn + d[None, :], mask=inside, other=0.0)
    grad = tl.load(Grad + b * gb + h * gh + i[:, None] * gn + d[None, :], mask=inside, other=0.0)
    row = tl.program_id(1).to(tl.int64) * n_q + i
    lse = tl.load(Lse + row, mask=in_q, other=float("inf"))
    delta = tl.load(Delta + row, mask=in_q, other=0.0)
    pull = tl.load(Pull + row, mask=in_q, other=0.0)
    label = tl.load(Rows + bg * n_q + i, mask=in_q, other=-1)
    value = pull * tl.load(Value + bg * n_q + i, mask=in_q, other=0.0)
    dq = tl.zeros([BM, BD], tl.float32)
    last = n_k
    if CAUSAL:
        last = tl.minimum(n_k, tl.maximum(start + BM + offset, 0))
    K += b * kb + h * kh
    V += b * vb + h * vh
    for lo in range(0, last, BN):
        j = lo + tl.arange(0, BN)
        in_k = j < n_k
        seen = in_k
        if PADDED:
            seen = tl.load(Visible + b * n_k + j, mask=in_k, other=0) != 0
        k = tl.load(K + j[None, :] * kn + d[:, None], mask=seen[None, :] & in_d[:, None], other=0.0)
        v = tl.load(V + j[None, :] * vn + d[:, None], mask=seen[None, :] & in_d[:, None], other=0.0)
        keys = tl.load(Keys + bg * n_k + j, mask=in_k, other=-2)
        s = _scores(q, k, i[:, None], j[None, :], seen[None, :], offset, scale, CAUSAL, CUT, EXACT)
        p = tl.exp2(s - lse[:, None])
        dp = tl.dot(grad, v, input_precision="ieee" if EXACT else "tf32") - delta[:, None]
        dp += pull[:, None] * p - tl.where(label[:, None] == keys[None, :], value[:, None], 0.0)
        ds = (p * dp).to(k.dtype)
        dq = tl.dot(ds, tl.trans(k), dq, input_precision="ieee" if EXACT else "tf32")
    tl.store(DQ + b * xb + h * xh + i[:, None] * xn + d[None, :], (dq * scale).to(DQ.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kv(
    Q, K, V, Grad, Lse, Delta, Pull, Rows, Keys, Value, Group, Visible, DK, DV,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, gb, gh, gn, xb, xh, xn, yb, yh, yn,
    H, G, n_q, n_k, offset, scale,
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, CUT: tl.constexpr, EXACT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BN
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    bg = b * G + tl.load(Group + h)
    j, d = start + tl.arange(0, BN), tl.arange(0, BD)
    in_k, in_d = j < n_k, d < D
    inside = in_k[:, None] & in_d[None, :]
    seen = in_k
    if PADDED:
        seen = tl.load(Visible + b * n_k + j, mask=in_k, other=0) != 0
    shown = seen[:, None] & in_d[None, :]
    k = tl.load(K + b * kb + h * kh + j[:, None] * kn + d[None, :], mask=shown, other=0.0)
    v = tl.load(V + b * vb + h * vh + j[:, None] * vn + d[None, :], mask=shown, other=0.0)
    keys = tl.load(Keys + bg * n_k + j, mask=in_k, other=-2)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    first = 0
    if CAUSAL:
        first = tl.maximum(start - offset, 0) // BM * BM
    Q += b * qb + h * qh
    Grad += b * gb + h * gh
    row = tl.program_id(1).to(tl.int64) * n_q
    for lo in range(first, n_q, BM):
        i = lo + tl.arange(0, BM)
        in_q = i < n_q
        q = tl.load(Q + i[None, :] * qn + d[:, None], mask=in_q[None, :] & in_d[:, None], other=0.0)
        grad = tl.load(Grad + i[:, None] * gn + d[None, :], mask=in_q[:, None] & in_d[None, :], other=0.0)
        lse = tl.load(Lse + row + i, mask=in_q, other=float("inf"))
        delta = tl.load(Delta + row + i, mask=in_q, other=0.0)
        pull = tl.load(Pull + row + i, mask=in_q, other=0.0)
        label = tl.load(Rows + bg * n_q + i, mask=in_q, other=-1)
        value = pull * tl.load(Value + bg * n_q + i, mask=in_q, other=0.0)
        # Transposed: keys are rows here.
        s = _scores(k, q, i[None, :], j[:, None], seen[:, None], offset, scale, CAUSAL, CUT, EXACT)
        p = tl.exp2(s - lse[None, :])
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee" if EXACT else "tf32")
        dp = tl.dot(v, tl.trans(grad), input_precision="ieee" if EXACT else "tf32") - delta[None, :]
        dp += pull[None, :] * p - tl.where(label[None, :] == keys[:, None], value[None, :], 0.0)
        ds = (p * dp).to(q.dtype)
        dk = tl.dot(ds, tl.trans(q), dk, input_precision="ieee" if EXACT else "tf32")
    tl.store(DK + b * xb + h * xh + j[:, None] * xn + d[None, :], (dk * scale).to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + b * yb + h * yh + j[:, None] * yn + d[None, :], dv.to(DV.dtype.element_ty), mask=inside)


class PackedLabels(NamedTuple):
    """The targets of some groups of heads, and the group of each head; the axis g counts groups.

    ``rows`` of -1 and ``keys`` of -2 agree with nothing. ``weight`` is what a row's error counts, 0 where it has no
    target.
    """

    rows: Int[Tensor, "b g q"]
    keys: Int[Tensor, "b g k"]
    value: Float[Tensor, "b g q"]
    constant: Float[Tensor, "b g q"]
    weight: Float[Tensor, "b g q"]
    group: Int[Tensor, " h"]


def guided_attention(
    q: Float[Tensor, "b h q d"],
    k: Float[Tensor, "b h k d"],
    v: Float[Tensor, "b h k d"],
    labels: PackedLabels,
    *,
    key_visible: Bool[Tensor, "b k"] | None = None,
    causal: bool = False,
    offset: int = 0,
    scale: float,
) -> tuple[Float[Tensor, "b h q d"], Float[Tensor, "b h q"]]:
    """(softmax(scale q k^T) v, weight_i times the squared error of each row); both have gradients by q, k and v."""
    return _Guided.apply(q, k, v, *labels, key_visible, causal, offset, scale)


class _Guided(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Tensor,
        keys: Tensor,
        value: Tensor,
        constant: Tensor,
        weight: Tensor,
        group: Tensor,
        key_visible: Tensor | None,
        causal: bool,
        offset: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        b, h, n_q, _ = q.shape
        # Laid out as (b, q, h, d), so that joining heads needs no copy.
        out = _empty_like(q)
        lse, error, slope = (q.new_empty(b, h, n_q, dtype=torch.float32) for _ in range(3))
        common = _common(q, k, rows, causal, offset, scale)
        tile, _, _ = _blocks(q)
        _forward[(triton.cdiv(n_q, tile.rows), b * h)](
            q, k, v, out, lse, error, slope, rows, keys, value, constant, weight, group, key_visible,
            *_strides(q, k, v, out), **common, **_tile(tile, key_visible, cut=k.shape[2] % tile.keys != 0),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse, slope, rows, keys, value, weight, group, key_visible)
        ctx.settings = (causal, offset, scale)
        return out, error

    @staticmethod
    def backward(ctx: Any, grad: Tensor, error_grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, slope, rows, keys, value, weight, group, key_visible = ctx.saved_tensors
        b, h, n_q, _ = q.shape
        n_k = k.shape[2]
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        common = _common(q, k, rows, *ctx.settings)
        _, by_rows, by_keys = _blocks(q)
        delta, pull = torch.empty_like(lse), torch.empty_like(lse)
        sizes = {name: common[name] for name in ("H", "G", "n_q", "D", "BD")}
        _row_terms[(triton.cdiv(n_q, 64), b * h)](
            out, grad, error_grad.contiguous(), slope, weight, group, delta, pull, *_strides(out, grad), **sizes, BM=64
        )
        given = (q, k, v, grad, lse, delta, pull, rows, keys, value, group, key_visible)
        dq, dk, dv = (_empty_like(t) for t in (q, k, v))
        _backward_kv[(triton.cdiv(n_k, by_keys.keys), b * h)](
            *given, dk, dv, *_strides(q, k, v, grad, dk, dv), **common, **_tile(by_keys, key_visible, cut=False)
        )
        _backward_q[(triton.cdiv(n_q, by_rows.rows), b * h)](
            *given, dq, *_strides(q, k, v, grad, dq), **common,
            **_tile(by_rows, key_visible, cut=n_k % by_rows.keys != 0),
        )  # fmt: skip
        return dq, dk, dv, *[None] * 10


def _empty_like(t: Tensor) -> Tensor:
    b, h, n, d = t.shape
    return t.new_empty(b, n, h, d).transpose(1, 2)


def _strides(*tensors: Tensor) -> list[int]:
    return [t.stride(axis) for t in tensors for axis in range(3)]


def _blocks(q: Tensor) -> tuple[Blocks, Blocks, Blocks]:
    return next(blocks for width, blocks in BLOCKS.items() if q.shape[-1] <= width)


def _common(q: Tensor, k: Tensor, rows: Tensor, causal: bool, offset: int, scale: float) -> dict[str, Any]:
    _, h, n_q, d = q.shape
    sizes = {"H": h, "G": rows.shape[1], "n_q": n_q, "n_k": k.shape[2], "offset": offset, "scale": scale}
    exact = q.dtype == torch.float32
    # A matrix product on the tensor cores is at least 16 wide.
    return {**sizes, "CAUSAL": causal, "EXACT": exact, "D": d, "BD": max(16, triton.next_power_of_2(d))}


def _tile(blocks: Blocks, key_visible: Tensor | None, *, cut: bool) -> dict[str, Any]:
    padded = key_visible is not None
    flags = {"PADDED": padded, "CUT": cut or padded}
    return {**flags, "BM": blocks.rows, "BN": blocks.keys, "num_warps": blocks.warps, "num_stages": blocks.stages}
