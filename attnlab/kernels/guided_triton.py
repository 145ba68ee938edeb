# mypy: allow-untyped-defs
"""The kernels of ``guided``: attention with row errors, and its gradients."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from attnlab.kernels.statistics_tiles_triton import seen_keys

__all__ = ["backward_kv", "backward_q", "forward"]

LOG2E: Any = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(pointers, inside, WHOLE: tl.constexpr):
    """A tile with zeros outside of the tensor. With WHOLE nothing lies outside, and there is no mask."""
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _hide(s, i, j, seen, offset, CAUSAL: tl.constexpr, CUT: tl.constexpr):
    """Minus infinity where a row may not see a key."""
    if CUT:
        s = tl.where(seen, s, -float("inf"))
    if CAUSAL:
        s = tl.where(j <= i + offset, s, -float("inf"))
    return s


@triton.jit
def _place(Group, H, G):
    """The text and head of this program, and the row of its group's labels."""
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    return b, h, b * G + tl.load(Group + h)


@triton.jit
def _may_agree(low, high, Ranges, lo, n_ranges, N: tl.constexpr, SPAN: tl.constexpr):
    """Whether any label from ``low`` to ``high`` can be one of the N rows or keys from ``lo`` on, by their ranges."""
    least, most = 1 << 30, -1
    for r in tl.static_range(N // SPAN):
        at = 2 * tl.minimum(lo // SPAN + r, n_ranges - 1)
        least, most = tl.minimum(least, tl.load(Ranges + at)), tl.maximum(most, tl.load(Ranges + at + 1))
    return (low <= most) & (least <= high)


@triton.jit
def forward(
    # inputs
    Q, K, V,
    # written: output, logarithm of each row's sum, error, and sum_j w_ij^2 - value_i m_i
    Out, Lse, Error, Slope,
    # the target's labels
    Rows, Keys, Value, Constant, Weight, KeyRanges, Group,
    Visible,
    # strides of Q, K, V, Out
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
    # sizes
    H, G, n_q, n_k, n_key_ranges, n_row_ranges, offset, scale,
    # the call, and tiles without padding
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, CUT: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr,
    # tiles
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The output and the errors of BM rows, key tile by key tile."""
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    start = tl.program_id(0) * BM
    b, h, bg = _place(Group, H, G)
    i, d = start + tl.arange(0, BM), tl.arange(0, BD)
    in_q, in_d = i < n_q, d < D
    inside = in_q[:, None] & in_d[None, :]
    q = _tile(Q + b * qb + h * qh + i[:, None] * qn + d[None, :], inside, WHOLE)
    label = tl.load(Rows + bg * n_q + i, mask=in_q, other=-1)
    low, high = tl.min(tl.where(label < 0, 1 << 30, label), 0), tl.max(label, 0)
    KeyRanges += bg * n_key_ranges * 2
    c = scale * LOG2E
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
        seen = seen_keys(Visible, b, j, n_k, PADDED)
        k = _tile(K + j[None, :] * kn + d[:, None], seen[None, :] & in_d[:, None], WHOLE)
        v = _tile(V + j[:, None] * vn + d[None, :], seen[:, None] & in_d[None, :], WHOLE)
        s = _hide(tl.dot(q, k, input_precision=PRECISION), i[:, None], j[None, :], seen[None, :], offset, CAUSAL, CUT)
        new = tl.maximum(top, tl.max(s, 1) * c)
        base = new
        if CUT or CAUSAL:
            # A row that has seen nothing yet must not subtract infinities.
            base = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp2(s * c - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        squares = squares * shrink * shrink + tl.sum(p * p, 1)
        matched = matched * shrink
        if _may_agree(low, high, KeyRanges, lo, n_key_ranges, BN, SPAN):
            keys = tl.load(Keys + bg * n_k + j, mask=j < n_k, other=-2)
            matched += tl.sum(tl.where(label[:, None] == keys[None, :], p, 0.0), 1)
        out = out * shrink[:, None]
        out = tl.dot(p.to(v.dtype), v, out, input_precision=PRECISION)
        top = new
    some = total > 0
    norm = 1.0 / tl.where(some, total, 1.0)
    squares = squares * norm * norm
    matched = matched * norm
    at_row = bg * n_q + i
    value = tl.load(Value + at_row, mask=in_q, other=0.0)
    weight = tl.load(Weight + at_row, mask=in_q, other=0.0)
    constant = tl.load(Constant + at_row, mask=in_q, other=0.0)
    row = tl.program_id(1).to(tl.int64) * n_q + i
    tl.store(Error + row, weight * (squares - 2 * value * matched + constant), mask=in_q)
    tl.store(Slope + row, squares - value * matched, mask=in_q)
    # In the backward pass an empty row's weights are exp2(s - inf) = 0.
    tl.store(Lse + row, tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("inf")), mask=in_q)
    out = (out * norm[:, None]).to(Out.dtype.element_ty)
    tl.store(Out + b * ob + h * oh + i[:, None] * on + d[None, :], out, mask=inside)


@triton.jit
def backward_q(
    # inputs, the output and the gradients of output and error
    Q, K, V, Out, Grad, ErrorGrad,
    # from the forward pass
    Slope, Lse,
    # written for backward_kv: delta_i and c_i
    Delta, Pull,
    # the target's labels
    Rows, Keys, Value, Weight, KeyRanges, Group,
    Visible,
    # written
    DQ,
    # strides of Q, K, V, Out, Grad, ErrorGrad, DQ
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, gb, gh, gn, eb, eh, en, xb, xh, xn,
    # sizes
    H, G, n_q, n_k, n_key_ranges, n_row_ranges, offset, scale,
    # the call, and tiles without padding
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, CUT: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr,
    # tiles
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """dq of BM rows, key tile by key tile; and delta_i and c_i, which the gradients of keys and values need as well."""
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    start = tl.program_id(0) * BM
    b, h, bg = _place(Group, H, G)
    i, d = start + tl.arange(0, BM), tl.arange(0, BD)
    in_q, in_d = i < n_q, d < D
    inside = in_q[:, None] & in_d[None, :]
    q = _tile(Q + b * qb + h * qh + i[:, None] * qn + d[None, :], inside, WHOLE)
    grad = _tile(Grad + b * gb + h * gh + i[:, None] * gn + d[None, :], inside, WHOLE)
    row = tl.program_id(1).to(tl.int64) * n_q + i
    lse = tl.load(Lse + row, mask=in_q, other=float("inf"))
    out = _tile(Out + b * ob + h * oh + i[:, None] * on + d[None, :], inside, WHOLE)
    wanted = tl.load(ErrorGrad + b * eb + h * eh + i * en, mask=in_q, other=0.0)
    pull = 2 * wanted * tl.load(Weight + bg * n_q + i, mask=in_q, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1) + pull * tl.load(Slope + row, mask=in_q, other=0.0)
    tl.store(Delta + row, delta, mask=in_q)
    tl.store(Pull + row, pull, mask=in_q)
    label = tl.load(Rows + bg * n_q + i, mask=in_q, other=-1)
    low, high = tl.min(tl.where(label < 0, 1 << 30, label), 0), tl.max(label, 0)
    value = pull * tl.load(Value + bg * n_q + i, mask=in_q, other=0.0)
    KeyRanges += bg * n_key_ranges * 2
    c = scale * LOG2E
    dq = tl.zeros([BM, BD], tl.float32)
    last = n_k
    if CAUSAL:
        last = tl.minimum(n_k, tl.maximum(start + BM + offset, 0))
    K += b * kb + h * kh
    V += b * vb + h * vh
    for lo in range(0, last, BN):
        j = lo + tl.arange(0, BN)
        seen = seen_keys(Visible, b, j, n_k, PADDED)
        k = _tile(K + j[None, :] * kn + d[:, None], seen[None, :] & in_d[:, None], WHOLE)
        v = _tile(V + j[None, :] * vn + d[:, None], seen[None, :] & in_d[:, None], WHOLE)
        s = _hide(tl.dot(q, k, input_precision=PRECISION), i[:, None], j[None, :], seen[None, :], offset, CAUSAL, CUT)
        p = tl.exp2(s * c - lse[:, None])
        dp = tl.dot(grad, v, input_precision=PRECISION) + (pull[:, None] * p - delta[:, None])
        if _may_agree(low, high, KeyRanges, lo, n_key_ranges, BN, SPAN):
            keys = tl.load(Keys + bg * n_k + j, mask=j < n_k, other=-2)
            dp -= tl.where(label[:, None] == keys[None, :], value[:, None], 0.0)
        ds = (p * dp).to(k.dtype)
        dq = tl.dot(ds, tl.trans(k), dq, input_precision=PRECISION)
    tl.store(DQ + b * xb + h * xh + i[:, None] * xn + d[None, :], (dq * scale).to(DQ.dtype.element_ty), mask=inside)


@triton.jit
def backward_kv(
    # inputs and the gradient of the output
    Q, K, V, Grad,
    # from the forward pass and backward_q
    Lse, Delta, Pull,
    # the target's labels
    Rows, Keys, Value, RowRanges, Group,
    Visible,
    # written
    DK, DV,
    # strides of Q, K, V, Grad, DK, DV
    qb, qh, qn, kb, kh, kn, vb, vh, vn, gb, gh, gn, xb, xh, xn, yb, yh, yn,
    # sizes
    H, G, n_q, n_k, n_key_ranges, n_row_ranges, offset, scale,
    # the call, and tiles without padding
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, CUT: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr,
    # tiles
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """dk and dv of BN keys, row tile by row tile."""
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    start = tl.program_id(0) * BN
    b, h, bg = _place(Group, H, G)
    j, d = start + tl.arange(0, BN), tl.arange(0, BD)
    in_k, in_d = j < n_k, d < D
    seen = seen_keys(Visible, b, j, n_k, PADDED)
    shown = seen[:, None] & in_d[None, :]
    k = _tile(K + b * kb + h * kh + j[:, None] * kn + d[None, :], shown, WHOLE)
    v = _tile(V + b * vb + h * vh + j[:, None] * vn + d[None, :], shown, WHOLE)
    keys = tl.load(Keys + bg * n_k + j, mask=in_k, other=-2)
    low, high = tl.min(tl.where(in_k, keys, 1 << 30), 0), tl.max(keys, 0)
    RowRanges += bg * n_row_ranges * 2
    c = scale * LOG2E
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(start - offset, 0) // BM * BM
    Q += b * qb + h * qh
    Grad += b * gb + h * gh
    row = tl.program_id(1).to(tl.int64) * n_q
    for lo in range(begin, n_q, BM):
        i = lo + tl.arange(0, BM)
        in_q = i < n_q
        q = _tile(Q + i[None, :] * qn + d[:, None], in_q[None, :] & in_d[:, None], WHOLE)
        grad = _tile(Grad + i[:, None] * gn + d[None, :], in_q[:, None] & in_d[None, :], WHOLE)
        # Keys are rows here. A row outside the text has lse = inf, and so no weight.
        lse = tl.load(Lse + row + i) if WHOLE else tl.load(Lse + row + i, mask=in_q, other=float("inf"))
        s = _hide(tl.dot(k, q, input_precision=PRECISION), i[None, :], j[:, None], seen[:, None], offset, CAUSAL, CUT)
        p = tl.exp2(s * c - lse[None, :])
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
        delta, pull = _tile(Delta + row + i, in_q, WHOLE), _tile(Pull + row + i, in_q, WHOLE)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION) + (pull[None, :] * p - delta[None, :])
        if _may_agree(low, high, RowRanges, lo, n_row_ranges, BM, SPAN):
            label = tl.load(Rows + bg * n_q + i, mask=in_q, other=-1)
            value = pull * tl.load(Value + bg * n_q + i, mask=in_q, other=0.0)
            dp -= tl.where(label[None, :] == keys[:, None], value[None, :], 0.0)
        ds = (p * dp).to(q.dtype)
        dk = tl.dot(ds, tl.trans(q), dk, input_precision=PRECISION)
    inside = in_k[:, None] & in_d[None, :]
    tl.store(DK + b * xb + h * xh + j[:, None] * xn + d[None, :], (dk * scale).to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + b * yb + h * yh + j[:, None] * yn + d[None, :], dv.to(DV.dtype.element_ty), mask=inside)
