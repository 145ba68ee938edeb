"""One softmax over sinks, slots and the window's keys."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.hybrid.states import HALF_EMPTY, row_start

__all__ = [
    "LOG2E",
    "add_keys",
    "load_keys",
    "load_rows",
    "load_state",
    "read",
    "sink_scores",
    "slot_scores",
    "window_scores",
]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(t, stt, sth, j, first, length, R: tl.constexpr, RT: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
              BD: tl.constexpr):  # fmt: skip
    """The rows of block j and of RT query heads from the ``first`` on (RT C, BD), where they lie, and which exist."""
    rows, cols = tl.arange(0, RT * C), tl.arange(0, BD)
    head, place = first + rows // C, j * C + rows % C
    there = (head < R) & (place < length)
    at = head[:, None].to(tl.int64) * sth + place[:, None].to(tl.int64) * stt + cols[None, :]
    mask = there[:, None] & (cols < D)[None, :]
    return tl.load(t + at, mask=mask, other=0.0), at, mask


@triton.jit
def load_keys(t, stt, place, length, D: tl.constexpr, BD: tl.constexpr):
    """Keys or values at these places; zeros where there are none."""
    cols = tl.arange(0, BD)
    mask = ((place >= 0) & (place < length))[:, None] & (cols < D)[None, :]
    return tl.load(t + place[:, None].to(tl.int64) * stt + cols[None, :], mask=mask, other=0.0)


@triton.jit
def load_state(states, at, N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """K~ or V~, the ``at``-th of all."""
    slots, cols = tl.arange(0, NP), tl.arange(0, BD)
    mask = (slots < N)[:, None] & (cols < D)[None, :]
    return tl.load(states + at * N * D + slots[:, None] * D + cols[None, :], mask=mask, other=0.0)


@triton.jit
def slot_scores(
    q, mean, log_mass, at, scale, MASS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, PREC: tl.constexpr
):
    """Scores of slots, in powers of 2; minus infinity if empty."""
    slots = tl.arange(0, NP)
    logs = tl.load(log_mass + at * N + slots, mask=slots < N, other=-1e30)
    scores = tl.dot(q, tl.trans(mean), input_precision=PREC) * scale
    if MASS:
        scores += logs[None, :] * LOG2E
    return tl.where((logs > HALF_EMPTY)[None, :], scores, float("-inf"))


@triton.jit
def sink_scores(q, key, j, scale, W: tl.constexpr, C: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
                PREC: tl.constexpr):  # fmt: skip
    """Scores of the sinks before the window of block j."""
    sinks = tl.arange(0, SP)
    scores = tl.dot(q, tl.trans(key), input_precision=PREC) * scale
    return tl.where(((sinks < S) & (sinks < j * C + C - W))[None, :], scores, float("-inf"))


@triton.jit
def window_scores(q, key, own, place, scale, PREC: tl.constexpr):
    """Scores of the keys at these places for queries at the places ``own``."""
    scores = tl.dot(q, tl.trans(key), input_precision=PREC) * scale
    return tl.where((place >= 0)[None, :] & (place[None, :] <= own[:, None]), scores, float("-inf"))


@triton.jit
def add_keys(scores, value, top, total, out, PREC: tl.constexpr):
    """A running softmax with more keys."""
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    out = out * fade[:, None] + tl.dot(p.to(value.dtype), value, input_precision=PREC)
    return higher, total * fade + tl.sum(p, 1), out


@triton.jit
def read(
    q, k, v, starts, states, log_mass,
    # written
    out, lse,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sob, soh, sot, T, G, NS, scale,
    R: tl.constexpr, RT: tl.constexpr, W: tl.constexpr, KT: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASS: tl.constexpr,
    PREC: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The outputs of one block of queries of RT heads, and the base-2 logarithms of their softmax's sums."""
    j, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, g = (row // G).to(tl.int64), (row % G).to(tl.int64)
    start = row_start(starts, b, PADDED)
    length = T - start
    first = part * RT
    q += b * sqb + g * R * sqh + start * sqt
    k += b * skb + g * skh + start * skt
    v += b * svb + g * svh + start * svt
    out += b * sob + g * R * soh + start * sot
    scale = scale * LOG2E
    query, _, _ = load_rows(q, sqt, sqh, j, first, length, R, RT, C, D, BD)
    rows = tl.arange(0, RT * C)
    own = j * C + rows % C
    top, total = tl.full([RT * C], float("-inf"), tl.float32), tl.zeros([RT * C], tl.float32)
    acc = tl.zeros([RT * C, BD], tl.float32)
    if j * C >= W:
        if N > 0:
            at = row.to(tl.int64) * NS + j - W // C
            mean = load_state(states, 2 * at, N, NP, D, BD)
            scores = slot_scores(query, mean, log_mass, at, scale, MASS, N, NP, PREC)
            top, total, acc = add_keys(scores, load_state(states, 2 * at + 1, N, NP, D, BD), top, total, acc, PREC)
        if S > 0:
            sinks = tl.arange(0, SP)
            scores = sink_scores(query, load_keys(k, skt, sinks, length, D, BD), j, scale, W, C, S, SP, PREC)
            top, total, acc = add_keys(scores, load_keys(v, svt, sinks, length, D, BD), top, total, acc, PREC)
    for i in range(0, W, KT):
        place = j * C + C - W + i + tl.arange(0, KT)
        scores = window_scores(query, load_keys(k, skt, place, length, D, BD), own, place, scale, PREC)
        top, total, acc = add_keys(scores, load_keys(v, svt, place, length, D, BD), top, total, acc, PREC)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    _, at, mask = load_rows(out, sot, soh, j, first, length, R, RT, C, D, BD)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
    head = g * R + first + rows // C
    there = (first + rows // C < R) & (own < length)
    # Queries beyond the row's end have keys, too, but are not stored.
    sums = top + tl.log2(tl.where(total > 0, total, 1.0))
    tl.store(lse + (b * G * R + head) * T + start + own, sums, mask=there)
