# mypy: ignore-errors
"""The largest scores of rows, from the few tiles that hold them.

Each row comes with the N tiles whose largest scores are the largest: its N largest scores lie in these. The pairs of a
row and a tile are brought into the order of tiles, so that the scores of many rows with one tile are one product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.statistics_triton import EMPTY, HIDDEN, LOG2E, load_tile, scores

__all__ = ["chosen", "ordered", "ranked", "scored"]


@triton.jit
def _tile_of(value, n_tiles, tile_mask):
    """The number of a tile that ``rows`` kept; ``n_tiles`` for none."""
    return tl.where(value > EMPTY, value.to(tl.int32, bitcast=True) & tile_mask, n_tiles)


@triton.jit
def ranked(Tiles, Counts, Ranks, pairs, n_tiles, tile_mask, BLOCK: tl.constexpr):
    """The rank of each pair among those of its tile, in any order, and how many pairs each tile has."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pairs
    head = tl.program_id(1).to(tl.int64)
    tile = _tile_of(tl.load(Tiles + head * pairs + at, mask=inside, other=EMPTY), n_tiles, tile_mask)
    rank = tl.atomic_add(Counts + head * (n_tiles + 1) + tile, 1, mask=inside, sem="relaxed")
    tl.store(Ranks + head * pairs + at, rank, mask=inside)


@triton.jit
def ordered(Tiles, Ends, Counts, Ranks, Order, pairs, n_tiles, tile_mask, BLOCK: tl.constexpr):
    """The pairs in the order of their tiles."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < pairs
    head = tl.program_id(1).to(tl.int64)
    tile = _tile_of(tl.load(Tiles + head * pairs + at, mask=inside, other=EMPTY), n_tiles, tile_mask)
    cell = head * (n_tiles + 1) + tile
    first = tl.load(Ends + cell, mask=inside, other=0) - tl.load(Counts + cell, mask=inside, other=0)
    to = first + tl.load(Ranks + head * pairs + at, mask=inside, other=0)
    tl.store(Order + head * pairs + to, at, mask=inside)


@triton.jit
def _store_largest(Candidates, s, top, to, mine, floor, ROUND: tl.constexpr, N: tl.constexpr):
    """A tile's largest scores of each row; those below the row's ``floor`` are not among the row's largest."""
    tl.store(Candidates + to * N + ROUND, top, mask=mine)
    if ROUND + 1 < N:
        if tl.max((mine & (top >= floor)).to(tl.int32), 0) > 0:
            s = tl.where(s == top[:, None], HIDDEN, s)
            _store_largest(Candidates, s, tl.max(s, 1), to, mine, floor, ROUND + 1, N)
        else:
            for r in tl.static_range(ROUND + 1, N):
                tl.store(Candidates + to * N + r, tl.full(top.shape, HIDDEN, tl.float32), mask=mine)


@triton.jit
def scored(
    Q, K, Visible, Mask, Bias, Reach, LogNorms,
    # the tiles of rows, pairs in the order of tiles; written: the largest scores of each pair
    Tiles, Order, Candidates,
    # strides of Q, K, Mask, Bias
    qb, qh, qn, kb, kh, kn, mb, mh, mq, bb, bh, bq,
    # sizes
    H, G, n_q, n_k, offset, scale, n_tiles, tile_mask, first_head,
    # the call
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CUT: tl.constexpr,
    WHOLE: tl.constexpr, EXACT: tl.constexpr,
    # whether scores have the lengths of values in them
    NORM: tl.constexpr,
    # BM pairs at once, tiles of BN keys
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The N largest scores of each pair, with their places in the tile as last bits: a score of 30 is off by 0.0005."""
    head = first_head + tl.program_id(1).to(tl.int64)
    b, h = head // H, head % H
    g = h // (H // G)
    Tiles += head * n_q * N
    Candidates += tl.program_id(1).to(tl.int64) * n_q * N * N
    K += b * kb + g * kh
    LogNorms += (b * G + g) * n_k
    Mask += b * mb + h * mh
    Bias += b * bb + h * bh
    rank = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rank < n_q * N
    pair = tl.load(Order + head * n_q * N + rank, mask=inside, other=0)
    i, d = pair // N, tl.arange(0, BD)
    in_d = d < D
    q = load_tile(Q + b * qb + h * qh + i[:, None] * qn + d[None, :], inside[:, None] & in_d[None, :], False)
    tile = _tile_of(tl.load(Tiles + pair, mask=inside, other=EMPTY), n_tiles, tile_mask)
    # The last tile of a row is its least one; its number in the last bits has moved its score a little.
    floor = tl.load(Tiles + i * N + N - 1)
    floor -= tl.abs(floor) * ((tile_mask + 1) * 2.0**-22)
    first, last = tl.min(tile, 0), tl.max(tl.where(tile < n_tiles, tile, -1), 0)
    for t in range(first, last + 1):
        j = t * BN + tl.arange(0, BN)
        s, seen = scores(
            q, K, Visible, Mask, Bias, Reach, b, i, j, d, inside, in_d, n_q, n_k, kn, mq, bq, offset, scale,
            True, CAUSAL, PADDED, MASKED, BIASED, CUT, False, "tf32",
        )  # fmt: skip
        if NORM:
            s += tl.load(LogNorms + j, mask=seen, other=0.0)[None, :]
        s = ((s.to(tl.int32, bitcast=True) & -BN) | tl.arange(0, BN)[None, :]).to(tl.float32, bitcast=True)
        _store_largest(Candidates, s, tl.max(s, 1), pair.to(tl.int64), inside & (tile == t), floor, 0, N)


@triton.jit
def chosen(
    Candidates, Tiles, Lse, Largest, Places, rows, scale, n_tiles, tile_mask,
    BM: tl.constexpr, BN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The N largest of the scores of each row's tiles as weights, and their keys; -1 for none."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    inside = row < rows
    slots = tl.arange(0, N * N)
    kept = tl.load(Tiles + row[:, None] * N + (slots // N)[None, :], mask=inside[:, None], other=EMPTY)
    exists = inside[:, None] & (kept > EMPTY)
    s = tl.load(Candidates + row[:, None] * (N * N) + slots[None, :], mask=exists, other=HIDDEN)
    lse = tl.load(Lse + row, mask=inside, other=float("inf"))
    for r in tl.static_range(N):
        top, slot = tl.max(s, 1, return_indices=True)
        tile = _tile_of(tl.load(Tiles + row * N + slot // N, mask=inside, other=EMPTY), n_tiles, tile_mask)
        weight = tl.exp2(top * (scale * LOG2E) - lse)
        place = tile * BN + (top.to(tl.int32, bitcast=True) & (BN - 1))
        tl.store(Largest + row * N + r, weight, mask=inside)
        tl.store(Places + row * N + r, tl.where(weight > 0, place, -1), mask=inside)
        s = tl.where(slots[None, :] == slot[:, None], HIDDEN, s)
