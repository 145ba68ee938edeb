# mypy: ignore-errors
"""The kernel of ``removed``: what effective attention removes of each row, from outputs and values alone."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["factors", "shares"]


@triton.jit
def _inverse(a, index, E: tl.constexpr):
    """(A^-1 of a symmetric A with ones on its diagonal, the least pivot), one dimension after the other.

    With d and w the pivot and its column, A - w w^T / d is A with the pivot's row and column swept out, if w has d - 1
    at the pivot and 2 is taken from there.
    """
    least = tl.full([], 1.0, a.dtype)
    for k in range(E):
        w = tl.sum(tl.where((index == k)[:, None], a, 0.0), 0)
        d = tl.sum(tl.where(index == k, w, 0.0), 0)
        # NaN is no pivot, either.
        least = tl.where(d > 0, tl.minimum(least, d), 0.0)
        d = tl.where(d > 0, d, 1.0)
        w = tl.where(index == k, d - 1, w)
        at_pivot = (index == k)[:, None] & (index == k)[None, :]
        a = a - w[:, None] * (w / d)[None, :] - tl.where(at_pivot, 2.0, 0.0)
    return -a, least


@triton.jit
def factors(
    # symmetric matrices: V^T V of each head, then V V^T of the first values of each head, with ``Sizes`` their traces
    Matrices, Sizes,
    # written: L^-T of the former, whether the latter's values are independent
    Whiten, Independent,
    heads, limit,
    E: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """L^-1 of A = L L^T by elimination, which turns the identity into the inverse of L but for the pivots' roots."""
    index = tl.arange(0, BE)
    inside = index < E
    both = inside[:, None] & inside[None, :]
    matrix = tl.program_id(0).to(tl.int64)
    cell = index[:, None] * E + index[None, :]
    a = tl.load(Matrices + matrix * E * E + cell, mask=both, other=0.0)
    eye = tl.where(index[:, None] == index[None, :], 1.0, 0.0).to(tl.float64)
    a = tl.where(both, a, eye)
    inverse, pivots = eye, tl.full([BE], 1.0, tl.float64)
    for k in range(E):
        row = tl.sum(tl.where((index == k)[:, None], a, 0.0), 0)
        d = tl.sum(tl.where(index == k, row, 0.0), 0)
        pivots = tl.where(index == k, d, pivots)
        below = tl.where(index > k, row / tl.where(d > 0, d, 1.0), 0.0)
        a -= below[:, None] * row[None, :]
        inverse -= below[:, None] * tl.sum(tl.where((index == k)[:, None], inverse, 0.0), 0)[None, :]
    positive = tl.min(tl.where(pivots > 0, 1, 0), 0) > 0
    inverse = inverse / tl.sqrt(tl.where(pivots > 0, pivots, 1.0))[:, None]
    if matrix < heads:
        whiten = tl.where(positive, inverse, float("nan")).to(tl.float32)
        tl.store(Whiten + matrix * E * E + index[None, :] * E + index[:, None], whiten, mask=both)
    else:
        squared = tl.sum(tl.sum(tl.where(both, inverse * inverse, 0.0), 0), 0)
        condition = tl.sqrt(squared * tl.load(Sizes + matrix - heads))
        tl.store(Independent + matrix - heads, (positive & (condition < limit)).to(tl.int32))


