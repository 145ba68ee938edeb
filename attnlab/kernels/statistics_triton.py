# mypy: ignore-errors
"""The kernels of ``statistics``: softmax attention with statistics of its rows, then what needs normalised weights.

The largest scores of a row are kept in registers, as a tuple of columns sorted downwards: a tile whose largest is not
among a row's largest so far costs one comparison. In half precision the last bits of a score hold its place in the
tile, so that a maximum also says where it is: among the largest, a score of 30 is off by 0.0003.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["columns", "rows"]

LOG2E: Any = tl.constexpr(1.4426950408889634)
LN2: Any = tl.constexpr(0.6931471805599453)
# The score of a hidden key, finite so that it can be multiplied by its weight of zero; below EMPTY nothing was seen.
HIDDEN: Any = tl.constexpr(-1e30)
EMPTY: Any = tl.constexpr(-1e29)


@triton.jit
def _tile(pointers, inside, WHOLE: tl.constexpr):
    """A tile with zeros outside of the tensor. With WHOLE nothing lies outside, and there is no mask."""
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _scores(
    q, K, Visible, Mask, Bias, b, i, j, d, in_q, in_d, n_k, kn, mq, bq, offset, scale,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr,
    CUT: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(scores of a tile before the scale, which keys exist); hidden ones are -1e30. EDGE: causality cuts the tile."""
    seen = j < n_k
    if PADDED:
        # Hidden keys are not loaded, since NaN in them would spread.
        seen = tl.load(Visible + b * n_k + j, mask=seen, other=0) != 0
    k = _tile(K + j[None, :] * kn + d[:, None], seen[None, :] & in_d[:, None], WHOLE)
    s = tl.dot(q, k, input_precision=PRECISION)
    inside = in_q[:, None] & (j < n_k)[None, :]
    if BIASED:
        s += tl.load(Bias + i[:, None].to(tl.int64) * bq + j[None, :], mask=inside, other=0.0).to(tl.float32) / scale
    if CUT:
        s = tl.where(seen[None, :], s, HIDDEN)
    if MASKED:
        shown = tl.load(Mask + i[:, None].to(tl.int64) * mq + j[None, :], mask=inside, other=0)
        s = tl.where(shown != 0, s, HIDDEN)
    if EDGE and CAUSAL:
        s = tl.where(j[None, :] <= i[:, None] + offset, s, HIDDEN)
    return s, seen


@triton.jit
def _insert(best, at, value, place, N: tl.constexpr):
    """The list with one more number, of which the smallest is dropped."""
    new_best, new_at = (), ()
    for r in tl.static_range(N):
        larger = value > best[r]
        new_best = new_best + (tl.where(larger, value, best[r]),)  # noqa: RUF005
        new_at = new_at + (tl.where(larger, place, at[r]),)  # noqa: RUF005
        value, place = tl.where(larger, best[r], value), tl.where(larger, at[r], place)
    return new_best, new_at


@triton.jit
def _with_places(s, j, lo, EXACT: tl.constexpr, BN: tl.constexpr):
    """The scores with their places in the tile as last bits; as they are where they must be exact."""
    if EXACT:
        return s
    return ((s.to(tl.int32, bitcast=True) & -BN) | (j - lo)[None, :]).to(tl.float32, bitcast=True)


@triton.jit
def _keep_largest(
    s, top, j, lo, best, at, EXACT: tl.constexpr, BN: tl.constexpr, ROUNDS: tl.constexpr, N: tl.constexpr
):
    """Rows' largest numbers with those of a tile, whose largest is ``top``; at most ROUNDS of the tile can be in it."""
    if tl.max((top > best[N - 1]).to(tl.int32), 0) > 0:
        if EXACT:
            place = tl.min(tl.where(s == top[:, None], j[None, :], 2147483647), 1)
        else:
            place = lo + (top.to(tl.int32, bitcast=True) & (BN - 1))
        best, at = _insert(best, at, top, place, N)
        if ROUNDS > 1:
            taken = j[None, :] == place[:, None] if EXACT else s == top[:, None]
            s = tl.where(taken, HIDDEN, s)
            best, at = _keep_largest(s, tl.max(s, 1), j, lo, best, at, EXACT, BN, ROUNDS - 1, N)
    return best, at


