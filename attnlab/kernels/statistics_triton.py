# mypy: ignore-errors
"""The kernels of ``statistics``: softmax attention with statistics of its rows.

Sums over a row that weigh each key by a number of its own (its length, its place in the tile, whether it is in a set)
are one product with a narrow matrix, ``Side``. In float32 the largest scores of a row are kept in registers, sorted
downwards. In half precision only the bins of keys are kept that hold them, by their largest scores: a bin's number
stands in the last bits of its score, and ``statistics_largest_triton`` makes the scores of these few bins again. Of
the four threads that hold a row, each has bins of its own: bins are small, and lists are made without an exchange.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from attnlab.kernels.statistics_tiles_triton import (
    EMPTY,
    HIDDEN,
    LOG2E,
    beside,
    empty_list,
    fold,
    keep_bins,
    keep_keys,
    load_tile,
    no_bins,
    no_sums,
    scores,
    seen_keys,
    store_bins,
    store_keys,
    tops,
    unfold,
)

__all__ = ["prepared", "rows"]

LN2: Any = tl.constexpr(0.6931471805599453)
# Weights are 2^LIFT times as large before they are divided by their sum, so that float16 holds small ones.
LIFT: Any = tl.constexpr(15.0)
# Columns of ``Side``: the length of a value and what float16 leaves of it, the place in the tile, sinks, then sets.
LENGTH: Any = tl.constexpr(0)
LENGTH_REST: Any = tl.constexpr(1)
PLACE: Any = tl.constexpr(2)
SINK: Any = tl.constexpr(3)
FIRST_SET: Any = tl.constexpr(4)


@triton.jit
def _column(sides, number: tl.constexpr, MS: tl.constexpr):
    return tl.sum(tl.where((tl.arange(0, MS) == number)[None, :], sides, 0.0), 1)


@triton.jit
def prepared(
    # values, the largest number of each head, which keys are visible, their places, sets of keys
    V, Most, Visible, KeyPlaces, Members,
    # written: values over ``Unit``, a power of two; what sums weigh keys by; log2 of lengths of values over c
    Values, Side, LogNorms, Unit,
    # strides of V and Members; sizes; how many keys are sinks, how many sets there are
    vb, vh, vn, sb, G, n_k, c, sinks, n_sets,
    PADDED: tl.constexpr, EXACT: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, MS: tl.constexpr,
):  # fmt: skip
    """What ``rows`` reads of BN keys; float16 holds more digits of weights than bfloat16, if values fit into it."""
    head = tl.program_id(1).to(tl.int64)
    b, g = head // G, head % G
    lo = tl.program_id(0) * BN
    j, e, column = lo + tl.arange(0, BN), tl.arange(0, BE), tl.arange(0, MS)
    inside = j < n_k
    within = inside[:, None] & (e < E)[None, :]
    v = tl.load(V + b * vb + g * vh + j[:, None] * vn + e[None, :], mask=within, other=0.0).to(tl.float32)
    unit = 1.0
    if not EXACT:
        exponent = tl.load(Most + head).to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000
        exponent = tl.where((exponent == 0) | (exponent == 0x7F800000), 0x3F800000, exponent)
        unit = exponent.to(tl.float32, bitcast=True)
        v = v / unit
        tl.store(Values + (head * n_k + j[:, None]) * E + e[None, :], v.to(tl.float16), mask=within)
    if lo == 0:
        tl.store(Unit + head, unit)
    length = tl.sqrt(tl.sum(v * v, 1))
    logs = tl.log2(tl.where(length > 0, length * unit, 1.0)) / c
    tl.store(LogNorms + head * n_k + j, tl.where(length > 0, logs, HIDDEN), mask=inside)
    place, seen, first = j, inside, lo
    if PADDED:
        place = tl.load(KeyPlaces + b * n_k + j, mask=inside, other=0)
        first = tl.load(KeyPlaces + b * n_k + lo)
        seen = tl.load(Visible + b * n_k + j, mask=inside, other=0) != 0
    short = length.to(Side.dtype.element_ty)
    rest = length - short.to(tl.float32)
    number = column - FIRST_SET
    belongs = inside[:, None] & ((number >= 0) & (number < n_sets))[None, :]
    side = tl.load(Members + b * sb + j[:, None] * n_sets + number[None, :], mask=belongs, other=0)
    side = (side != 0).to(tl.float32)
    side = tl.where((column == LENGTH)[None, :], short.to(tl.float32)[:, None], side)
    side = tl.where((column == LENGTH_REST)[None, :], rest[:, None], side)
    side = tl.where((column == PLACE)[None, :], (place - first).to(tl.float32)[:, None], side)
    side = tl.where((column == SINK)[None, :], (seen & (place < sinks)).to(tl.float32)[:, None], side)
    tl.store(
        Side + (head * n_k + j[:, None]) * MS + column[None, :], side.to(Side.dtype.element_ty), mask=inside[:, None]
    )


@triton.jit
def rows(
    # inputs; which keys are visible, which pairs, what is added to scores, the last key that causality shows a query
    Q, K, V, Visible, Mask, Bias, Reach,
    # of keys and of queries where some are padding: places in the text; of ``prepared``
    KeyPlaces, QueryPlaces, Side, LogNorms, Unit,
    # written: output, log2 of each row's sum, and the statistics of rows
    Out, Lse, Entropy, Squares, Sinks, Recent, Distance, Norm, Sets, Largest, Places, NormLargest, NormPlaces,
    # added to: how many rows have kept a bin, for each list of bins
    Counts,
    # strides of Q, K, V, Out, Mask, Bias
    qb, qh, qn, kb, kh, vb, vh, ob, oh, on, mb, mh, mq, bb, bh, bq,
    # sizes; how many keys are recent, how many sets there are, and the bits of a score that hold a bin's number
    H, G, n_q, n_k, offset, scale, recent, n_sets, bin_mask,
    # the call
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CUT: tl.constexpr,
    WHOLE: tl.constexpr, EXACT: tl.constexpr,
    # what is computed: distances (queries stand among the keys), the largest weights times lengths of values, sums of
    # squares
    NEAR: tl.constexpr, NORM: tl.constexpr, SQUARES: tl.constexpr,
    # tiles; how far a key and a value are from the next
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    FOLD: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, N: tl.constexpr, MS: tl.constexpr,
    KN: tl.constexpr, VN: tl.constexpr,
):  # fmt: skip
    """The output and the statistics of BM rows, key tile by key tile; the tiles that causality cuts come first."""
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    # The rows that see most keys start first.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM if CAUSAL else tl.program_id(0) * BM
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    g = h // (H // G)
    i, d, e = start + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BE)
    in_q, in_d, in_e = i < n_q, d < D, e < E
    q = load_tile(Q + b * qb + h * qh + i[:, None] * qn + d[None, :], in_q[:, None] & in_d[None, :], WHOLE)
    K += b * kb + g * kh
    V += b * vb + g * vh
    LogNorms += (b * G + g) * n_k
    Side += (b * G + g) * n_k * MS
    Mask += b * mb + h * mh
    Bias += b * bb + h * bh
    c = scale * LOG2E
    if NEAR and (PADDED or not CAUSAL):
        own = (tl.load(QueryPlaces + b * n_q + i, mask=in_q, other=0) if PADDED else i + offset).to(tl.float32)
    # Keys beyond ``last`` are seen by no row, and keys before ``edge`` by every row, as far as causality goes.
    last, edge = n_k, n_k
    if CAUSAL:
        last = tl.minimum(n_k, tl.maximum(start + BM + offset, 0))
        edge = tl.maximum(tl.minimum(start + offset + 1, last), 0) // BN * BN
    # A row that has seen nothing yet has weights of zero: its base is far above HIDDEN.
    base = tl.full([BM], EMPTY, tl.float32) * c
    total = no_sums(BM, FOLD)
    mean_score = no_sums(BM, FOLD)
    squares = no_sums(BM, FOLD)
    near_mass = no_sums(BM, FOLD)
    distance = no_sums(BM, FOLD)
    out = tl.zeros([BM, BE], tl.float32)
    sides = tl.zeros([BM, MS], tl.float32)
    if EXACT:
        best, at = empty_list(BM, N)
        norm_best, norm_at = empty_list(BM, N)
    else:
        best = ()
        for _ in tl.static_range(N):
            best = best + (no_bins(BM, PARTS),)  # noqa: RUF005
        norm_best = best
        # The largest scores of the bins that the loop is in.
        in_bins, norm_in_bins = no_bins(BM, PARTS), no_bins(BM, PARTS)
    tiles = tl.cdiv(last, BN)
    # The last tile's first key; from tile to tile only these addresses change.
    first = tl.cast(tiles - 1, tl.int64) * BN
    K += first * KN
    V += first * VN
    Side += first * MS
    for number in range(tiles - 1, -1, -1):
        lo = number * BN
        j = lo + tl.arange(0, BN)
        if NORM:
            # Asked for early: nothing loads it a tile ahead.
            lengths = load_tile(LogNorms + j, seen_keys(Visible, b, j, n_k, PADDED), WHOLE)
        s, seen = scores(
            q, K, Visible, Mask, Bias, Reach, b, i, lo, tl.arange(0, BN), d, in_q, in_d, n_q, n_k, KN, mq, bq, offset,
            scale, lo >= edge, True, CAUSAL, PADDED, MASKED, BIASED, CUT, WHOLE, PRECISION,
        )  # fmt: skip
        place = tl.arange(0, BN).to(tl.int64)[:, None]
        v = load_tile(V + (place * VN + e[None, :]), seen[:, None] & in_e[None, :], WHOLE)
        side = load_tile(Side + (place * MS + tl.arange(0, MS)[None, :]), (j < n_k)[:, None], WHOLE)
        K -= BN * KN
        V -= BN * VN
        Side -= BN * MS
        top = tops(s, BM, BN, PARTS)
        # From the same maxima of threads, which the compiler takes once.
        highest = tl.max(s, 1)
        new = tl.maximum(base, highest * c - LIFT)
        p = tl.exp2(s * c - new[:, None])
        shrink = tl.exp2(base - new)
        base = new
        # Both are made smaller before the first product, which runs while the sums are made.
        out, sides = out * shrink[:, None], sides * shrink[:, None]
        out = tl.dot(p.to(v.dtype), v, out, input_precision=PRECISION)
        sides = tl.dot(p.to(side.dtype), side, sides, input_precision=PRECISION)
        shrinks, mass = beside(shrink, FOLD), fold(p, BM, BN, FOLD)
        total = total * shrinks + mass
        if SQUARES:
            squares = squares * (shrinks * shrinks) + fold(p * p, BM, BN, FOLD)
        mean_score = mean_score * shrinks + fold(p * s, BM, BN, FOLD)
        if NEAR:
            if CAUSAL:
                # All keys lie on one side of the query; counted from the tile's first key, no digits are lost.
                if PADDED:
                    low = tl.load(KeyPlaces + b * n_k + lo).to(tl.float32)
                    distance = distance * shrinks + mass * beside(own - low, FOLD)
                else:
                    distance = distance * shrinks + mass * ((tiles - 1 - number) * 1.0)
            if PADDED or not CAUSAL:
                place = j.to(tl.float32)
                if PADDED:
                    place = tl.load(KeyPlaces + b * n_k + j, mask=j < n_k, other=0).to(tl.float32)
                far = tl.abs(own[:, None] - place[None, :])
                near_mass = near_mass * shrinks + fold(tl.where(far < recent, p, 0.0), BM, BN, FOLD)
                if not CAUSAL:
                    distance = distance * shrinks + fold(p * far, BM, BN, FOLD)
        if NORM:
            # Ranked by w_j |v_j|; what is hidden stays so.
            normed = s + lengths[None, :]
            norm_top = tops(normed, BM, BN, PARTS)
        if EXACT:
            best, at = keep_keys(s, top, j, best, at, N, N)
            if NORM:
                norm_best, norm_at = keep_keys(normed, norm_top, j, norm_best, norm_at, N, N)
        else:
            in_bins = top if SPAN == 1 else tl.maximum(in_bins, top)
            if NORM:
                norm_in_bins = norm_top if SPAN == 1 else tl.maximum(norm_in_bins, norm_top)
            # The tile is the last of its bins.
            if number % SPAN == 0:
                best = keep_bins(in_bins, number // SPAN, best, bin_mask, PARTS, N)
                in_bins = no_bins(BM, PARTS)
                if NORM:
                    norm_best = keep_bins(norm_in_bins, number // SPAN, norm_best, bin_mask, PARTS, N)
                    norm_in_bins = no_bins(BM, PARTS)
    whole = unfold(total, FOLD)
    some = whole > 0
    over = 1.0 / tl.where(some, whole, 1.0)
    lse = tl.where(some, base + tl.log2(tl.where(some, whole, 1.0)), float("inf"))
    row = tl.program_id(1).to(tl.int64) * n_q + i
    tl.store(Lse + row, lse, mask=in_q)
    entropy = tl.where(some, lse - unfold(mean_score, FOLD) * over * c, 0.0) * LN2
    tl.store(Entropy + row, entropy, mask=in_q)
    if SQUARES:
        tl.store(Squares + row, unfold(squares, FOLD) * over * over, mask=in_q)
    if NEAR:
        if PADDED or not CAUSAL:
            tl.store(Recent + row, unfold(near_mass, FOLD) * over, mask=in_q)
        far = unfold(distance, FOLD)
        if CAUSAL:
            if not PADDED:
                far = far * BN + (i + offset - (tiles - 1) * BN).to(tl.float32) * whole
            far -= _column(sides, PLACE, MS)
        tl.store(Distance + row, far * over, mask=in_q)
    unit = tl.load(Unit + b * G + g)
    tl.store(Sinks + row, _column(sides, SINK, MS) * over, mask=in_q)
    tl.store(Norm + row, (_column(sides, LENGTH, MS) + _column(sides, LENGTH_REST, MS)) * over * unit, mask=in_q)
    column = tl.arange(0, MS) - FIRST_SET
    is_set = in_q[:, None] & ((column >= 0) & (column < n_sets))[None, :]
    tl.store(Sets + row[:, None] * n_sets + column[None, :], sides * over[:, None], mask=is_set)
    if EXACT:
        store_keys(Largest, Places, best, at, row, in_q, c, lse, N)
        if NORM:
            store_keys(NormLargest, NormPlaces, norm_best, norm_at, row, in_q, c, lse, N)
    else:
        n_bins = tl.cdiv(n_k, BN * SPAN) * PARTS
        Counts += tl.program_id(1).to(tl.int64) * (n_bins + 1)
        store_bins(Largest, Places, Counts, best, row, in_q, n_bins, bin_mask, PARTS, BM, N)
        if NORM:
            Counts += tl.num_programs(1).to(tl.int64) * (n_bins + 1)
            store_bins(NormLargest, NormPlaces, Counts, norm_best, row, in_q, n_bins, bin_mask, PARTS, BM, N)
    to = Out + b * ob + h * oh + i[:, None] * on + e[None, :]
    tl.store(to, (out * (over * unit)[:, None]).to(Out.dtype.element_ty), mask=in_q[:, None] & in_e[None, :])