@triton.jit
def shares(
    # outputs, values; V^T V at the end of each block of queries; each row's |w|^2
    Output, V, Grams, Squares,
    # how many keys each query sees; heads whose first values are independent
    Counts, Independent,
    # read in float64, written in float32: which blocks float32 is not enough for
    Flags,
    # written: shares; set to 1: heads of which a row is in doubt
    Shares, Doubtful,
    # strides of Output and V
    ob, oh, on, vb, vh, vn,
    # sizes, query heads of a key/value head
    H, G, n_q, n_k, offset, groups,
    # the least pivot and the largest trace of an inverse that leave enough digits
    safe_pivot, safe_trace,
    DOUBLE: tl.constexpr, PADDED: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """1 - o G_i^-1 o^T / |w|^2 of a SPLITth of the C rows of a block, last row first: each next one sees a key less.

    G_i^-1 without key v is G^-1 + u u^T / (1 - v u) with u = G^-1 v^T (Sherman and Morrison, 1950).
    """
    KIND: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    number, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    head = tl.program_id(1).to(tl.int64)
    block = head * (tl.num_programs(0) // SPLIT) + number
    lo = number * C + part * (C // SPLIT)
    end = lo + C // SPLIT
    if DOUBLE and tl.load(Flags + block) == 0:
        return
    b, g = head // G, head % G
    index = tl.arange(0, BE)
    inside = index < E
    V += b * vb + g * vh
    Output += b * ob + g * groups * oh
    Squares += (b * H + g * groups) * n_q
    Shares += (b * H + g * groups) * n_q
    gram = Grams + block * E * E
    both = inside[:, None] & inside[None, :]
    own = tl.load(gram + index[:, None] * E + index[None, :], mask=both, other=0.0)
    diagonal = tl.load(gram + index * (E + 1), mask=inside, other=1.0)
    # The keys of the block's later rows.
    for i in range(end, (number + 1) * C):
        known = inside & (i < n_q) & (i + offset >= 0) & (i + offset < n_k)
        v = tl.load(V + (i + offset) * vn + index, mask=known, other=0.0).to(tl.float64)
        own -= v[:, None] * v[None, :]
        diagonal -= v * v
    # Scaled so that the diagonal is 1, which it also is beyond the width.
    size = 1.0 / tl.sqrt(tl.where(diagonal > 0, diagonal, 1.0))
    own = own * size[:, None] * size[None, :]
    own += tl.where((index[:, None] == index[None, :]) & ~inside[:, None], 1.0, 0.0)
    size = size.to(KIND)
    inverse, least = _inverse(own.to(KIND), index, E)
    free = tl.load(Independent + head) != 0
    in_doubt = tl.full([], 0, tl.int32)
    for t in range(C // SPLIT):
        i = end - 1 - t
        exists = i < n_q
        count = tl.minimum(tl.maximum(i + offset + 1, 0), n_k)
        if PADDED:
            count = tl.load(Counts + b * n_q + i, mask=exists, other=0)
        lead = (count <= E) & (free | (count == 0))
        sound = (count > E) & (least > safe_pivot)
        in_doubt |= (exists & ~lead & ~sound).to(tl.int32)
        for r in range(groups):
            o = tl.load(Output + r * oh + i * on + index, mask=inside & exists, other=0.0).to(KIND) * size
            kept = tl.sum(tl.sum(inverse * o[:, None], 0) * o, 0)
            whole = tl.load(Squares + r * n_q + i, mask=exists, other=1.0).to(KIND)
            share = tl.minimum(tl.maximum(1 - kept / tl.where(whole > 0, whole, 1.0), 0.0), 1.0)
            share = tl.where(lead | (whole == 0), 0.0, share)
            tl.store(Shares + r * n_q + i, share.to(tl.float32), mask=exists)
        key = i + offset
        known = exists & (key >= 0) & (key < n_k)
        v = tl.load(V + key * vn + index, mask=inside & known, other=0.0).to(KIND) * size
        # Rows that lead need no inverse, which with fewer keys there is not.
        v = tl.where(count - 1 > E, v, 0.0)
        u = tl.sum(inverse * v[:, None], 0)
        pivot = 1 - tl.sum(u * v, 0)
        least = tl.where(pivot > 0, tl.minimum(least, pivot), 0.0)
        inverse += u[:, None] * (u / tl.where(pivot > 0, pivot, 1.0))[None, :]
    if DOUBLE:
        if in_doubt != 0:
            tl.store(Doubtful + head, 1)
    else:
        # Each key less makes the inverse larger, so the last one is the largest.
        trace = tl.sum(tl.sum(tl.where(index[:, None] == index[None, :], inverse, 0.0), 0), 0)
        tl.store(Flags + block, (in_doubt != 0) | ~(trace < safe_trace))