@triton.jit
def _empty_list(BM: tl.constexpr, N: tl.constexpr):
    best, at = (), ()
    for _ in tl.static_range(N):
        best = best + (tl.full([BM], EMPTY, tl.float32),)  # noqa: RUF005
        at = at + (tl.full([BM], -1, tl.int32),)  # noqa: RUF005
    return best, at


@triton.jit
def _store_list(Values, Places, best, at, row, in_q, c, lse, N: tl.constexpr):
    """The weights of the largest scores; -1 is the place of none."""
    for r in tl.static_range(N):
        weight = tl.exp2(best[r] * c - lse)
        tl.store(Values + row * N + r, weight, mask=in_q)
        tl.store(Places + row * N + r, tl.where(weight > 0, at[r], -1), mask=in_q)


@triton.jit
def rows(
    # inputs; which keys are visible, which pairs, and what is added to scores
    Q, K, V, Visible, Mask, Bias,
    # of keys and of queries: places in the text; lengths of values; sets of keys
    KeyPlaces, QueryPlaces, Norms, Members,
    # written: output, log2 of each row's sum, and the statistics of rows
    Out, Lse, Entropy, Squares, Largest, Places, Sinks, Recent, Distance, Norm, Sets,
    # strides of Q, K, V, Out, Mask, Bias
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on, mb, mh, mq, bb, bh, bq,
    # sizes; how many keys are sinks and how many are recent
    H, G, n_q, n_k, offset, scale, sinks, recent,
    # the call
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CUT: tl.constexpr,
    WHOLE: tl.constexpr, EXACT: tl.constexpr,
    # what is computed: distances (queries stand among the keys), lengths of values, sets
    NEAR: tl.constexpr, NORM: tl.constexpr, SETS: tl.constexpr,
    # tiles
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    N: tl.constexpr, MS: tl.constexpr,
):  # fmt: skip
    """The output and the statistics of BM rows, key tile by key tile; the tiles that causality cuts come first.

    Then each row has its nearest keys early, and few later tiles hold one of its largest.
    """
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    # The rows that see most keys start first.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM if CAUSAL else tl.program_id(0) * BM
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    g = h // (H // G)
    i, d, e = start + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BE)
    in_q, in_d, in_e = i < n_q, d < D, e < E
    q = _tile(Q + b * qb + h * qh + i[:, None] * qn + d[None, :], in_q[:, None] & in_d[None, :], WHOLE)
    K += b * kb + g * kh
    V += b * vb + g * vh
    Norms += (b * G + g) * n_k
    Mask += b * mb + h * mh
    Bias += b * bb + h * bh
    c = scale * LOG2E
    own = tl.zeros([BM], tl.float32)
    if NEAR:
        own = tl.load(QueryPlaces + b * n_q + i, mask=in_q, other=0).to(tl.float32)
    # Keys beyond ``last`` are seen by no row, and keys before ``edge`` by every row, as far as causality goes.
    last, edge = n_k, n_k
    if CAUSAL:
        last = tl.minimum(n_k, tl.maximum(start + BM + offset, 0))
        edge = tl.maximum(tl.minimum(start + offset + 1, last), 0) // BN * BN
    top = tl.full([BM], HIDDEN, tl.float32)
    total = tl.zeros([BM], tl.float32)
    mean_score = tl.zeros([BM], tl.float32)
    squares = tl.zeros([BM], tl.float32)
    first_mass = tl.zeros([BM], tl.float32)
    near_mass = tl.zeros([BM], tl.float32)
    distance = tl.zeros([BM], tl.float32)
    norm = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, BE], tl.float32)
    sets = tl.zeros([BM, MS], tl.float32)
    best, at = _empty_list(BM, N)
    for part in tl.static_range(2):
        lower, upper = (edge, last) if part == 0 else (0, edge)
        for lo in range(lower, upper, BN):
            j = lo + tl.arange(0, BN)
            s, seen = _scores(
                q, K, Visible, Mask, Bias, b, i, j, d, in_q, in_d, n_k, kn, mq, bq, offset, scale,
                part == 0, CAUSAL, PADDED, MASKED, BIASED, CUT, WHOLE, PRECISION,
            )  # fmt: skip
            v = _tile(V + j[:, None] * vn + e[None, :], seen[:, None] & in_e[None, :], WHOLE)
            ranked = _with_places(s, j, lo, EXACT, BN)
            highest = tl.max(ranked, 1)
            new = tl.maximum(top, highest)
            # A row that has seen nothing yet has weights of zero.
            base = tl.where(new < EMPTY, 0.0, new * c)
            p = tl.exp2(s * c - base[:, None])
            shrink = tl.exp2(top * c - base)
            top = new
            mass = tl.sum(p, 1)
            total = total * shrink + mass
            squares = squares * shrink * shrink + tl.sum(p * p, 1)
            mean_score = mean_score * shrink + tl.sum(p * s, 1)
            out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
            if NORM:
                length = tl.load(Norms + j, mask=seen, other=0.0)
                norm = norm * shrink + tl.sum(p * length[None, :], 1)
            if SETS:
                belongs = tl.load(
                    Members + (b * n_k + j[:, None]) * MS + tl.arange(0, MS)[None, :],
                    mask=(j < n_k)[:, None],
                    other=0.0,
                )
                sets = tl.dot(p.to(belongs.dtype), belongs, sets * shrink[:, None], input_precision=PRECISION)
            first_mass = first_mass * shrink
            place = j.to(tl.float32)
            low = lo * 1.0
            if PADDED:
                place = tl.load(KeyPlaces + b * n_k + j, mask=j < n_k, other=0).to(tl.float32)
                low = tl.load(KeyPlaces + b * n_k + lo).to(tl.float32)
            if low < sinks:
                first_mass += tl.sum(tl.where((place < sinks)[None, :], p, 0.0), 1)
            if NEAR:
                near_mass = near_mass * shrink
                distance = distance * shrink
                if CAUSAL:
                    # All keys lie on one side of the query; counted from the tile's first key, no digits are lost.
                    distance += mass * (own - low) - tl.sum(p * (place - low)[None, :], 1)
                    if PADDED or lo + BN - 1 > start + offset - recent:
                        near_mass += tl.sum(tl.where(own[:, None] - place[None, :] < recent, p, 0.0), 1)
                else:
                    far = tl.abs(own[:, None] - place[None, :])
                    distance += tl.sum(p * far, 1)
                    near_mass += tl.sum(tl.where(far < recent, p, 0.0), 1)
            best, at = _keep_largest(ranked, highest, j, lo, best, at, EXACT, BN, N, N)
    some = total > 0
    over = 1.0 / tl.where(some, total, 1.0)
    lse = tl.where(some, top * c + tl.log2(tl.where(some, total, 1.0)), float("inf"))
    row = tl.program_id(1).to(tl.int64) * n_q + i
    tl.store(Lse + row, lse, mask=in_q)
    tl.store(Entropy + row, tl.where(some, lse - mean_score * over * c, 0.0) * LN2, mask=in_q)
    tl.store(Squares + row, squares * over * over, mask=in_q)
    tl.store(Sinks + row, first_mass * over, mask=in_q)
    if NEAR:
        tl.store(Recent + row, near_mass * over, mask=in_q)
        tl.store(Distance + row, distance * over, mask=in_q)
    if NORM:
        tl.store(Norm + row, norm * over, mask=in_q)
    if SETS:
        tl.store(Sets + row[:, None] * MS + tl.arange(0, MS)[None, :], sets * over[:, None], mask=in_q[:, None])
    _store_list(Largest, Places, best, at, row, in_q, c, lse, N)
    to = Out + b * ob + h * oh + i[:, None] * on + e[None, :]
    tl.store(to, (out * over[:, None]).to(Out.dtype.element_ty), mask=in_q[:, None] & in_e[None, :])


