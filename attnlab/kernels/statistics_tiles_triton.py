# mypy: ignore-errors
"""Parts of the kernels of ``statistics``: tiles of scores, lists of the largest of a row, sums that a thread folds."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = [
    "EMPTY",
    "HIDDEN",
    "LOG2E",
    "beside",
    "bin_of",
    "bin_place",
    "empty_list",
    "first_of_bin",
    "fold",
    "hide",
    "insert",
    "keep_bins",
    "keep_keys",
    "load_tile",
    "no_bins",
    "no_sums",
    "scores",
    "seen_keys",
    "store_bins",
    "store_keys",
    "top_of_rows",
    "tops",
    "unfold",
]

LOG2E: Any = tl.constexpr(1.4426950408889634)
# The score of a hidden key, finite so that it can be multiplied by its weight of zero; below EMPTY nothing was seen.
HIDDEN: Any = tl.constexpr(-1e30)
EMPTY: Any = tl.constexpr(-1e29)


@triton.jit
def load_tile(pointers, inside, WHOLE: tl.constexpr):
    """A tile with zeros outside of the tensor. With WHOLE nothing lies outside, and there is no mask."""
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def seen_keys(Visible, b, j, n_k, PADDED: tl.constexpr):
    """Which keys exist and are no padding; others are not loaded, since NaN in them would spread."""
    seen = j < n_k
    if PADDED:
        seen = tl.load(Visible + b * n_k + j, mask=seen, other=0) != 0
    return seen


@triton.jit
def hide(
    s, Mask, Bias, Reach, i, j, seen, inside, n_q, mq, bq, offset, scale,
    edge, LOADED: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Scores before the scale with the bias and with hidden ones as HIDDEN; ``i`` and ``j`` have two axes.

    Only where ``edge`` is true does causality cut the tile.
    """
    if BIASED:
        s += tl.load(Bias + i.to(tl.int64) * bq + j, mask=inside, other=0.0).to(tl.float32) / scale
    if CUT:
        s = tl.where(seen, s, HIDDEN)
    if MASKED:
        s = tl.where(tl.load(Mask + i.to(tl.int64) * mq + j, mask=inside, other=0) != 0, s, HIDDEN)
    # The first is known when the kernel is compiled.
    if CAUSAL:  # noqa: SIM102
        if edge:
            # A load keeps the compiler from comparing and selecting in all tiles what only few need.
            reach = tl.load(Reach + i) if LOADED else i + offset
            s = tl.where(j <= reach, s, HIDDEN)
    return s


