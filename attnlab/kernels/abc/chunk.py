"""One chunk of tokens against the state before it, in registers. Two products make all of ABC, forward and backward:

score: a_t K~_t[n] for each slot n, which is S = q K~ and, for the gradient, dP = do V~;
mix: sum_n y_t[n] V~_t[n], which is out = p V~ and, for the gradient, dq = g K~.

``back_chunk`` is the gradient of both with respect to keys (or values) and logits, in a wide chunk. With ``WIDE`` the
functions here loop over all references of a chunk; without, they use the first for all rows. One kernel with both would
need the registers of both, so every kernel that reads chunks is launched twice: without WIDE for all chunks, then with
WIDE for the chunks that the first launch has flagged.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.abc.control import (
    EMPTY,
    HALF_EMPTY,
    LEAST,
    LOG_QUARTER,
    add_dot,
    exp_below,
    in_full,
    inverse,
    lowest,
    next_reference,
    references,
    weigh,
    zeros,
)

__all__ = [
    "add_against",
    "add_low_parts",
    "back_chunk",
    "dot_parts",
    "load_half_row",
    "load_side_by_side",
    "mix_chunk",
    "multiply_side_by_side",
    "reference_of",
    "score_chunk",
    "slots_of_one_key",
    "softmax_gradients",
    "softmax_over_slots",
    "sum_of_later_rows",
    "triangle",
]


@triton.jit
def softmax_over_slots(scores, scale, ALL_WRITTEN: tl.constexpr):
    """Softmax over the slots whose score is finite; zeros in a row without any (there is none if ``ALL_WRITTEN``)."""
    top = tl.max(scores, 1)
    if not ALL_WRITTEN:
        top = tl.where(top == float("-inf"), 0.0, top)
    p = exp_below(scores, top[:, None], scale)
    total = tl.sum(p, 1)
    if not ALL_WRITTEN:
        total = tl.where(total > 0, total, 1.0)
    return p * (1.0 / total)[:, None]


@triton.jit
def softmax_gradients(scores, dp, scale, ALL_WRITTEN: tl.constexpr):
    """p, and g = dL/d(K~ q), from S and dP."""
    p = softmax_over_slots(scores, scale, ALL_WRITTEN)
    return p, p * ((dp - tl.sum(p * dp, 1)[:, None]) * scale)


@triton.jit
def load_side_by_side(left, left_step, right, right_step, rows, ok, W: tl.constexpr):
    """Rows of two tensors of width W as one tile of 2 W columns.

    Products need 64 columns, and so heads of 32 fill a tile without padding. A query that is zero on the right
    (``load_half_row``) multiplies only the left tensor, and of a product with such a tile one half is used.
    """
    cols = tl.arange(0, 2 * W)
    place = tl.where(
        (cols < W)[None, :], left + rows[:, None] * left_step + cols, right + rows[:, None] * right_step + (cols - W)
    )  # fmt: skip
    return tl.load(place, mask=ok[:, None] & (cols >= 0), other=0.0)


@triton.jit
def load_half_row(x, step, rows, ok, RIGHT: tl.constexpr, W: tl.constexpr):
    """Rows of width W beside W zeros, which are on the left if RIGHT."""
    cols = tl.arange(0, 2 * W)
    if RIGHT:
        return tl.load(x + rows[:, None] * step + (cols - W), mask=ok[:, None] & (cols >= W), other=0.0)
    return tl.load(x + rows[:, None] * step + cols, mask=ok[:, None] & (cols < W), other=0.0)


@triton.jit
def multiply_side_by_side(
    a, step, states, D, k, skt, v, svt, n, rows, inside, ok, slots, real_slots,
    RIGHT: tl.constexpr, W: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """a K~^T and a k^T (with RIGHT a V~^T and a v^T), and the two tiles they were taken with."""
    ad = load_half_row(a, step, rows, inside, RIGHT, W).to(CT)
    memories = load_side_by_side(states, D, states + n * D, D, slots, real_slots, W).to(CT)
    own = load_side_by_side(k, skt, v, svt, rows, ok, W).to(CT)
    past = tl.dot(ad, tl.trans(memories), input_precision=PREC)
    return past, tl.dot(ad, tl.trans(own), input_precision=PREC), memories, own


@triton.jit
def slots_of_one_key(peak_logits, z, slots, real, CAUSAL: tl.constexpr):
    """The slots whose states have low parts: those that are mostly one key; without CAUSAL all of them."""
    if CAUSAL:
        return real & (tl.load(peak_logits + slots, mask=real, other=EMPTY) > z + LOG_QUARTER)
    return real


@triton.jit
def add_low_parts(
    past, a, step, low_parts, D, rows, inside, slots, of_one_key, BD: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr
):  # fmt: skip
    """past + a low_parts^T over the slots ``of_one_key``; skipped where there are none, which is mostly so."""
    if tl.max(of_one_key.to(tl.int32), 0) > 0:
        for i in range(0, D, BD):
            cols = i + tl.arange(0, BD)
            ad = tl.load(a + rows[:, None] * step + cols, mask=inside[:, None] & (cols < D), other=0.0).to(CT)
            low = tl.load(low_parts + slots[:, None] * D + cols, mask=of_one_key[:, None] & (cols < D), other=0.0).to(
                CT
            )
            past = add_dot(ad, tl.trans(low), past, PREC)
    return past


@triton.jit
def add_against(a, memory, acc, LOW_PARTS: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr):
    """acc + a memory^T; with LOW_PARTS the memory has more digits than CT, and takes a second product."""
    high = memory.to(CT)
    acc = add_dot(a, tl.trans(high), acc, PREC)
    if LOW_PARTS:
        low = (memory - high.to(tl.float32)).to(CT)
        acc = add_dot(a, tl.trans(low), acc, PREC)
    return acc


@triton.jit
def reference_of(x, z, z_end, WIDE: tl.constexpr):
    """The first reference: z after the chunk; in a WIDE chunk the largest of its logits and the past's z."""
    top = tl.maximum(z, tl.max(x, 0)) if WIDE else z_end
    return tl.maximum(top, HALF_EMPTY)