@triton.jit
def columns(
    # inputs; which keys are visible, which pairs, and what is added to scores
    Q, K, Visible, Mask, Bias,
    # log2 of the lengths of values; log2 of each row's sum
    LogNorms, Lse,
    # added to: what keys receive, and the mass of squares; written: the largest |w_j v_j| of each row
    Received, Blocks, Largest, Places,
    # strides of Q, K, Mask, Bias
    qb, qh, qn, kb, kh, kn, mb, mh, mq, bb, bh, bq,
    # sizes; rows and columns of squares, their side, and the place of the first query in its square
    H, G, n_q, n_k, offset, scale, n_i, n_j, side, shift,
    # the call
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CUT: tl.constexpr,
    WHOLE: tl.constexpr, EXACT: tl.constexpr,
    # what is computed
    NORM: tl.constexpr, RECEIVED: tl.constexpr, BLOCKS: tl.constexpr,
    # tiles
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """What BM rows give to each key and to each square, and their largest weights times lengths of values."""
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM if CAUSAL else tl.program_id(0) * BM
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    g = h // (H // G)
    head = tl.program_id(1).to(tl.int64)
    i, d = start + tl.arange(0, BM), tl.arange(0, BD)
    in_q, in_d = i < n_q, d < D
    q = _tile(Q + b * qb + h * qh + i[:, None] * qn + d[None, :], in_q[:, None] & in_d[None, :], WHOLE)
    K += b * kb + g * kh
    LogNorms += (b * G + g) * n_k
    Mask += b * mb + h * mh
    Bias += b * bb + h * bh
    c = scale * LOG2E
    lse = tl.load(Lse + head * n_q + i, mask=in_q, other=float("inf"))
    last, edge = n_k, n_k
    if CAUSAL:
        last = tl.minimum(n_k, tl.maximum(start + BM + offset, 0))
        edge = tl.maximum(tl.minimum(start + offset + 1, last), 0) // BN * BN
    best, at = _empty_list(BM, N)
    for part in tl.static_range(2):
        lower, upper = (edge, last) if part == 0 else (0, edge)
        for lo in range(lower, upper, BN):
            j = lo + tl.arange(0, BN)
            s, seen = _scores(
                q, K, Visible, Mask, Bias, b, i, j, d, in_q, in_d, n_k, kn, mq, bq, offset, scale,
                part == 0, CAUSAL, PADDED, MASKED, BIASED, CUT, WHOLE, PRECISION,
            )  # fmt: skip
            if RECEIVED or BLOCKS:
                given = tl.sum(tl.exp2(s * c - lse[:, None]), 0)
                if RECEIVED:
                    tl.atomic_add(Received + head * n_k + j, given, mask=j < n_k, sem="relaxed")
                if BLOCKS:
                    square = (head * n_i + (start + shift) // side) * n_j + lo // side
                    tl.atomic_add(Blocks + square, tl.sum(given, 0), sem="relaxed")
            if NORM:
                # Ranked by w_j |v_j|; what is hidden stays so.
                s += tl.maximum(tl.load(LogNorms + j, mask=seen, other=0.0) / c, HIDDEN)[None, :]
                ranked = _with_places(s, j, lo, EXACT, BN)
                best, at = _keep_largest(ranked, tl.max(ranked, 1), j, lo, best, at, EXACT, BN, N, N)
    if NORM:
        _store_list(Largest, Places, best, at, head * n_q + i, in_q, c, lse, N)
