"""One chunk of tokens against the state before it, in registers: reading, and the gradients of reading.

With g_t = dL/d(K~_t q_t) and dP_t = V~_t do_t: dq_t = K~_t^T g_t, and token i gets from every later query t
exp(s_i - z_t) of g_t q_t, of p_t do_t, and of g_t (q_t k_i - K~_t q_t) + p_t (do_t v_i - V~_t do_t) for its logits.
Each function has a short way, for chunks that one reference serves, and one that goes through the references.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels._abc_control import (
    HALF_EMPTY,
    LEAST,
    WIDTH,
    inverse_of,
    lowest,
    next_reference,
    references,
    soften,
    weigh,
)

__all__ = ["fade", "key_chunk", "query_chunk", "read_chunk"]


@triton.jit
def read_chunk(past, own, x, z, scale, CT: tl.constexpr, PREC: tl.constexpr):
    """From q K~^T and q k^T to how much each query takes of each slot of the past and of each key of its chunk.

    Also what the memory's update needs: exp(s - top), exp(z - top) and top.
    """
    C: tl.constexpr = x.shape[0]
    rows = tl.arange(0, C)
    below = rows[:, None] >= rows
    tri = below.to(CT)
    own = tl.where(below, own, 0.0).to(CT)
    top = tl.maximum(tl.maximum(z, tl.max(x, 0)), HALF_EMPTY)
    low = lowest(x, z, top)
    e, w, total = weigh(x, z, top, tri, CT, PREC)
    if tl.max(top - low) <= WIDTH:
        inverse = inverse_of(total)
        scores = tl.dot(own, e, past * w[None, :], input_precision=PREC) * inverse
        share = soften(scores * scale, total >= LEAST) * inverse
        to_past = (share * w[None, :]).to(CT)
        to_own = tl.dot(share.to(CT), tl.trans(e), input_precision=PREC)
    else:
        scores = tl.zeros_like(past)
        written = scores > 1.0
        ref = top
        for _ in range(references(x, z, low, top)):
            e2, w2, total = weigh(x, z, ref, tri, CT, PREC)
            here = tl.dot(own, e2, past * w2[None, :], input_precision=PREC) * inverse_of(total)
            scores = tl.where(written, scores, here)
            written = written | (total >= LEAST)
            ref = next_reference(x, z, low, ref)
        p = soften(scores * scale, written)
        share = tl.zeros_like(past)
        to_own = tl.zeros([C, C], tl.float32)
        written = scores != scores
        ref = top
        for _ in range(references(x, z, low, top)):
            e2, w2, total = weigh(x, z, ref, tri, CT, PREC)
            here = tl.where(written, 0.0, p * inverse_of(total))
            share += here * w2[None, :]
            to_own = tl.dot(here.to(CT), tl.trans(e2), to_own, input_precision=PREC)
            written = written | (total >= LEAST)
            ref = next_reference(x, z, low, ref)
        to_past = share.to(CT)
    to_own = tl.where(below, to_own, 0.0).to(CT)
    return to_past, to_own, e, w, top


@triton.jit
def query_chunk(past_k, past_v, own_k, own_v, x, z, inside, scale, CT: tl.constexpr, PREC: tl.constexpr):
    """g, p and u = g S + p dP of each query and slot; g for the chunk's own keys; and exp(z - z_t)."""
    C: tl.constexpr = x.shape[0]
    rows = tl.arange(0, C)
    below = rows[:, None] >= rows
    tri = below.to(CT)
    own_k = tl.where(below, own_k, 0.0).to(CT)
    own_v = tl.where(below, own_v, 0.0).to(CT)
    top = tl.maximum(tl.maximum(z, tl.max(x, 0)), HALF_EMPTY)
    low = lowest(x, z, top)
    e, w, total = weigh(x, z, top, tri, CT, PREC)
    if tl.max(top - low) <= WIDTH:
        inverse = inverse_of(total)
        scores = tl.dot(own_k, e, past_k * w[None, :], input_precision=PREC) * inverse
        dp = tl.dot(own_v, e, past_v * w[None, :], input_precision=PREC) * inverse
        p = soften(scores * scale, (total >= LEAST) & inside[:, None])
        grad = scale * p * (dp - tl.sum(p * dp, 1)[:, None])
        grad_own = tl.dot((grad * inverse).to(CT), tl.trans(e), input_precision=PREC)
        faded = inverse * w[None, :]
    else:
        scores = tl.zeros_like(past_k)
        dp = tl.zeros_like(past_k)
        written = scores > 1.0
        ref = top
        for _ in range(references(x, z, low, top)):
            e2, w2, total = weigh(x, z, ref, tri, CT, PREC)
            inverse = inverse_of(total)
            here = tl.dot(own_k, e2, past_k * w2[None, :], input_precision=PREC) * inverse
            scores = tl.where(written, scores, here)
            here = tl.dot(own_v, e2, past_v * w2[None, :], input_precision=PREC) * inverse
            dp = tl.where(written, dp, here)
            written = written | (total >= LEAST)
            ref = next_reference(x, z, low, ref)
        p = soften(scores * scale, written & inside[:, None])
        grad = scale * p * (dp - tl.sum(p * dp, 1)[:, None])
        faded = tl.zeros_like(past_k)
        grad_own = tl.zeros([C, C], tl.float32)
        written = scores != scores
        ref = top
        for _ in range(references(x, z, low, top)):
            e2, w2, total = weigh(x, z, ref, tri, CT, PREC)
            inverse = tl.where(written, 0.0, inverse_of(total))
            faded += inverse * w2[None, :]
            grad_own = tl.dot((grad * inverse).to(CT), tl.trans(e2), grad_own, input_precision=PREC)
            written = written | (total >= LEAST)
            ref = next_reference(x, z, low, ref)
    grad_own = tl.where(below, grad_own, 0.0).to(CT)
    u = grad * scores + p * dp
    return grad, p, u, grad_own, faded, e, w, top


