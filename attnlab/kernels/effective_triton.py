# mypy: allow-untyped-defs
"""The kernels of effective attention: attention that keeps W, a basis of each head's values, and W projected on it."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend", "basis", "project"]


@triton.jit
def _times(a, b):
    """a b in float64."""
    return tl.dot(a, b, out_dtype=tl.float64)


@triton.jit
def _inverse_factor(a, N: tl.constexpr):
    """L^-1 with L L^T = A, and whether A is positive definite: Gaussian elimination in place.

    Column by column, the entries below the diagonal are replaced by those of L^-1.
    """
    n = tl.arange(0, N)
    i, j = n[:, None], n[None, :]
    for p in range(N):
        row = tl.sum(tl.where(i == p, a, 0.0), 0)
        column = tl.sum(tl.where(j == p, a, 0.0), 1)
        pivot = tl.sum(tl.where(n == p, row, 0.0), 0)
        factor = tl.where(n > p, column / tl.where(pivot > 0, pivot, 1.0), 0.0)
        row = tl.where(n == p, 1.0, row)
        a = tl.where((j == p) & (i > p), 0.0, a) - factor[:, None] * row[None, :]
    pivots = tl.sum(tl.where(i == j, a, 0.0), 1)
    scale = 1.0 / tl.sqrt(tl.where(pivots > 0, pivots, 1.0))
    sound = tl.sum(tl.where(pivots > 0, 1, 0)) == N
    return tl.where(i > j, a, tl.where(i == j, 1.0, 0.0)) * scale[:, None], sound


@triton.jit
def _halves(base, row, inside, step, first, second, exists1, exists2):
    """Rows of both halves of the columns, in float64.

    No mask on the way here may be loaded from a type of less than 32 bits: Triton would choose layouts of the products'
    operands for that type, and fail to compile.
    """
    x1 = tl.load(base + row * step + first[None, :], mask=inside & exists1[None, :], other=0.0)
    x2 = tl.load(base + row * step + second[None, :], mask=inside & exists2[None, :], other=0.0)
    return x1.to(tl.float64), x2.to(tl.float64)


@triton.jit
def _inside(Seen, b, j, n_k, PADDED: tl.constexpr):
    """Which keys exist and are visible."""
    return tl.load(Seen + b * n_k + j, mask=j < n_k, other=0) != 0 if PADDED else j < n_k


@triton.jit
def _visible(Count, b, n_k, PADDED: tl.constexpr):
    """How many keys are visible."""
    return tl.load(Count + b).to(tl.int32) if PADDED else tl.full((), n_k, tl.int32)


@triton.jit
def _scores(q, K, Seen, b, j, n_k, d, kn, scale, PADDED: tl.constexpr, D: tl.constexpr):
    """A tile of scale Q K^T, minus infinity at hidden keys."""
    c = tl.arange(0, D)[None, :]
    inside = _inside(Seen, b, j, n_k, PADDED)
    k = tl.load(K + j[:, None].to(tl.int64) * kn + c, mask=inside[:, None] & (c < d), other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
    return tl.where(inside[None, :], s, float("-inf"))


@triton.jit
def attend(
    # inputs
    Q, K, V, Seen,
    # written
    W, Values, Output,
    # sizes
    heads, n_q, n_k, d, e,
    # strides
    qb, qh, qn, kb, kh, kn, vb, vh, vn,
    scale,
    # constants: whether there is padding; columns of a tile, rows and keys; one tile holds all keys
    PADDED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """W = softmax(scale Q K^T) of some rows of a head, zero in a row without a visible key; W V with heads innermost.

    With ``ONE`` a tile holds all keys; else scores are made twice, the first time for their largest and their sum. V is
    copied into Values on the way.
    """
    head, start = tl.program_id(0), tl.program_id(1) * BM
    b, h = head // heads, head % heads
    Q += b.to(tl.int64) * qb + h.to(tl.int64) * qh
    K += b.to(tl.int64) * kb + h.to(tl.int64) * kh
    V += b.to(tl.int64) * vb + h.to(tl.int64) * vh
    W += head.to(tl.int64) * n_q * n_k
    Values += head.to(tl.int64) * n_k * e
    i = start + tl.arange(0, BM)
    cd, ce = tl.arange(0, D)[None, :], tl.arange(0, E)[None, :]
    q = tl.load(Q + i[:, None].to(tl.int64) * qn + cd, mask=(i < n_q)[:, None] & (cd < d), other=0.0)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    s = tl.zeros((BM, BK), tl.float32)
    for lo in range(0, n_k, BK):
        s = _scores(q, K, Seen, b, lo + tl.arange(0, BK), n_k, d, kn, scale, PADDED, D)
        higher = tl.maximum(top, tl.max(s, 1))
        # Minus infinity in a row that has seen no visible key yet.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - level) + tl.sum(tl.exp(s - level[:, None]), 1)
        top = higher
    level = tl.where(top == float("-inf"), 0.0, top)
    each = 1.0 / tl.where(total > 0, total, 1.0)
    o = tl.zeros((BM, E), tl.float32)
    for lo in range(0, n_k, BK):
        j = lo + tl.arange(0, BK)
        if not ONE:
            s = _scores(q, K, Seen, b, j, n_k, d, kn, scale, PADDED, D)
        w = (tl.exp(s - level[:, None]) * each[:, None]).to(W.dtype.element_ty)
        tl.store(W + i[:, None].to(tl.int64) * n_k + j[None, :], w, mask=(i < n_q)[:, None] & (j < n_k)[None, :])
        exists = _inside(Seen, b, j, n_k, PADDED)[:, None] & (ce < e)
        v = tl.load(V + j[:, None].to(tl.int64) * vn + ce, mask=exists, other=0.0)
        if start == 0:
            tl.store(Values + j[:, None] * e + ce, v, mask=(j < n_k)[:, None] & (ce < e))
        o += tl.dot(w, v, input_precision="tf32x3")
    Output += (b.to(tl.int64) * n_q * heads + h) * e
    to = Output + i[:, None].to(tl.int64) * heads * e + ce
    tl.store(to, o.to(Output.dtype.element_ty), mask=(i < n_q)[:, None] & (ce < e))


@triton.jit
def basis(
    # inputs
    V, Seen, Order, Count,
    # written
    Columns, Conditions,
    # sizes
    heads, inputs, n_k, e,
    # strides
    vb, vh, vn,
    # constants: whether there is padding; half of the columns, keys of a tile
    PADDED: tl.constexpr, H: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """V L^-T with L L^T = V^T V for up to 2 H columns, and |V| |L^-1|; infinity where there is no such L.

    Where no more keys are visible than V has columns, V V^T over those keys is factorised, for the condition alone.
    """
    head = tl.program_id(0)
    item = head // heads
    b = item % inputs
    base = V + item.to(tl.int64) * vb + (head % heads).to(tl.int64) * vh
    n, k = tl.arange(0, H), tl.arange(0, BK)
    count = _visible(Count, b, n_k, PADDED)
    short = count <= e
    exists1, exists2 = n < e, n + H < e
    # The Gram matrix is X^T X. X is V, or V^T over the visible keys; element (row, column) of both lies at row * step
    # plus the column's offset, which ``first`` and ``second`` hold.
    first, second = n.to(tl.int64), (n + H).to(tl.int64)
    step, extent = vn, n_k
    if short:
        exists1, exists2 = n < count, n + H < count
        if PADDED:
            first = tl.load(Order + b * n_k + n, mask=exists1, other=0)
            second = tl.load(Order + b * n_k + n + H, mask=exists2, other=0)
        first, second = first * vn, second * vn
        step, extent = 1, e
    g11 = tl.zeros((H, H), tl.float64)
    g21 = tl.zeros((H, H), tl.float64)
    g22 = tl.zeros((H, H), tl.float64)
    for lo in range(0, extent, BK):
        row = lo + k
        inside = row < extent
        if not short:
            inside = _inside(Seen, b, row, n_k, PADDED)
        x1, x2 = _halves(base, row[:, None], inside[:, None], step, first, second, exists1, exists2)
        g11 += _times(tl.trans(x1), x1)
        g21 += _times(tl.trans(x2), x1)
        g22 += _times(tl.trans(x2), x2)
    diagonal = n[:, None] == n[None, :]
    size = tl.sum(tl.where(diagonal, g11 + g22, 0.0))
    # Padding columns get a diagonal of the size of the others, so that the factorisation goes through.
    own = tl.where(size > 0, size, 1.0)
    g11 += tl.where(diagonal & ~exists1[:, None], own, 0.0)
    g22 += tl.where(diagonal & ~exists2[:, None], own, 0.0)
    r11, sound1 = _inverse_factor(g11, H)
    l21 = _times(g21, tl.trans(r11))
    r22, sound2 = _inverse_factor(g22 - _times(l21, tl.trans(l21)), H)
    r21 = -_times(_times(r22, l21), r11)
    inverse = tl.sum(r11 * r11) + tl.sum(r21 * r21) + tl.sum(r22 * r22)
    tl.store(Conditions + head, tl.where(sound1 & sound2, tl.sqrt(size * inverse), float("inf")).to(tl.float32))
    if not short:
        first, second = n.to(tl.int64), (n + H).to(tl.int64)
        Columns += head.to(tl.int64) * n_k * e
        for lo in range(0, n_k, BK):
            row = lo + k
            inside = _inside(Seen, b, row, n_k, PADDED)[:, None]
            x1, x2 = _halves(base, row[:, None], inside, vn, first, second, n < e, n + H < e)
            c1 = _times(x1, tl.trans(r11))
            c2 = _times(x1, tl.trans(r21)) + _times(x2, tl.trans(r22))
            exists = (row < n_k)[:, None]
            at = Columns + row[:, None] * e
            tl.store(at + n[None, :], c1.to(tl.float32), mask=exists & (n < e)[None, :])
            tl.store(at + (n + H)[None, :], c2.to(tl.float32), mask=exists & (n + H < e)[None, :])


@triton.jit
def project(
    # inputs
    W, Columns, V, Output, Seen, Count, Conditions,
    # written
    Projected, Stats,
    # sizes
    heads, groups, inputs, n_q,
    # strides of Output
    ob, oh, on,
    # sizes and strides of V
    n_k, e, vb, vh, vn,
    # bounds on the condition number
    safe, independent,
    # constants: whether there is padding, and an output; columns, rows and keys of a tile
    PADDED: tl.constexpr, KNOWN: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A head's W_perp = (W C) C^T with the basis C (``Columns``), or W where V's left nullspace is empty.

    Stats: |W_perp V - O| / |O|, the share of |W|^2 that is removed, and 1 where the condition number leaves W_perp in
    doubt.
    """
    head = tl.program_id(0)
    item, group = head // heads, head % heads // groups
    b = item % inputs
    k, c = tl.arange(0, BK), tl.arange(0, E)[None, :]
    W += head.to(tl.int64) * n_q * n_k
    Projected += head.to(tl.int64) * n_q * n_k
    Output += item.to(tl.int64) * ob + (head % heads).to(tl.int64) * oh
    Columns += (item * (heads // groups) + group).to(tl.int64) * n_k * e
    V += item.to(tl.int64) * vb + group.to(tl.int64) * vh
    count = _visible(Count, b, n_k, PADDED)
    short = count <= e
    whole, kept, lost, all_ = 0.0, 0.0, 0.0, 0.0
    for start in range(0, n_q, BM):
        i = start + tl.arange(0, BM)[:, None]
        t = tl.zeros((BM, E), tl.float32)
        squares = tl.zeros((BM,), tl.float32)
        for lo in range(0, n_k, BK):
            j = lo + k
            inside = _inside(Seen, b, j, n_k, PADDED)
            w = tl.load(W + i * n_k + j[None, :], mask=(i < n_q) & inside[None, :], other=0.0).to(tl.float32)
            squares += tl.sum(w * w, 1)
            if not short:
                columns = tl.load(Columns + j[:, None] * e + c, mask=(j[:, None] < n_k) & (c < e), other=0.0)
                t += tl.dot(w, columns, input_precision="tf32x3")
        whole += tl.sum(squares)
        squares = tl.zeros((BM,), tl.float32)
        rest = tl.zeros((BM, E), tl.float32)
        for lo in range(0, n_k, BK):
            j = lo + k
            inside = _inside(Seen, b, j, n_k, PADDED)
            if short:
                p = tl.load(W + i * n_k + j[None, :], mask=(i < n_q) & inside[None, :], other=0.0).to(tl.float32)
            else:
                columns = tl.load(Columns + j[:, None] * e + c, mask=(j[:, None] < n_k) & (c < e), other=0.0)
                p = tl.dot(t, tl.trans(columns), input_precision="tf32x3")
            tl.store(Projected + i * n_k + j[None, :], p, mask=(i < n_q) & (j[None, :] < n_k))
            squares += tl.sum(p * p, 1)
            if KNOWN:
                v = tl.load(V + j[:, None] * vn + c, mask=inside[:, None] & (c < e), other=0.0).to(tl.float32)
                rest += tl.dot(p, v, input_precision="tf32x3")
        kept += tl.sum(squares)
        if KNOWN:
            o = tl.load(Output + i * on + c, mask=(i < n_q) & (c < e), other=0.0).to(tl.float32)
            # An input without a visible key has no output of its own.
            o = tl.where(count > 0, o, 0.0)
            rest -= o
            lost += tl.sum(rest * rest)
            all_ += tl.sum(o * o)
    condition = tl.load(Conditions + item * (heads // groups) + group)
    gone = tl.where(short, 0.0, tl.maximum(whole - kept, 0.0) / tl.where(whole > 0, whole, 1.0))
    total = tl.num_programs(0)
    tl.store(Stats + head, tl.sqrt(lost / tl.where(all_ > 0, all_, 1.0)))
    tl.store(Stats + total + head, gone)
    tl.store(Stats + 2 * total + head, tl.where(condition < tl.where(short, independent, safe), 0.0, 1.0))
