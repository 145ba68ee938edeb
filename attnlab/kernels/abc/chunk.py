"""One chunk of tokens against the state before it, in registers. Two products make all of ABC, forward and backward:

score: a_t K~_t[n] for each slot, which is S = q K~ and, for the gradient, dP = do V~;
mix: sum_n y_t[n] V~_t[n], which is out = p V~ and, for the gradient, dq = g K~.

``back_chunk`` is the gradient of both with respect to keys (or values) and logits, in a chunk of several references.
With ``WIDE`` they go through all of these; without, they take the first for all rows, which is right for almost every
chunk. A kernel made for both would need the registers of both, so there are two; the chunk's first row says whether the
second is needed.
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
    "add_lows",
    "against",
    "back_chunk",
    "beside",
    "dot_parts",
    "gradients",
    "half_row",
    "mix_chunk",
    "read_beside",
    "reference_of",
    "rest_of",
    "score_chunk",
    "soften",
    "solid_slots",
    "triangle",
]


@triton.jit
def soften(scores, scale, SURE: tl.constexpr):
    """Softmax over the slots written, those above minus infinity; zeros where none is (never, if ``SURE``)."""
    top = tl.max(scores, 1)
    if not SURE:
        top = tl.where(top == float("-inf"), 0.0, top)
    p = exp_below(scores, top[:, None], scale)
    total = tl.sum(p, 1)
    if not SURE:
        total = tl.where(total > 0, total, 1.0)
    return p * (1.0 / total)[:, None]


@triton.jit
def gradients(scores, dp, scale, SURE: tl.constexpr):
    """p, and g = dL/d(K~ q) from S and dP."""
    p = soften(scores, scale, SURE)
    return p, p * ((dp - tl.sum(p * dp, 1)[:, None]) * scale)


@triton.jit
def beside(left, left_step, right, right_step, rows, ok, W: tl.constexpr):
    """Rows of two tensors of width W side by side, as one tile.

    So heads of 32 have tiles of 64 columns, as products need them, without padding: a query with zeros on the right
    (``half_row``) reads only what is on the left, and of a product with such a tile one half is wanted.
    """
    cols = tl.arange(0, 2 * W)
    place = tl.where(
        (cols < W)[None, :], left + rows[:, None] * left_step + cols, right + rows[:, None] * right_step + (cols - W)
    )  # fmt: skip
    return tl.load(place, mask=ok[:, None] & (cols >= 0), other=0.0)


@triton.jit
def half_row(x, step, rows, ok, RIGHT: tl.constexpr, W: tl.constexpr):
    """Rows of width W with as many zeros on their right, or left."""
    cols = tl.arange(0, 2 * W)
    if RIGHT:
        return tl.load(x + rows[:, None] * step + (cols - W), mask=ok[:, None] & (cols >= W), other=0.0)
    return tl.load(x + rows[:, None] * step + cols, mask=ok[:, None] & (cols < W), other=0.0)


@triton.jit
def read_beside(
    a, step, states, D, k, skt, v, svt, n, rows, inside, ok, slots, real_slots,
    RIGHT: tl.constexpr, W: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """a times K~ (or V~, RIGHT) and times a chunk's keys (or values), and both tiles."""
    ad = half_row(a, step, rows, inside, RIGHT, W).to(CT)
    memories = beside(states, D, states + n * D, D, slots, real_slots, W).to(CT)
    own = beside(k, skt, v, svt, rows, ok, W).to(CT)
    past = tl.dot(ad, tl.trans(memories), input_precision=PREC)
    return past, tl.dot(ad, tl.trans(own), input_precision=PREC), memories, own


@triton.jit
def solid_slots(peaks, z, slots, real, CAUSAL: tl.constexpr):
    """The slots of which a state has more digits: those that are mostly one key; of a state at the end, all."""
    if CAUSAL:
        return real & (tl.load(peaks + slots, mask=real, other=EMPTY) > z + LOG_QUARTER)
    return real


@triton.jit
def add_lows(
    past, a, step, lows, D, rows, inside, slots, solid, BD: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr
):  # fmt: skip
    """past + a lows^T, with what rounding took of the solid slots' states; mostly there are none."""
    if tl.max(solid.to(tl.int32), 0) > 0:
        for i in range(0, D, BD):
            cols = i + tl.arange(0, BD)
            ad = tl.load(a + rows[:, None] * step + cols, mask=inside[:, None] & (cols < D), other=0.0).to(CT)
            low = tl.load(lows + slots[:, None] * D + cols, mask=solid[:, None] & (cols < D), other=0.0).to(CT)
            past = add_dot(ad, tl.trans(low), past, PREC)
    return past