@triton.jit
def scores(
    q, K, Visible, Mask, Bias, Reach, b, i, lo, place, d, in_q, in_d, n_q, n_k, kn, mq, bq, offset, scale,
    edge, LOADED: tl.constexpr, CAUSAL: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
    BIASED: tl.constexpr, CUT: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(scores of a tile before the scale, which keys exist); hidden ones are -1e30.

    ``K`` is the tile's first key, with number ``lo``, and ``place`` counts from it; ``edge``: causality cuts the tile,
    by what is LOADED of each row or by its number.
    """
    j = lo + place
    seen = seen_keys(Visible, b, j, n_k, PADDED)
    k = load_tile(K + (place.to(tl.int64)[None, :] * kn + d[:, None]), seen[None, :] & in_d[:, None], WHOLE)
    s = tl.dot(q, k, input_precision=PRECISION)
    inside = in_q[:, None] & (j < n_k)[None, :]
    s = hide(
        s, Mask, Bias, Reach, i[:, None], j[None, :], seen[None, :], inside, n_q, mq, bq, offset, scale,
        edge, LOADED, CAUSAL, MASKED, BIASED, CUT,
    )  # fmt: skip
    return s, seen


@triton.jit
def insert(best, at, value, place, N: tl.constexpr):
    """The list with one more number, of which the smallest is dropped."""
    new_best, new_at = (), ()
    for r in tl.static_range(N):
        larger = value > best[r]
        new_best = new_best + (tl.where(larger, value, best[r]),)  # noqa: RUF005
        new_at = new_at + (tl.where(larger, place, at[r]),)  # noqa: RUF005
        value, place = tl.where(larger, best[r], value), tl.where(larger, at[r], place)
    return new_best, new_at


@triton.jit
def keep_keys(s, top, j, best, at, ROUNDS: tl.constexpr, N: tl.constexpr):
    """Rows' largest numbers with those of a tile, whose largest is ``top``; at most ROUNDS of the tile can be in it."""
    if tl.max((top > best[N - 1]).to(tl.int32), 0) > 0:
        place = tl.min(tl.where(s == top[:, None], j[None, :], 2147483647), 1)
        best, at = insert(best, at, top, place, N)
        if ROUNDS > 1:
            s = tl.where(j[None, :] == place[:, None], HIDDEN, s)
            best, at = keep_keys(s, tl.max(s, 1), j, best, at, ROUNDS - 1, N)
    return best, at


@triton.jit
def tops(s, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr):
    """The largest scores of a tile in each bin: one of a row, or one of each of the 4 threads that hold it."""
    if PARTS == 1:
        top = tl.max(s, 1)
    else:
        s = tl.permute(tl.reshape(s, [BM, BN // (2 * PARTS), PARTS, 2]), 0, 2, 1, 3)
        top = tl.max(tl.reshape(s, [BM, PARTS, BN // PARTS]), 2)
    return top


@triton.jit
def top_of_rows(top, PARTS: tl.constexpr):
    """The largest of each row's ``tops``."""
    return top if PARTS == 1 else tl.max(top, 1)


@triton.jit
def no_bins(BM: tl.constexpr, PARTS: tl.constexpr):
    """Numbers in the shape of ``tops`` that are less than any."""
    return tl.full([BM] if PARTS == 1 else [BM, PARTS], EMPTY, tl.float32)


@triton.jit
def keep_bins(top, number, best, bin_mask, PARTS: tl.constexpr, N: tl.constexpr):
    """The lists with one bin more, whose largest score is ``top``: no branch, and no exchange between threads.

    A bin's number is in the last bits; with PARTS there is a list of each thread, whose own number comes at the end.
    """
    value = ((top.to(tl.int32, bitcast=True) & (-1 - bin_mask)) | number * PARTS).to(tl.float32, bitcast=True)
    new_best = ()
    for r in tl.static_range(N):
        new_best = new_best + (tl.maximum(best[r], value),)  # noqa: RUF005
        value = tl.minimum(best[r], value)
    return new_best


@triton.jit
def empty_list(BM: tl.constexpr, N: tl.constexpr):
    """Rows' largest numbers before the first, and their places."""
    best, at = (), ()
    for _ in tl.static_range(N):
        best = best + (tl.full([BM], EMPTY, tl.float32),)  # noqa: RUF005
        at = at + (tl.full([BM], -1, tl.int32),)  # noqa: RUF005
    return best, at


@triton.jit
def bin_of(value, n_bins, bin_mask):
    """The number of a bin that was kept by its largest score; ``n_bins`` for none."""
    return tl.where(value > EMPTY, value.to(tl.int32, bitcast=True) & bin_mask, n_bins)


@triton.jit
def first_of_bin(number, KEYS: tl.constexpr, PARTS: tl.constexpr):
    """The first of the KEYS keys of a bin: PARTS bins take turns, two keys each, as threads hold a product."""
    return number * KEYS if PARTS == 1 else number // PARTS * (KEYS * PARTS) + number % PARTS * 2


@triton.jit
def bin_place(index, PARTS: tl.constexpr):
    """How far a bin's keys are from its first."""
    return index if PARTS == 1 else index // 2 * (2 * PARTS) + index % 2


@triton.jit
def store_keys(Values, Places, best, at, row, in_q, c, lse, N: tl.constexpr):
    """The weights of the largest scores, and their keys; -1 for none."""
    for r in tl.static_range(N):
        weight = tl.exp2(best[r] * c - lse)
        tl.store(Values + row * N + r, weight, mask=in_q)
        tl.store(Places + row * N + r, tl.where(weight > 0, at[r], -1), mask=in_q)


@triton.jit
def store_bins(
    Values, Ranks, Counts, best, row, in_q, n_bins, bin_mask, PARTS: tl.constexpr, BM: tl.constexpr, N: tl.constexpr
):
    """The bins as they were kept, and the rank of each row among those of its bin, in any order."""
    column = tl.arange(0, N)
    kept = tl.full([BM, N], EMPTY, tl.float32)
    if PARTS > 1:
        lists = ()
        for r in tl.static_range(N):
            value = best[r].to(tl.int32, bitcast=True) | tl.arange(0, PARTS)[None, :]
            lists = lists + (value.to(tl.float32, bitcast=True),)  # noqa: RUF005
        best = lists
    for r in tl.static_range(N):
        top = top_of_rows(best[0] if PARTS > 1 else best[r], PARTS)
        kept = tl.where((column == r)[None, :], top[:, None], kept)
        if PARTS > 1:
            # The thread whose list begins with the largest goes on to its next.
            taken, shorter = best[0] == top[:, None], ()
            for place in tl.static_range(N - 1):
                shorter = shorter + (tl.where(taken, best[place + 1], best[place]),)  # noqa: RUF005
            best = shorter + (tl.where(taken, EMPTY, best[N - 1]),)  # noqa: RUF005
    to, inside = row[:, None] * N + column[None, :], in_q[:, None] & (column >= 0)[None, :]
    rank = tl.atomic_add(Counts + bin_of(kept, n_bins, bin_mask), 1, mask=inside, sem="relaxed")
    tl.store(Values + to, kept, mask=inside)
    tl.store(Ranks + to, rank, mask=inside)


@triton.jit
def fold(x, BM: tl.constexpr, BN: tl.constexpr, FOLD: tl.constexpr):
    """The sum over a row of a tile, as FOLD numbers: with 8, as threads hold a product, none is exchanged.

    With 4 each thread has one of them, in a shape of its own (``beside``), so that Triton leaves them where they are.
    """
    if FOLD == 1:
        sums = tl.sum(x, 1)[:, None]
    elif FOLD == 4:
        sums = tl.sum(tl.sum(tl.reshape(x, [BM, BN // 8, 4, 2]), 1, keep_dims=True), 3, keep_dims=True)
    else:
        sums = tl.sum(tl.reshape(x, [BM, BN // FOLD, FOLD]), 1)
    return sums


@triton.jit
def unfold(x, FOLD: tl.constexpr):
    """The sums of rows that are kept as FOLD numbers."""
    if FOLD == 4:
        x = tl.sum(tl.sum(x, 3), 1)
    return tl.sum(x, 1)


@triton.jit
def beside(x, FOLD: tl.constexpr):
    """A number of each row in the shape of ``fold``."""
    return x[:, None, None, None] if FOLD == 4 else x[:, None]


@triton.jit
def no_sums(BM: tl.constexpr, FOLD: tl.constexpr):
    """Zeros in the shape of ``fold``."""
    return tl.zeros([BM, 1, 4, 1], tl.float32) if FOLD == 4 else tl.zeros([BM, FOLD], tl.float32)
