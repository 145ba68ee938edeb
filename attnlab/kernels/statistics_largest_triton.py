# mypy: ignore-errors
"""The largest scores of rows, from the few bins of keys that hold them.

Each row comes with the N bins whose largest scores are the largest: its N largest scores lie in these. The pairs of a
row and a bin are brought into the order of bins, so that the scores of many rows with one bin are one product. A list
is what one head has kept by one ranking; those ranked by lengths of values come after the others.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from attnlab.kernels.statistics_tiles_triton import (
    EMPTY,
    HIDDEN,
    LOG2E,
    bin_of,
    bin_place,
    empty_list,
    first_of_bin,
    insert,
    load_tile,
    scores,
)

__all__ = ["chosen", "ordered", "scored"]

# Scores of a pair that are found before the rows of a program are asked whether one has more.
SURE: Any = tl.constexpr(2)


@triton.jit(do_not_specialize=["first_list"])
def ordered(Bins, Ends, Counts, Ranks, Order, pairs, n_bins, bin_mask, first_list, BLOCK: tl.constexpr):
    """The pairs of each list in the order of their bins: the bin in the upper half of a number, the pair below."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pairs
    number = first_list + tl.program_id(1).to(tl.int64)
    first_pair = number * pairs
    bin = bin_of(tl.load(Bins + first_pair + at, mask=inside, other=EMPTY), n_bins, bin_mask)
    cell = number * (n_bins + 1) + bin
    first = tl.load(Ends + cell, mask=inside, other=0) - tl.load(Counts + cell, mask=inside, other=0)
    to = first + tl.load(Ranks + first_pair + at, mask=inside, other=0)
    tl.store(Order + tl.program_id(1).to(tl.int64) * pairs + to, (bin.to(tl.int64) << 32) | at, mask=inside)


@triton.jit
def _largest(s, wanted, room, floor, kept, ROUND: tl.constexpr, N: tl.constexpr):
    """The largest scores of each row of a bin, as many as may be among the row's: ``room`` of them, from ``floor`` on.

    As soon as no row has more of them, the others stay HIDDEN; the first SURE are found without asking.
    """
    top = tl.max(s, 1)
    kept = tl.where((tl.arange(0, N) == ROUND)[None, :], top[:, None], kept)
    if ROUND + 1 < N:
        if ROUND + 1 < SURE:
            s = tl.where(s == top[:, None], HIDDEN, s)
            kept = _largest(s, wanted, room, floor, kept, ROUND + 1, N)
        else:
            more = wanted & (top >= floor) & (room > ROUND + 1)
            if tl.max(more.to(tl.int32), 0) > 0:
                s = tl.where(s == top[:, None], HIDDEN, s)
                kept = _largest(s, wanted, room, floor, kept, ROUND + 1, N)
    return kept


