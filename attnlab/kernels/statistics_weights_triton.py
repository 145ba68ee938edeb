# mypy: ignore-errors
"""Kernels that make weights again from scores and logarithms of rows' sums: what keys and squares get, recent mass."""

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.statistics_tiles_triton import LOG2E, fold, hide, load_tile, no_sums, scores, seen_keys, unfold

__all__ = ["columns", "recents"]


@triton.jit
def _add_to_square(square, given, BM: tl.constexpr, FOLD: tl.constexpr):
    """Add the sum of a tile.

    The 16 rows of a warp are summed by themselves, so that warps do not wait for each other. Sums that threads hold
    twice, as without tensor cores they do, must not be reshaped and summed again: Triton 3.7 then adds the wrong ones.
    """
    if FOLD == 1:
        tl.atomic_add(square, tl.sum(tl.sum(given, 1), 0), sem="relaxed")
    else:
        sums = tl.sum(tl.reshape(given, [BM // 16, 16 * FOLD]), 1)
        tl.atomic_add(square + tl.zeros([BM // 16], tl.int32), sums, sem="relaxed")


@triton.jit
def columns(
    # inputs; which keys are visible, which pairs, and what is added to scores; log2 of each row's sum
    Q, K, Visible, Mask, Bias, Lse,
    # written: what keys receive; added to: the mass of squares
    Received, Blocks,
    # strides of Q, K, Mask, Bias
    qb, qh, qn, kb, kh, kn, mb, mh, mq, bb, bh, bq,
    # sizes; rows and columns of squares, their side, and the place of the first query in its square
    H, G, n_q, n_k, offset, scale, n_i, n_j, side, shift,
    # the call
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CUT: tl.constexpr,
    WHOLE: tl.constexpr, EXACT: tl.constexpr,
    # what is computed
    RECEIVED: tl.constexpr, BLOCKS: tl.constexpr,
    # tiles: BM keys, BN queries
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """What BM keys receive from all queries and from those of each square, query tile by query tile."""
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    # The first keys, which most queries see, start first.
    start = tl.program_id(0) * BM
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    head = tl.program_id(1).to(tl.int64)
    j, d = start + tl.arange(0, BM), tl.arange(0, BD)
    in_d, seen = d < D, seen_keys(Visible, b, j, n_k, PADDED)
    k = load_tile(K + b * kb + h // (H // G) * kh + j[:, None] * kn + d[None, :], seen[:, None] & in_d[None, :], WHOLE)
    Q += b * qb + h * qh
    Lse += head * n_q
    Mask += b * mb + h * mh
    Bias += b * bb + h * bh
    c = scale * LOG2E
    # Queries before ``first`` see no key of the tile, and those from ``edge`` on see all of them.
    first, edge = 0, 0
    if CAUSAL:
        first = tl.minimum(tl.maximum(start - offset, 0) // BN * BN, n_q)
        edge = tl.minimum(tl.cdiv(tl.maximum(start + BM - 1 - offset, 0), BN) * BN, n_q)
    # The column and the row of a square, and the first query of the next: tiles divide squares.
    square_column = start // side
    square_row = (first + shift) // side
    following = (square_row + 1) * side - shift
    square = Blocks + (head * n_i + square_row) * n_j + square_column
    # What keys receive from the queries of squares that are done, and from those of this one.
    received, given = no_sums(BM, FOLD), no_sums(BM, FOLD)
    i = first + tl.arange(0, BN)
    lse = tl.load(Lse + i, mask=i < n_q, other=float("inf"))
    for lo in range(first, n_q, BN):
        # What is computed is known when the kernel is compiled.
        if BLOCKS:  # noqa: SIM102
            if lo >= following:
                _add_to_square(square, given, BM, FOLD)
                received += given
                given = no_sums(BM, FOLD)
                square += n_j
                following += side
        i = lo + tl.arange(0, BN)
        in_q = i < n_q
        # Asked for a tile ahead.
        next_lse = tl.load(Lse + i + BN, mask=i + BN < n_q, other=float("inf"))
        q = load_tile(Q + i[None, :] * qn + d[:, None], in_q[None, :] & in_d[:, None], WHOLE)
        s = tl.dot(k, q, input_precision=PRECISION)
        s = hide(
            s, Mask, Bias, Lse, i[None, :], j[:, None], seen[:, None], in_q[None, :] & (j < n_k)[:, None], n_q,
            mq, bq, offset, scale, lo < edge, False, CAUSAL, MASKED, BIASED, CUT,
        )  # fmt: skip
        given += fold(tl.exp2(s * c - lse[None, :]), BM, BN, FOLD)
        lse = next_lse
    if BLOCKS:  # noqa: SIM102
        if first < n_q:
            _add_to_square(square, given, BM, FOLD)
    if RECEIVED:
        tl.store(Received + head * n_k + j, unfold(received + given, FOLD), mask=j < n_k)


@triton.jit
def recents(
    # inputs; which keys are visible, which pairs, what is added to scores, the last key that causality shows a query
    Q, K, Visible, Mask, Bias, Reach,
    # log2 of each row's sum; written: the mass on the last keys
    Lse, Recent,
    # strides of Q, K, Mask, Bias
    qb, qh, qn, kb, kh, kn, mb, mh, mq, bb, bh, bq,
    # sizes; how many keys are recent
    H, G, n_q, n_k, offset, scale, recent,
    # the call, which is causal
    CAUSAL: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CUT: tl.constexpr,
    WHOLE: tl.constexpr, EXACT: tl.constexpr,
    # tiles
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """The mass of BM rows on the last keys before each: few tiles, which need not burden the loop over all of them."""
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    start = tl.program_id(0) * BM
    b, h = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    head = tl.program_id(1).to(tl.int64)
    i, d = start + tl.arange(0, BM), tl.arange(0, BD)
    in_q, in_d = i < n_q, d < D
    q = load_tile(Q + b * qb + h * qh + i[:, None] * qn + d[None, :], in_q[:, None] & in_d[None, :], WHOLE)
    K += b * kb + h // (H // G) * kh
    Mask += b * mb + h * mh
    Bias += b * bb + h * bh
    lse = tl.load(Lse + head * n_q + i, mask=in_q, other=float("inf"))
    mass = no_sums(BM, FOLD)
    last = tl.minimum(n_k, tl.maximum(start + BM + offset, 0))
    for lo in range(tl.maximum(start + offset + 1 - recent, 0) // BN * BN, last, BN):
        j = lo + tl.arange(0, BN)
        s, _ = scores(
            q, K + tl.cast(lo, tl.int64) * kn, Visible, Mask, Bias, Reach, b, i, lo, tl.arange(0, BN), d, in_q, in_d,
            n_q, n_k, kn, mq, bq, offset, scale, True, True, CAUSAL, PADDED, MASKED, BIASED, CUT, WHOLE, PRECISION,
        )  # fmt: skip
        p = tl.exp2(s * (scale * LOG2E) - lse[:, None])
        near = j[None, :] > i[:, None] + offset - recent
        mass += fold(tl.where(near, p, 0.0), BM, BN, FOLD)
    tl.store(Recent + head * n_q + i, unfold(mass, FOLD), mask=in_q)
