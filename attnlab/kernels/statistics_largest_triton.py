# mypy: ignore-errors
"""The largest scores of rows, from the few tiles that hold them.

Each row comes with the N tiles whose largest scores are the largest: its N largest scores lie in these. The pairs of a
row and a tile are brought into the order of tiles, so that the scores of many rows with one tile are one product. A
list is what one head has kept by one ranking; those ranked by lengths of values come after the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.statistics_tiles_triton import EMPTY, HIDDEN, LOG2E, empty_list, insert, load_tile, scores, tile_of

__all__ = ["chosen", "ordered", "scored"]


@triton.jit(do_not_specialize=["first_list"])
def ordered(Tiles, Ends, Counts, Ranks, Order, pairs, n_tiles, tile_mask, first_list, BLOCK: tl.constexpr):
    """The pairs of each list in the order of their tiles: the tile in the upper half of a number, the pair below."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pairs
    number = first_list + tl.program_id(1).to(tl.int64)
    first_pair = number * pairs
    tile = tile_of(tl.load(Tiles + first_pair + at, mask=inside, other=EMPTY), n_tiles, tile_mask)
    cell = number * (n_tiles + 1) + tile
    first = tl.load(Ends + cell, mask=inside, other=0) - tl.load(Counts + cell, mask=inside, other=0)
    to = first + tl.load(Ranks + first_pair + at, mask=inside, other=0)
    tl.store(Order + tl.program_id(1).to(tl.int64) * pairs + to, (tile.to(tl.int64) << 32) | at, mask=inside)


@triton.jit
def _largest(s, top, wanted, room, floor, kept, ROUND: tl.constexpr, N: tl.constexpr):
    """The largest scores of each row of a tile, as many as may be among the row's: ``room`` of them, from ``floor`` on.

    As soon as no row has more of them, the others stay HIDDEN.
    """
    kept = tl.where((tl.arange(0, N) == ROUND)[None, :], top[:, None], kept)
    if ROUND + 1 < N:
        more = wanted & (top >= floor) & (room > ROUND + 1)
        if tl.max(more.to(tl.int32), 0) > 0:
            s = tl.where(s == top[:, None], HIDDEN, s)
            kept = _largest(s, tl.max(s, 1), wanted, room, floor, kept, ROUND + 1, N)
    return kept


@triton.jit(do_not_specialize=["first_list"])
def scored(
    Q, K, Visible, Mask, Bias, Reach, LogNorms,
    # the tiles of rows, pairs in the order of tiles; written: the largest scores of each pair
    Tiles, Order, Candidates,
    # strides of Q, K, Mask, Bias
    qb, qh, qn, kb, kh, kn, mb, mh, mq, bb, bh, bq,
    # sizes; the first list
    H, G, n_q, n_k, offset, scale, heads, n_tiles, tile_mask, first_list,
    # the call
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CUT: tl.constexpr,
    WHOLE: tl.constexpr, EXACT: tl.constexpr,
    # whether some lists are ranked by lengths of values
    NORM: tl.constexpr,
    # BM pairs at once, tiles of BN keys
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The N largest scores of each pair, with their places in the tile as last bits: a score of 30 is off by 0.0005."""
    number = first_list + tl.program_id(1).to(tl.int64)
    head = number % heads
    b, h = head // H, head % H
    g = h // (H // G)
    pairs = n_q * N
    Tiles += number * pairs
    Order += tl.program_id(1).to(tl.int64) * pairs
    Candidates += tl.program_id(1).to(tl.int64) * pairs * N
    K += b * kb + g * kh
    LogNorms += (b * G + g) * n_k
    Mask += b * mb + h * mh
    Bias += b * bb + h * bh
    start = tl.program_id(0) * BM
    at = start + tl.arange(0, BM)
    inside = at < pairs
    entry = tl.load(Order + at, mask=inside, other=0)
    # Pairs come in the order of tiles, those without a tile last.
    first = (tl.load(Order + start) >> 32).to(tl.int32)
    last = tl.minimum((tl.load(Order + tl.minimum(start + BM, pairs) - 1) >> 32).to(tl.int32), n_tiles - 1)
    tile, pair = (entry >> 32).to(tl.int32), entry.to(tl.int32)
    i, d = pair // N, tl.arange(0, BD)
    in_d = d < D
    q = load_tile(Q + b * qb + h * qh + i[:, None] * qn + d[None, :], inside[:, None] & in_d[None, :], False)
    # The last tile of a row is its least one; its number in the last bits has moved its score a little.
    floor = tl.load(Tiles + i * N + N - 1)
    floor -= tl.abs(floor) * ((tile_mask + 1) * 2.0**-22)
    # The largest scores of a row's tiles before this one are larger than all of this one.
    room = N - pair % N
    # Causality cuts tiles that end beyond the first of the rows.
    reach = tl.min(tl.where(inside, i, n_q), 0) + offset
    column = tl.arange(0, N)
    for t in range(first, last + 1):
        j = t * BN + tl.arange(0, BN)
        s, seen = scores(
            q, K + tl.cast(t, tl.int64) * BN * kn, Visible, Mask, Bias, Reach, b, i, t * BN, d, inside, in_d, n_q, n_k,
            kn, mq, bq, offset, scale, t * BN + BN - 1 > reach, BN, CAUSAL, PADDED, MASKED, BIASED, CUT, False, "tf32",
        )  # fmt: skip
        if NORM:
            s += tl.load(LogNorms + j, mask=seen & (number >= heads), other=0.0)[None, :]
        s = ((s.to(tl.int32, bitcast=True) & -BN) | tl.arange(0, BN)[None, :]).to(tl.float32, bitcast=True)
        own = inside & (tile == t)
        kept = _largest(s, tl.max(s, 1), own, room, floor, tl.full([BM, N], HIDDEN, tl.float32), 0, N)
        tl.store(Candidates + pair.to(tl.int64)[:, None] * N + column[None, :], kept, mask=own[:, None])


@triton.jit(do_not_specialize=["first_list"])
def chosen(
    # the scores of pairs, log2 of sums; weights and keys take the place of tiles and ranks
    Candidates, Lse, Tiles, Places,
    n_q, heads, scale, n_tiles, tile_mask, first_list,
    BM: tl.constexpr, BN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The N largest of the scores of each row's tiles as weights, and their keys; -1 for none.

    A thread has a row: the tile of rank r, whose scores are sorted, holds at most N - r of the row's largest.
    """
    number = first_list + tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = i < n_q
    row = number * n_q + i
    Candidates += (tl.program_id(1).to(tl.int64) * n_q + i) * (N * N)
    lse = tl.load(Lse + (number % heads) * n_q + i, mask=inside, other=float("inf"))
    best, at = empty_list(BM, N)
    for r in tl.static_range(N):
        kept = tl.load(Tiles + row * N + r, mask=inside, other=EMPTY)
        exists = inside & (kept > EMPTY)
        first_key = tile_of(kept, n_tiles, tile_mask) * BN
        for place in tl.static_range(N - r):
            s = tl.load(Candidates + r * N + place, mask=exists, other=HIDDEN)
            best, at = insert(best, at, s, first_key + (s.to(tl.int32, bitcast=True) & (BN - 1)), N)
    for r in tl.static_range(N):
        weight = tl.exp2(best[r] * (scale * LOG2E) - lse)
        tl.store(Tiles + row * N + r, weight, mask=inside)
        tl.store(Places + row * N + r, tl.where(weight > 0, at[r], -1), mask=inside)