@triton.jit(do_not_specialize=["first_list"])
def scored(
    Q, K, Visible, Mask, Bias, Reach, LogNorms,
    # the bins of rows, pairs in the order of bins; written: the largest scores of each pair
    Bins, Order, Candidates,
    # strides of Q, K, Mask, Bias
    qb, qh, qn, kb, kh, kn, mb, mh, mq, bb, bh, bq,
    # sizes; the first list
    H, G, n_q, n_k, offset, scale, heads, n_bins, bin_mask, first_list,
    # the call
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CUT: tl.constexpr,
    WHOLE: tl.constexpr, EXACT: tl.constexpr,
    # whether some lists are ranked by lengths of values
    NORM: tl.constexpr,
    # BM pairs at once, bins of KEYS keys, of which PARTS take turns
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The N largest scores of each pair, with their places in the bin as last bits: a score of 30 is off by 0.0005."""
    number = first_list + tl.program_id(1)
    norm = number >= heads
    head = number % heads
    b, h = (head // H).to(tl.int64), head % H
    g = h // (H // G)
    pairs = n_q * N
    Bins += number.to(tl.int64) * pairs
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
    # Pairs come in the order of bins, those without a bin last.
    first = (tl.load(Order + start) >> 32).to(tl.int32)
    last = tl.minimum((tl.load(Order + tl.minimum(start + BM, pairs) - 1) >> 32).to(tl.int32), n_bins - 1)
    bin, pair = (entry >> 32).to(tl.int32), entry.to(tl.int32)
    i, d = pair // N, tl.arange(0, BD)
    in_d = d < D
    q = load_tile(Q + b * qb + h * qh + i[:, None] * qn + d[None, :], inside[:, None] & in_d[None, :], False)
    # The last bin of a row is its least one; its number in the last bits has moved its score a little.
    floor = tl.load(Bins + i * N + N - 1)
    floor -= tl.abs(floor) * ((bin_mask + 1) * 2.0**-22)
    # The largest scores of a row's bins before this one are larger than all of this one.
    room = N - pair % N
    column, index = tl.arange(0, N), tl.arange(0, KEYS)
    place = bin_place(index, PARTS)
    for t in range(first, last + 1):
        lo = first_of_bin(t, KEYS, PARTS)
        s, seen = scores(
            q, K + tl.cast(lo, tl.int64) * kn, Visible, Mask, Bias, Reach, b, i, lo, place, d, inside, in_d, n_q, n_k,
            kn, mq, bq, offset, scale, True, False, CAUSAL, PADDED, MASKED, BIASED, CUT, False, "tf32",
        )  # fmt: skip
        if NORM:
            s += tl.load(LogNorms + lo + place, mask=seen & norm, other=0.0)[None, :]
        s = ((s.to(tl.int32, bitcast=True) & -KEYS) | index[None, :]).to(tl.float32, bitcast=True)
        own = inside & (bin == t)
        kept = _largest(s, own, room, floor, tl.full([BM, N], HIDDEN, tl.float32), 0, N)
        tl.store(Candidates + pair.to(tl.int64)[:, None] * N + column[None, :], kept, mask=own[:, None])


@triton.jit
def _insert_more(
    Candidates, s, best, at, exists, bin, PLACE: tl.constexpr, ROOM: tl.constexpr, KEYS: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """The lists with the scores of bins from ``s`` at PLACE on, ROOM in all, as long as some row's is large enough."""
    if tl.max((s > best[N - 1]).to(tl.int32), 0) > 0:
        best, at = insert(best, at, s, bin * KEYS + (s.to(tl.int32, bitcast=True) & (KEYS - 1)), N)
        if PLACE + 1 < ROOM:
            s = tl.load(Candidates + PLACE + 1, mask=exists, other=HIDDEN)
            best, at = _insert_more(Candidates, s, best, at, exists, bin, PLACE + 1, ROOM, KEYS, N)
    return best, at


@triton.jit(do_not_specialize=["first_list"])
def chosen(
    # the scores of pairs, log2 of sums; weights and keys take the place of bins and ranks
    Candidates, Lse, Bins, Places,
    n_q, heads, scale, n_bins, bin_mask, first_list,
    BM: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The N largest of the scores of each row's bins as weights, and their keys; -1 for none.

    A thread has a row: the bin of rank r, whose scores are sorted, holds at most N - r of the row's largest.
    """
    number = first_list + tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = i < n_q
    row = number * n_q + i
    Candidates += (tl.program_id(1).to(tl.int64) * n_q + i) * (N * N)
    lse = tl.load(Lse + (number % heads) * n_q + i, mask=inside, other=float("inf"))
    best, at = empty_list(BM, N)
    bins, there, second = (), (), ()
    for r in tl.static_range(N):
        kept = tl.load(Bins + row * N + r, mask=inside, other=EMPTY)
        there = there + (inside & (kept > EMPTY),)  # noqa: RUF005
        bins = bins + (bin_of(kept, n_bins, bin_mask),)  # noqa: RUF005
        s = tl.load(Candidates + r * N, mask=there[r], other=HIDDEN)
        if N > 1:
            second = second + (tl.load(Candidates + r * N + 1, mask=there[r], other=HIDDEN),)  # noqa: RUF005
        best, at = insert(best, at, s, bins[r] * KEYS + (s.to(tl.int32, bitcast=True) & (KEYS - 1)), N)
    # A bin's second largest is seldom among the row's.
    for r in tl.static_range(N - 1):
        best, at = _insert_more(Candidates + r * N, second[r], best, at, there[r], bins[r], 1, N - r, KEYS, N)
    for r in tl.static_range(N):
        weight = tl.exp2(best[r] * (scale * LOG2E) - lse)
        key = first_of_bin(at[r] // KEYS, KEYS, PARTS) + bin_place(at[r] % KEYS, PARTS)
        tl.store(Bins + row * N + r, weight, mask=inside)
        tl.store(Places + row * N + r, tl.where(weight > 0, key, -1), mask=inside)