@triton.jit
def against(a, memory, acc, FINE: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr):
    """acc + a memory^T; a FINE memory has more digits than CT, and gives a second part."""
    high = memory.to(CT)
    acc = add_dot(a, tl.trans(high), acc, PREC)
    if FINE:
        low = (memory - high.to(tl.float32)).to(CT)
        acc = add_dot(a, tl.trans(low), acc, PREC)
    return acc


@triton.jit
def reference_of(x, z, z_end, WIDE: tl.constexpr):
    """The first reference: z after the chunk, or its largest logit and the past's, which is a little below."""
    top = tl.maximum(z, tl.max(x, 0)) if WIDE else z_end
    return tl.maximum(top, HALF_EMPTY)


@triton.jit
def dot_parts(a, b, acc, FINE: tl.constexpr, PREC: tl.constexpr):
    """acc + a b, a in float32 or more: rounded as b is, and FINE with what rounding takes."""
    high = a.to(b.dtype)
    acc = add_dot(high, b, acc, PREC)
    if FINE:
        acc = add_dot((a - high.to(tl.float32)).to(b.dtype), b, acc, PREC)
    return acc


@triton.jit
def score_chunk(
    past, own, x, z, ref,
    SURE: tl.constexpr, WIDE: tl.constexpr, FINE: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """a K~^T and a k^T to a_t K~_t, minus infinity where a slot is empty; and the sums of weights.

    a k^T is rounded as ``key_gradients`` rounds it, so that what cancels in the logits' gradient cancels.
    """
    C: tl.constexpr = x.shape[0]
    rows = tl.arange(0, C)
    tri = triangle(rows[:, None] >= rows, own, CT)
    own = tl.where(rows[:, None] >= rows, own, 0.0)
    e, w, first = weigh(x, z, ref, tri, CT, PREC)
    scores = dot_parts(own, e, past * w[None, :], FINE, PREC) * inverse(first)
    if WIDE:
        written = first >= LEAST
        low = lowest(x, z, ref)
        count = references(x, z, low, ref)
        ref = next_reference(x, z, low, ref)
        for _ in range(1, count):
            e, w, total = weigh(tl.minimum(x, ref[None, :]), tl.minimum(z, ref), ref, tri, CT, PREC)
            here = dot_parts(own, e, past * w[None, :], FINE, PREC) * inverse(total)
            scores = tl.where(written, scores, here)
            written = written | (total >= LEAST)
            ref = next_reference(x, z, low, ref)
        scores = tl.where(written, scores, float("-inf"))
    elif not SURE:
        scores = tl.where(first >= LEAST, scores, float("-inf"))
    return scores, first


@triton.jit
def mix_chunk(y, x, z, ref, like, WIDE: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr):
    """y_t to what each row takes of each slot of the past and of each key of its chunk."""
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
def back_chunk(pairs, y, scores, x, z, ref, FINE: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr):
    """What the rows of a wide chunk give its keys (keys by rows) and their logits.

    ``pairs`` is k a^T, keys by rows. Logits get y_t (a_t k_i - a_t K~_t); both terms take the same rounded y, or the
    difference would drown where one key fills a slot.
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
        part = dot_parts(pairs, share, zeros(C, x.shape[1], CT), FINE, PREC)
        part -= rest_of(in_full(share, CT) * scores, to_own, CT, PREC)
        logits += part * in_full(e, CT)
        written = written | (total >= LEAST)
        ref = next_reference(x, z, low, ref)
    return tl.trans(tl.where(below, to_own, 0.0).to(CT)), logits


@triton.jit
def triangle(where, like, CT: tl.constexpr):
    """Ones where it says so, lying in the registers as the product ``like`` does, which must be finite."""
    return tl.where(where & (like < float("inf")), 1.0, 0.0).to(CT)


@triton.jit
def rest_of(taken, like, CT: tl.constexpr, PREC: tl.constexpr):
    """sum_{t >= i} taken_t; in two parts where CT has few digits."""
    rows = tl.arange(0, taken.shape[0])
    later = triangle(rows[:, None] <= rows, like, CT)
    high = taken.to(CT)
    result = tl.dot(later, high, input_precision=PREC)
    if CT == tl.bfloat16:  # noqa: SIM300
        result = add_dot(later, (taken - high.to(tl.float32)).to(CT), result, PREC)
    return result