@triton.jit
def fade(x, z, CT: tl.constexpr, PREC: tl.constexpr):
    """exp(z - z_t): how much of the past each query of the chunk still sees, and exp(z - z_end)."""
    C: tl.constexpr = x.shape[0]
    rows = tl.arange(0, C)
    tri = (rows[:, None] >= rows).to(CT)
    top = tl.maximum(tl.maximum(z, tl.max(x, 0)), HALF_EMPTY)
    low = lowest(x, z, top)
    e, w, total = weigh(x, z, top, tri, CT, PREC)
    end = w + tl.sum(e.to(tl.float32), 0)
    faded = inverse_of(total) * w[None, :]
    if tl.max(top - low) > WIDTH:
        written = total >= LEAST
        ref = next_reference(x, z, low, top)
        for _ in range(1, references(x, z, low, top)):
            e2, w2, total = weigh(x, z, ref, tri, CT, PREC)
            faded += tl.where(written, 0.0, inverse_of(total) * w2[None, :])
            written = written | (total >= LEAST)
            ref = next_reference(x, z, low, ref)
    return faded, w / tl.maximum(end, LEAST)


@triton.jit
def key_chunk(from_k, from_v, x, z, grad, p, u, CT: tl.constexpr, PREC: tl.constexpr):
    """What the chunk's queries give its keys, values and logits, exp(s - z_end) for what comes after it, and ``fade``.

    Rows of ``from_k`` = k q^T and ``from_v`` = v do^T are keys, columns queries.
    """
    C: tl.constexpr = x.shape[0]
    rows = tl.arange(0, C)
    above = rows[:, None] <= rows
    later = above.to(CT)
    tri = (rows[:, None] >= rows).to(CT)
    from_k = tl.where(above, from_k, 0.0).to(CT)
    from_v = tl.where(above, from_v, 0.0).to(CT)
    top = tl.maximum(tl.maximum(z, tl.max(x, 0)), HALF_EMPTY)
    low = lowest(x, z, top)
    e, w, total = weigh(x, z, top, tri, CT, PREC)
    end = w + tl.sum(e.to(tl.float32), 0)
    weight = tl.exp(x - top[None, :]) / tl.maximum(end, LEAST)[None, :]
    if tl.max(top - low) <= WIDTH:
        inverse = inverse_of(total)
        share = (grad * inverse).to(CT)
        to_k = tl.dot(e, tl.trans(share), input_precision=PREC)
        logits = tl.dot(from_k, share, input_precision=PREC)
        share = (p * inverse).to(CT)
        to_v = tl.dot(e, tl.trans(share), input_precision=PREC)
        logits = tl.dot(from_v, share, logits, input_precision=PREC)
        logits = tl.dot(later, (-u * inverse).to(CT), logits, input_precision=PREC)
        logits = logits * e.to(tl.float32)
        faded = inverse * w[None, :]
    else:
        to_k = tl.zeros([C, C], tl.float32)
        to_v = tl.zeros([C, C], tl.float32)
        logits = tl.zeros_like(grad)
        faded = tl.zeros_like(grad)
        written = grad != grad
        ref = top
        for _ in range(references(x, z, low, top)):
            e2, w2, total = weigh(x, z, ref, tri, CT, PREC)
            inverse = tl.where(written, 0.0, inverse_of(total))
            share = (grad * inverse).to(CT)
            to_k = tl.dot(e2, tl.trans(share), to_k, input_precision=PREC)
            here = tl.dot(from_k, share, input_precision=PREC)
            share = (p * inverse).to(CT)
            to_v = tl.dot(e2, tl.trans(share), to_v, input_precision=PREC)
            here = tl.dot(from_v, share, here, input_precision=PREC)
            here = tl.dot(later, (-u * inverse).to(CT), here, input_precision=PREC)
            logits += here * e2.to(tl.float32)
            faded += inverse * w2[None, :]
            written = written | (total >= LEAST)
            ref = next_reference(x, z, low, ref)
    to_k = tl.where(above, to_k, 0.0).to(CT)
    to_v = tl.where(above, to_v, 0.0).to(CT)
    return to_k, to_v, logits, weight, faded, w / tl.maximum(end, LEAST)
