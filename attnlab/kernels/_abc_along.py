"""Walking along a segment with one memory in registers: fewer bytes than a state for every chunk, where it fits.

A segment is some chunks of one sequence; the state before it comes from ``write_states`` and ``scan_states``, or is
the first one. ``score_along`` and ``mix_along`` go forward, ``sum_along`` and ``back_along`` from the end.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels._abc_chunk import back_chunk, gradients, mix_chunk, score_chunk, soften
from attnlab.kernels._abc_control import EMPTY, LEAST, load_logits, locate

__all__ = ["back_along", "mix_along", "score_along", "sum_along"]


@triton.jit
def _seen(visible, inside, at, MASKED: tl.constexpr):
    """Which tokens are there to be written."""
    if MASKED:
        return inside & (tl.load(visible + at, mask=inside, other=0) != 0)
    return inside


@triton.jit
def _grown(memory, z, e, w, top, new, PREC: tl.constexpr):
    """The averages and z after a chunk."""
    total = w + tl.sum(e.to(tl.float32), 0)
    inverse = 1.0 / tl.maximum(total, LEAST)
    memory = tl.dot(tl.trans(e), new, memory * w[:, None], input_precision=PREC) * inverse[:, None]
    return memory, tl.where(total > 0, top + tl.log(total), EMPTY)


@triton.jit
def score_along(
    a, k, s, visible, first, zs, scores, last, last_z, chunk_z, table,
    sab, sah, sat, skb, skh, skt, ssb, ssh, sst, sm, per, T, NT, G, R, N, L,
    C: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    STARTED: tl.constexpr, ENDED: tl.constexpr, MARKED: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """a_t K~_t of a segment, in float32; z before each chunk (``MARKED``); the memory at the end (``ENDED``)."""
    unit, h = tl.program_id(0), tl.program_id(1)
    g = h // R
    b, seq, start, length = locate(unit, table, T, NT, L, VARLEN)
    n = NP if FULL else N
    skip, row = start.to(tl.int64), b.to(tl.int64)
    a += row * sab + h * sah + skip * sat
    k += row * skb + g * skh + skip * skt
    s += row * ssb + g * ssh + skip * sst
    scores += ((row * G * R + h) * T + skip) * n
    slots = tl.arange(0, NP)
    cols = tl.arange(0, BD)
    there = (slots < n)[:, None] & (cols < D)
    at = unit.to(tl.int64) * G + g
    memory = tl.zeros([NP, BD], tl.float32)
    z = tl.full([NP], EMPTY, tl.float32)
    if STARTED:
        memory = tl.load(first + at * per + slots[:, None] * D + cols, mask=there, other=0.0)
        z = tl.load(zs + at * n + slots, mask=slots < n, other=EMPTY)
    for i in range(0, length, C):
        if MARKED:  # noqa: SIM102
            if h % R == 0:
                tl.store(chunk_z + (at * (L // C) + i // C) * n + slots, z, mask=slots < n)
        rows = i + tl.arange(0, C)
        inside = tl.arange(0, C) < C if EVEN else rows < length
        ok = _seen(visible, inside, b * sm + start + rows, MASKED)
        ad = tl.load(a + rows[:, None] * sat + cols, mask=inside[:, None] & (cols < D), other=0.0).to(CT)
        kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
        x = load_logits(s, sst, rows, ok, slots, n)
        past = tl.dot(ad, tl.trans(memory.to(CT)), input_precision=PREC)
        own = tl.dot(ad, tl.trans(kd), input_precision=PREC)
        out, e, w, top = score_chunk(past, own, x, z, CT, PREC)
        tl.store(scores + rows[:, None] * n + slots, out, mask=inside[:, None] & (slots < n))
        memory, z = _grown(memory, z, e, w, top, kd, PREC)
    if ENDED:  # noqa: SIM102
        if h % R == 0:
            at = seq.to(tl.int64) * G + g
            tl.store(last + at * n * D + slots[:, None] * D + cols, memory, mask=there)
            tl.store(last_z + at * n + slots, z, mask=slots < n)


@triton.jit
def mix_along(
    scores, dps, v, s, visible, first, zs, out, last, table,
    svb, svh, svt, ssb, ssh, sst, sob, soh, sot, sm, per, T, NT, G, R, N, L, scale,
    C: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    STARTED: tl.constexpr, ENDED: tl.constexpr, BACK: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """sum_n p_t[n] V~_t[n] of a segment, or with g in the place of p (``BACK``)."""
    unit, h = tl.program_id(0), tl.program_id(1)
    g = h // R
    b, seq, start, length = locate(unit, table, T, NT, L, VARLEN)
    n = NP if FULL else N
    skip, row = start.to(tl.int64), b.to(tl.int64)
    v += row * svb + g * svh + skip * svt
    s += row * ssb + g * ssh + skip * sst
    out += row * sob + h * soh + skip * sot
    side = ((row * G * R + h) * T + skip) * n
    slots = tl.arange(0, NP)
    cols = tl.arange(0, BD)
    there = (slots < n)[:, None] & (cols < D)
    at = unit.to(tl.int64) * G + g
    memory = tl.zeros([NP, BD], tl.float32)
    z = tl.full([NP], EMPTY, tl.float32)
    if STARTED:
        memory = tl.load(first + at * per + slots[:, None] * D + cols, mask=there, other=0.0)
        z = tl.load(zs + at * n + slots, mask=slots < n, other=EMPTY)
    for i in range(0, length, C):
        rows = i + tl.arange(0, C)
        inside = tl.arange(0, C) < C if EVEN else rows < length
        ok = _seen(visible, inside, b * sm + start + rows, MASKED)
        kept = inside[:, None] & (slots < n)
        vd = tl.load(v + rows[:, None] * svt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
        x = load_logits(s, sst, rows, ok, slots, n)
        y = tl.load(scores + side + rows[:, None] * n + slots, mask=kept, other=float("-inf"))
        if BACK:
            dp = tl.load(dps + side + rows[:, None] * n + slots, mask=kept, other=0.0)
            _, y = gradients(y, tl.where(y == float("-inf"), 0.0, dp), scale)
        else:
            y = soften(y * scale)
        to_past, to_own, e, w, top = mix_chunk(y, x, z, CT, PREC)
        result = tl.dot(to_past, memory.to(CT), input_precision=PREC)
        result = tl.dot(to_own, vd, result, input_precision=PREC)
        tl.store(
            out + rows[:, None] * sot + cols, result.to(out.dtype.element_ty), mask=inside[:, None] & (cols < D)
        )  # fmt: skip
        memory, z = _grown(memory, z, e, w, top, vd, PREC)
    if ENDED:  # noqa: SIM102
        if h % R == 0:
            at = seq.to(tl.int64) * G + g
            tl.store(last + at * n * D + slots[:, None] * D + cols, memory, mask=there)


@triton.jit
def sum_along(
    q, do, s, visible, scores, dps, chunk_z, sums, cs, table,
    sqb, sqh, sqt, sob, soh, sot, ssb, ssh, sst, sm, T, NT, G, R, N, L, scale,
    C: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """What a segment's queries give the keys (or values) before it, relative to z before it."""
    unit, h, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g, heads = h // R, G * R
    b, _, start, length = locate(unit, table, T, NT, L, VARLEN)
    n = NP if FULL else N
    skip, row = start.to(tl.int64), b.to(tl.int64)
    side = ((row * heads + h) * T + skip) * n
    if which == 0:
        a = q + row * sqb + h * sqh + skip * sqt
        sat = sqt
    else:
        a = do + row * sob + h * soh + skip * sot
        sat = sot
    s += row * ssb + g * ssh + skip * sst
    slots = tl.arange(0, NP)
    cols = tl.arange(0, BD)
    there = (slots < n)[:, None] & (cols < D)
    chunk_z += (unit.to(tl.int64) * G + g) * (L // C) * n
    memory = tl.zeros([NP, BD], tl.float32)
    c = tl.zeros([NP], tl.float32)
    chunks = (length + C - 1) // C
    for j in range(chunks):
        i = (chunks - 1 - j) * C
        rows = i + tl.arange(0, C)
        inside = tl.arange(0, C) < C if EVEN else rows < length
        ok = _seen(visible, inside, b * sm + start + rows, MASKED)
        kept = inside[:, None] & (slots < n)
        ad = tl.load(a + rows[:, None] * sat + cols, mask=inside[:, None] & (cols < D), other=0.0).to(CT)
        x = load_logits(s, sst, rows, ok, slots, n)
        z = tl.load(chunk_z + (i // C) * n + slots, mask=slots < n, other=EMPTY)
        score = tl.load(scores + side + rows[:, None] * n + slots, mask=kept, other=float("-inf"))
        dp = tl.load(dps + side + rows[:, None] * n + slots, mask=kept, other=0.0)
        empty = score == float("-inf")
        dp = tl.where(empty, 0.0, dp)
        p, y = gradients(score, dp, scale)
        score = tl.where(empty, 0.0, score)
        if which == 1:
            y = p
            score = dp
        to_past, _, e, w, _ = mix_chunk(y, x, z, CT, PREC)
        keep = w / tl.maximum(w + tl.sum(e.to(tl.float32), 0), LEAST)
        memory = tl.dot(tl.trans(to_past), ad, memory * keep[:, None], input_precision=PREC)
        c = c * keep + tl.sum(to_past.to(tl.float32) * score, 0)
    at = (unit.to(tl.int64) * heads + h) * 2 + which
    tl.store(sums + at * n * D + slots[:, None] * D + cols, memory, mask=there)
    tl.store(cs + at * n + slots, c, mask=slots < n)


@triton.jit
def back_along(
    q, do, k, v, s, visible, scores, dps, chunk_z, after, cs, sums, to_c, dk, dv, ds, table,
    sqb, sqh, sqt, sob, soh, sot, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sm, T, NT, G, R, N, L, scale, DS,
    C: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    STARTED: tl.constexpr, ENDED: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk and its part of ds (program 0 of the last axis) or dv and its part, for one query head, from the end.

    The sums over later queries, relative to z, are carried along.
    """
    unit, h, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g, heads = h // R, G * R
    b, _, start, length = locate(unit, table, T, NT, L, VARLEN)
    n = NP if FULL else N
    skip, row = start.to(tl.int64), b.to(tl.int64)
    side = ((row * heads + h) * T + skip) * n
    if which == 0:
        a = q + row * sqb + h * sqh + skip * sqt
        k = k + row * skb + g * skh + skip * skt
        sat = sqt
    else:
        a = do + row * sob + h * soh + skip * sot
        k = v + row * svb + g * svh + skip * svt
        dk = dv
        skt = svt
        sat = sot
    dk += ((row * heads + h) * T + skip) * D
    ds += which.to(tl.int64) * DS + side
    s += row * ssb + g * ssh + skip * sst
    slots = tl.arange(0, NP)
    cols = tl.arange(0, BD)
    there = (slots < n)[:, None] & (cols < D)
    chunk_z += (unit.to(tl.int64) * G + g) * (L // C) * n
    at = (unit.to(tl.int64) * heads + h) * 2 + which
    memory = tl.zeros([NP, BD], tl.float32)
    c = tl.zeros([NP], tl.float32)
    if STARTED:
        memory = tl.load(after + at * n * D + slots[:, None] * D + cols, mask=there, other=0.0)
        c = tl.load(cs + at * n + slots, mask=slots < n, other=0.0)
    chunks = (length + C - 1) // C
    for j in range(chunks):
        i = (chunks - 1 - j) * C
        rows = i + tl.arange(0, C)
        inside = tl.arange(0, C) < C if EVEN else rows < length
        ok = _seen(visible, inside, b * sm + start + rows, MASKED)
        kept = inside[:, None] & (slots < n)
        within = inside[:, None] & (cols < D)
        ad = tl.load(a + rows[:, None] * sat + cols, mask=within, other=0.0).to(CT)
        x = load_logits(s, sst, rows, ok, slots, n)
        z = tl.load(chunk_z + (i // C) * n + slots, mask=slots < n, other=EMPTY)
        score = tl.load(scores + side + rows[:, None] * n + slots, mask=kept, other=float("-inf"))
        dp = tl.load(dps + side + rows[:, None] * n + slots, mask=kept, other=0.0)
        empty = score == float("-inf")
        dp = tl.where(empty, 0.0, dp)
        p, y = gradients(score, dp, scale)
        score = tl.where(empty, 0.0, score)
        if which == 1:
            y = p
            score = dp
        kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
        pairs = tl.dot(kd, tl.trans(ad), input_precision=PREC)
        to_own, logits, to_past, weight, keep = back_chunk(pairs, y, score, x, z, CT, PREC)
        held = memory.to(CT)
        later = tl.dot(kd, tl.trans(held), input_precision=PREC)
        tl.store(
            ds + rows[:, None] * n + slots, (logits + weight * (later - c[None, :])).to(ds.dtype.element_ty), mask=kept
        )
        result = tl.dot(weight.to(CT), held, input_precision=PREC)
        result = tl.dot(to_own, ad, result, input_precision=PREC)
        tl.store(dk + rows[:, None] * D + cols, result.to(dk.dtype.element_ty), mask=within)
        to_past = to_past.to(CT)
        memory = tl.dot(tl.trans(to_past), ad, memory * keep[:, None], input_precision=PREC)
        c = c * keep + tl.sum(to_past.to(tl.float32) * score, 0)
    if ENDED:
        tl.store(sums + at * n * D + slots[:, None] * D + cols, memory, mask=there)
        tl.store(to_c + at * n + slots, c, mask=slots < n)
