"""One chunk of tokens against the state before it, in registers. Two products make all of ABC, forward and backward:

score: a_t K~_t[n] for each slot, which is S = q K~ and, for the gradient, dP = do V~;
mix: sum_n y_t[n] V~_t[n], which is out = p V~ and, for the gradient, dq = g K~.

``back_chunk`` is the gradient of both with respect to keys (or values) and logits. With ``WIDE`` they go through the
references that the chunk needs; without, they take the first for all rows, which is right for almost every chunk. A
kernel made for both would need the registers of both, so there are two; the first one's sums of weights say whether
the second is needed.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels._abc_control import (
    HALF_EMPTY,
    LEAST,
    exp,
    inverse,
    lowest,
    next_reference,
    references,
    weigh,
)

__all__ = ["back_chunk", "gradients", "mix_chunk", "reference_of", "score_chunk", "soften"]


@triton.jit
def soften(scores, scale, SURE: tl.constexpr):
    """Softmax over the slots written, those above minus infinity; zeros where none is (never, if ``SURE``)."""
    top = tl.max(scores, 1)
    if not SURE:
        top = tl.where(top == float("-inf"), 0.0, top)
    p = exp((scores - top[:, None]) * scale)
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
def reference_of(x, z, z_own, WIDE: tl.constexpr):
    """The first reference: the largest of the chunk and the past, or a little above it; z_own is the chunk's own z."""
    top = tl.maximum(z, tl.max(x, 0)) if WIDE else tl.maximum(z, z_own)
    return tl.maximum(top, HALF_EMPTY)


@triton.jit
def score_chunk(past, own, x, z, ref, SURE: tl.constexpr, WIDE: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr):
    """a K~^T and a k^T to a_t K~_t, minus infinity where a slot is empty; and the sums of weights."""
    C: tl.constexpr = x.shape[0]
    rows = tl.arange(0, C)
    below = rows[:, None] >= rows
    tri = below.to(CT)
    own = tl.where(below, own, 0.0).to(CT)
    e, w, first = weigh(x, z, ref, tri, CT, PREC)
    scores = tl.dot(own, e, past * w[None, :], input_precision=PREC) * inverse(first)
    if WIDE:
        written = first >= LEAST
        low = lowest(x, z, ref)
        count = references(x, z, low, ref)
        ref = next_reference(x, z, low, ref)
        for _ in range(1, count):
            e, w, total = weigh(tl.minimum(x, ref[None, :]), tl.minimum(z, ref), ref, tri, CT, PREC)
            here = tl.dot(own, e, past * w[None, :], input_precision=PREC) * inverse(total)
            scores = tl.where(written, scores, here)
            written = written | (total >= LEAST)
            ref = next_reference(x, z, low, ref)
        scores = tl.where(written, scores, float("-inf"))
    elif not SURE:
        scores = tl.where(first >= LEAST, scores, float("-inf"))
    return scores, first


@triton.jit
def mix_chunk(y, x, z, ref, WIDE: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr):
    """y_t to what each row takes of each slot of the past and of each key of its chunk."""
    C: tl.constexpr = x.shape[0]
    rows = tl.arange(0, C)
    below = rows[:, None] >= rows
    tri = below.to(CT)
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
            to_own = tl.dot(share.to(CT), tl.trans(e), to_own, input_precision=PREC)
            written = written | (total >= LEAST)
            ref = next_reference(x, z, low, ref)
    return to_past.to(CT), tl.where(below, to_own, 0.0).to(CT)


@triton.jit
def back_chunk(pairs, y, scores, x, z, ref, WIDE: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr):
    """What the chunk's rows give its keys and their logits, and exp(s - r) of the first reference.

    The logits' part still lacks that factor, unless ``WIDE``, where every reference has its own.

    ``pairs`` is k a^T, keys by rows. Logits get y_t (a_t k_i - a_t K~_t); both terms take the same rounded y, or the
    difference would drown where one key fills a slot.
    """
    C: tl.constexpr = x.shape[0]
    rows = tl.arange(0, C)
    above = rows[:, None] <= rows
    later = above.to(CT)
    tri = (rows[:, None] >= rows).to(CT)
    pairs = tl.where(above, pairs, 0.0).to(CT)
    first, _, total = weigh(x, z, ref, tri, CT, PREC)
    share = y * inverse(total)
    if WIDE:
        share = tl.where(total >= LEAST, share, 0.0)
    share = share.to(CT)
    # Queries by rows, as share lies in the registers.
    to_own = tl.dot(share, tl.trans(first), input_precision=PREC)
    logits = _logits(pairs, share, scores, later, CT, PREC)
    if WIDE:
        logits = logits * first.to(tl.float32)
        written = total >= LEAST
        low = lowest(x, z, ref)
        count = references(x, z, low, ref)
        ref = next_reference(x, z, low, ref)
        for _ in range(1, count):
            e, _, total = weigh(tl.minimum(x, ref[None, :]), tl.minimum(z, ref), ref, tri, CT, PREC)
            share = tl.where(written | (total < LEAST), 0.0, y * inverse(total)).to(CT)
            to_own = tl.dot(share, tl.trans(e), to_own, input_precision=PREC)
            logits += _logits(pairs, share, scores, later, CT, PREC) * e.to(tl.float32)
            written = written | (total >= LEAST)
            ref = next_reference(x, z, low, ref)
    return tl.trans(tl.where(rows[:, None] >= rows, to_own, 0.0).to(CT)), logits, first


@triton.jit
def _logits(pairs, share, scores, later, CT: tl.constexpr, PREC: tl.constexpr):
    """sum_t share_t (pairs_it - scores_t); the second term in two parts where CT has few digits."""
    taken = -share.to(tl.float32) * scores
    high = taken.to(CT)
    result = tl.dot(pairs, share, input_precision=PREC)
    result = tl.dot(later, high, result, input_precision=PREC)
    if CT == tl.bfloat16:  # noqa: SIM300
        result = tl.dot(later, (taken - high.to(tl.float32)).to(CT), result, input_precision=PREC)
    return result