@triton.jit
def dot_parts(a, b, acc, LOW_PARTS: tl.constexpr, PREC: tl.constexpr):
    """acc + a b with a rounded to b's dtype; with LOW_PARTS a second product adds what the rounding took."""
    high = a.to(b.dtype)
    acc = add_dot(high, b, acc, PREC)
    if LOW_PARTS:
        acc = add_dot((a - high.to(tl.float32)).to(b.dtype), b, acc, PREC)
    return acc


@triton.jit
def score_chunk(
    past, own, x, z, ref,
    ALL_WRITTEN: tl.constexpr, WIDE: tl.constexpr, LOW_PARTS: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """a_t K~_t from ``past`` = a K~^T and ``own`` = a k^T, minus infinity for empty slots; and the sums of weights.

    ``own`` is rounded as ``key_gradients`` rounds it, so that equal terms cancel in the gradient of the logits.
    """
    C: tl.constexpr = x.shape[0]
    rows = tl.arange(0, C)
    tri = triangle(rows[:, None] >= rows, own, CT)
    own = tl.where(rows[:, None] >= rows, own, 0.0)
    e, w, first = weigh(x, z, ref, tri, CT, PREC)
    scores = dot_parts(own, e, past * w[None, :], LOW_PARTS, PREC) * inverse(first)
    if WIDE:
        written = first >= LEAST
        low = lowest(x, z, ref)
        count = references(x, z, low, ref)
        ref = next_reference(x, z, low, ref)
        for _ in range(1, count):
            e, w, total = weigh(tl.minimum(x, ref[None, :]), tl.minimum(z, ref), ref, tri, CT, PREC)
            lower = dot_parts(own, e, past * w[None, :], LOW_PARTS, PREC) * inverse(total)
            scores = tl.where(written, scores, lower)
            written = written | (total >= LEAST)
            ref = next_reference(x, z, low, ref)
        scores = tl.where(written, scores, float("-inf"))
    elif not ALL_WRITTEN:
        scores = tl.where(first >= LEAST, scores, float("-inf"))
    return scores, first


@triton.jit
def mix_chunk(y, x, z, ref, like, WIDE: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr):
    """From y_t, the weight with which each row takes each slot of the past and each key of its own chunk."""
    C: tl.constexpr = x.shape[0]
    rows = tl.arange(0, C)
    below = rows[:, None] >= rows
    tri = triangle(below, like, CT)
    e, w, total = weigh(x, z, ref, tri, CT, PREC)
    share = y * inverse(total)
    if WIDE:
        share = tl.where(total >= LEAST, share, 0.0)
    to_past = share * w[None, :]
    to_own = tl.dot(share.to(CT), tl.trans(e), input_precision=PREC)
    if WIDE:
        written = total >= LEAST
        low = lowest(x, z, ref)
        count = references(x, z, low, ref)
        ref = next_reference(x, z, low, ref)
        for _ in range(1, count):
            e, w, total = weigh(tl.minimum(x, ref[None, :]), tl.minimum(z, ref), ref, tri, CT, PREC)
            share = tl.where(written | (total < LEAST), 0.0, y * inverse(total))
            to_past += share * w[None, :]
            to_own = add_dot(share.to(CT), tl.trans(e), to_own, PREC)
            written = written | (total >= LEAST)
            ref = next_reference(x, z, low, ref)
    return to_past.to(CT), tl.where(below, to_own, 0.0).to(CT)


@triton.jit
def back_chunk(pairs, y, scores, x, z, ref, LOW_PARTS: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr):
    """Gradients that the rows of a wide chunk give its own keys (as weights, keys by rows) and their logits.

    ``pairs`` is k a^T, keys by rows. Logits get y_t (a_t k_i - a_t K~_t). Both terms take the same rounded y: where one
    key fills a slot they nearly cancel, and different roundings would be larger than the difference.
    """
    C: tl.constexpr = x.shape[0]
    rows = tl.arange(0, C)
    below = rows[:, None] >= rows
    tri = triangle(below, pairs, CT)
    pairs = tl.where(rows[:, None] <= rows, pairs, 0.0)
    low = lowest(x, z, ref)
    count = references(x, z, low, ref)
    to_own = zeros(C, C, CT)
    logits = zeros(C, x.shape[1], CT)
    written = x > float("inf")
    for _ in range(count):
        e, _, total = weigh(tl.minimum(x, ref[None, :]), tl.minimum(z, ref), ref, tri, CT, PREC)
        share = tl.where(written | (total < LEAST), 0.0, y * inverse(total)).to(CT)
        to_own = add_dot(share, tl.trans(e), to_own, PREC)
        part = dot_parts(pairs, share, zeros(C, x.shape[1], CT), LOW_PARTS, PREC)
        part -= sum_of_later_rows(in_full(share, CT) * scores, to_own, CT, PREC)
        logits += part * in_full(e, CT)
        written = written | (total >= LEAST)
        ref = next_reference(x, z, low, ref)
    return tl.trans(tl.where(below, to_own, 0.0).to(CT)), logits


@triton.jit
def triangle(where, like, CT: tl.constexpr):
    """Ones where ``where`` holds, else zeros, in the register layout of ``like``: a product, which must be finite."""
    return tl.where(where & (like < float("inf")), 1.0, 0.0).to(CT)


@triton.jit
def sum_of_later_rows(taken, like, CT: tl.constexpr, PREC: tl.constexpr):
    """sum_{t >= i} taken_t for each row i; in two parts where CT is bfloat16."""
    rows = tl.arange(0, taken.shape[0])
    later = triangle(rows[:, None] <= rows, like, CT)
    high = taken.to(CT)
    result = tl.dot(later, high, input_precision=PREC)
    if CT == tl.bfloat16:  # noqa: SIM300
        result = add_dot(later, (taken - high.to(tl.float32)).to(CT), result, PREC)
    return result
