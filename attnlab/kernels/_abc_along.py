"""Walking along a segment with the memory in registers: fewer bytes than a state for every chunk, where it fits.

A segment is some chunks of one sequence; the state before it comes from ``write_states`` and ``scan_states``, or is
the first one. Forward in ``read_along`` and ``query_along``, backward in ``sum_along`` and ``key_along``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels._abc_chunk import fade, key_chunk, query_chunk, read_chunk
from attnlab.kernels._abc_control import EMPTY, LEAST, load_logits, locate

__all__ = ["key_along", "query_along", "read_along", "sum_along"]


@triton.jit
def _grown(memory, e, w, new, inverse, PREC: tl.constexpr):
    """The averages after a chunk: those before weigh w, the chunk's rows e, and all together 1 / inverse."""
    return tl.dot(e, new, memory * w[:, None], input_precision=PREC) * inverse[:, None]


@triton.jit
def read_along(
    q, k, v, s, visible, first_k, first_v, zs, o, last_k, last_v, last_z, table,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sob, soh, sot, sm, per, T, NT, G, R, N, L, scale,
    C: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    STARTED: tl.constexpr, ENDED: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The output of a segment's queries; if it is the whole sequence (``ENDED``), the memory at its end too."""
    unit, h = tl.program_id(0), tl.program_id(1)
    g = h // R
    b, seq, start, length = locate(unit, table, T, NT, L, VARLEN)
    n = NP if FULL else N
    first, row = start.to(tl.int64), b.to(tl.int64)
    q += row * sqb + h * sqh + first * sqt
    o += row * sob + h * soh + first * sot
    k += row * skb + g * skh + first * skt
    v += row * svb + g * svh + first * svt
    s += row * ssb + g * ssh + first * sst
    slots = tl.arange(0, NP)
    cols = tl.arange(0, BD)
    there = (slots < n)[:, None] & (cols < D)
    at = unit.to(tl.int64) * G + g
    memory_k = tl.zeros([NP, BD], tl.float32)
    memory_v = tl.zeros([NP, BD], tl.float32)
    z = tl.full([NP], EMPTY, tl.float32)
    if STARTED:
        memory_k = tl.load(first_k + at * per + slots[:, None] * D + cols, mask=there, other=0.0)
        memory_v = tl.load(first_v + at * per + slots[:, None] * D + cols, mask=there, other=0.0)
        z = tl.load(zs + at * n + slots, mask=slots < n, other=EMPTY)
    for i in range(0, length, C):
        rows = i + tl.arange(0, C)
        inside = tl.arange(0, C) < C if EVEN else rows < length
        ok = inside
        if MASKED:
            ok = ok & (tl.load(visible + b * sm + start + rows, mask=ok, other=0) != 0)
        qd = tl.load(q + rows[:, None] * sqt + cols, mask=inside[:, None] & (cols < D), other=0.0).to(CT)
        kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
        vd = tl.load(v + rows[:, None] * svt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
        x = load_logits(s, sst, rows, ok, slots, n)
        past = tl.dot(qd, tl.trans(memory_k.to(CT)), input_precision=PREC)
        own = tl.dot(qd, tl.trans(kd), input_precision=PREC)
        to_past, to_own, e, w, top = read_chunk(past, own, x, z, scale, CT, PREC)
        out = tl.dot(to_past, memory_v.to(CT), input_precision=PREC)
        out = tl.dot(to_own, vd, out, input_precision=PREC)
        tl.store(o + rows[:, None] * sot + cols, out.to(o.dtype.element_ty), mask=inside[:, None] & (cols < D))
        total = w + tl.sum(e.to(tl.float32), 0)
        inverse = 1.0 / tl.maximum(total, LEAST)
        e = tl.trans(e)
        memory_k = _grown(memory_k, e, w, kd, inverse, PREC)
        memory_v = _grown(memory_v, e, w, vd, inverse, PREC)
        z = tl.where(total > 0, top + tl.log(total), EMPTY)
    if ENDED:
        if h % R == 0:
            at = seq.to(tl.int64) * G + g
            tl.store(last_k + at * n * D + slots[:, None] * D + cols, memory_k, mask=there)
            tl.store(last_v + at * n * D + slots[:, None] * D + cols, memory_v, mask=there)
            tl.store(last_z + at * n + slots, z, mask=slots < n)


@triton.jit
def query_along(
    q, k, v, s, do, visible, first_k, first_v, zs, dq, gs, ps, us, chunk_z, table,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sob, soh, sot, sdb, sdh, sdt,
    sm, per, T, NT, G, R, N, L, scale,
    C: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    STARTED: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq of a segment; g, p and u of its queries, and z before each of its chunks, for the way back."""
    unit, h = tl.program_id(0), tl.program_id(1)
    g = h // R
    b, seq, start, length = locate(unit, table, T, NT, L, VARLEN)
    n = NP if FULL else N
    first, row = start.to(tl.int64), b.to(tl.int64)
    q += row * sqb + h * sqh + first * sqt
    do += row * sob + h * soh + first * sot
    dq += row * sdb + h * sdh + first * sdt
    k += row * skb + g * skh + first * skt
    v += row * svb + g * svh + first * svt
    s += row * ssb + g * ssh + first * sst
    side = ((row * G * R + h) * T + first) * n
    slots = tl.arange(0, NP)
    cols = tl.arange(0, BD)
    there = (slots < n)[:, None] & (cols < D)
    at = unit.to(tl.int64) * G + g
    memory_k = tl.zeros([NP, BD], tl.float32)
    memory_v = tl.zeros([NP, BD], tl.float32)
    z = tl.full([NP], EMPTY, tl.float32)
    if STARTED:
        memory_k = tl.load(first_k + at * per + slots[:, None] * D + cols, mask=there, other=0.0)
        memory_v = tl.load(first_v + at * per + slots[:, None] * D + cols, mask=there, other=0.0)
        z = tl.load(zs + at * n + slots, mask=slots < n, other=EMPTY)
    chunk_z += at * (L // C) * n
    for i in range(0, length, C):
        if h % R == 0:
            tl.store(chunk_z + (i // C) * n + slots, z, mask=slots < n)
        rows = i + tl.arange(0, C)
        inside = tl.arange(0, C) < C if EVEN else rows < length
        ok = inside
        if MASKED:
            ok = ok & (tl.load(visible + b * sm + start + rows, mask=ok, other=0) != 0)
        qd = tl.load(q + rows[:, None] * sqt + cols, mask=inside[:, None] & (cols < D), other=0.0).to(CT)
        dod = tl.load(do + rows[:, None] * sot + cols, mask=inside[:, None] & (cols < D), other=0.0).to(CT)
        kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
        vd = tl.load(v + rows[:, None] * svt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
        x = load_logits(s, sst, rows, ok, slots, n)
        held = memory_k.to(CT)
        past_k = tl.dot(qd, tl.trans(held), input_precision=PREC)
        past_v = tl.dot(dod, tl.trans(memory_v.to(CT)), input_precision=PREC)
        own_k = tl.dot(qd, tl.trans(kd), input_precision=PREC)
        own_v = tl.dot(dod, tl.trans(vd), input_precision=PREC)
        grad, p, u, grad_own, faded, e, w, top = query_chunk(
            past_k, past_v, own_k, own_v, x, z, inside, scale, CT, PREC
        )
        kept = inside[:, None] & (slots < n)
        place = side + rows[:, None] * n + slots
        tl.store(gs + place, grad.to(gs.dtype.element_ty), mask=kept)
        tl.store(ps + place, p.to(ps.dtype.element_ty), mask=kept)
        tl.store(us + place, u.to(us.dtype.element_ty), mask=kept)
        out = tl.dot((grad * faded).to(CT), held, input_precision=PREC)
        out = tl.dot(grad_own, kd, out, input_precision=PREC)
        tl.store(dq + rows[:, None] * sdt + cols, out.to(dq.dtype.element_ty), mask=inside[:, None] & (cols < D))
        total = w + tl.sum(e.to(tl.float32), 0)
        inverse = 1.0 / tl.maximum(total, LEAST)
        e = tl.trans(e)
        memory_k = _grown(memory_k, e, w, kd, inverse, PREC)
        memory_v = _grown(memory_v, e, w, vd, inverse, PREC)
        z = tl.where(total > 0, top + tl.log(total), EMPTY)


@triton.jit
def sum_along(
    q, s, do, visible, gs, ps, us, chunk_z, sums, cs, table,
    sqb, sqh, sqt, ssb, ssh, sst, sob, soh, sot, sm, T, NT, G, R, N, L,
    C: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """What a segment's queries give to tokens before it, relative to z before it."""
    unit, h, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g, heads = h // R, G * R
    b, seq, start, length = locate(unit, table, T, NT, L, VARLEN)
    n = NP if FULL else N
    first, row = start.to(tl.int64), b.to(tl.int64)
    q += row * sqb + h * sqh + first * sqt
    do += row * sob + h * soh + first * sot
    s += row * ssb + g * ssh + first * sst
    side = ((row * heads + h) * T + first) * n
    slots = tl.arange(0, NP)
    cols = tile * BD + tl.arange(0, BD)
    there = (slots < n)[:, None] & (cols < D)
    chunk_z += (unit.to(tl.int64) * G + g) * (L // C) * n
    sum_k = tl.zeros([NP, BD], tl.float32)
    sum_v = tl.zeros([NP, BD], tl.float32)
    c = tl.zeros([NP], tl.float32)
    chunks = (length + C - 1) // C
    for j in range(0, chunks):
        i = (chunks - 1 - j) * C
        rows = i + tl.arange(0, C)
        inside = tl.arange(0, C) < C if EVEN else rows < length
        ok = inside
        if MASKED:
            ok = ok & (tl.load(visible + b * sm + start + rows, mask=ok, other=0) != 0)
        x = load_logits(s, sst, rows, ok, slots, n)
        z = tl.load(chunk_z + (i // C) * n + slots, mask=slots < n, other=EMPTY)
        kept = inside[:, None] & (slots < n)
        place = side + rows[:, None] * n + slots
        grad = tl.load(gs + place, mask=kept, other=0.0).to(tl.float32)
        p = tl.load(ps + place, mask=kept, other=0.0).to(tl.float32)
        u = tl.load(us + place, mask=kept, other=0.0).to(tl.float32)
        qd = tl.load(q + rows[:, None] * sqt + cols, mask=inside[:, None] & (cols < D), other=0.0).to(CT)
        dod = tl.load(do + rows[:, None] * sot + cols, mask=inside[:, None] & (cols < D), other=0.0).to(CT)
        faded, keep = fade(x, z, CT, PREC)
        sum_k = tl.dot(tl.trans((grad * faded).to(CT)), qd, sum_k * keep[:, None], input_precision=PREC)
        sum_v = tl.dot(tl.trans((p * faded).to(CT)), dod, sum_v * keep[:, None], input_precision=PREC)
        c = c * keep + tl.sum(u * faded, 0)
    at = (unit.to(tl.int64) * heads + h) * n
    out = sums + at * 2 * D + slots[:, None] * D + cols
    tl.store(out, sum_k.to(sums.dtype.element_ty), mask=there)
    tl.store(out + n * D, sum_v.to(sums.dtype.element_ty), mask=there)
    if tile == 0:
        tl.store(cs + at + slots, c, mask=slots < n)


@triton.jit
def key_along(
    q, k, v, s, do, visible, gs, ps, us, chunk_z, after_k, after_v, after_c, dk, dv, ds, to_k, to_v, to_c, table,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sob, soh, sot, sm, per, T, NT, G, R, N, L,
    C: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    STARTED: tl.constexpr, ENDED: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk, dv and ds of a segment for one query head, from its last chunk to its first."""
    unit, h = tl.program_id(0), tl.program_id(1)
    g, heads = h // R, G * R
    b, seq, start, length = locate(unit, table, T, NT, L, VARLEN)
    n = NP if FULL else N
    first, row = start.to(tl.int64), b.to(tl.int64)
    q += row * sqb + h * sqh + first * sqt
    do += row * sob + h * soh + first * sot
    k += row * skb + g * skh + first * skt
    v += row * svb + g * svh + first * svt
    s += row * ssb + g * ssh + first * sst
    side = ((row * heads + h) * T + first) * n
    mine = ((row * heads + h) * T + first) * D
    slots = tl.arange(0, NP)
    cols = tl.arange(0, BD)
    there = (slots < n)[:, None] & (cols < D)
    chunk_z += (unit.to(tl.int64) * G + g) * (L // C) * n
    at = unit.to(tl.int64) * heads + h
    sum_k = tl.zeros([NP, BD], tl.float32)
    sum_v = tl.zeros([NP, BD], tl.float32)
    c = tl.zeros([NP], tl.float32)
    if STARTED:
        sum_k = tl.load(after_k + at * per + slots[:, None] * D + cols, mask=there, other=0.0).to(tl.float32)
        sum_v = tl.load(after_v + at * per + slots[:, None] * D + cols, mask=there, other=0.0).to(tl.float32)
        c = tl.load(after_c + at * n + slots, mask=slots < n, other=0.0)
    chunks = (length + C - 1) // C
    for j in range(0, chunks):
        i = (chunks - 1 - j) * C
        rows = i + tl.arange(0, C)
        inside = tl.arange(0, C) < C if EVEN else rows < length
        ok = inside
        if MASKED:
            ok = ok & (tl.load(visible + b * sm + start + rows, mask=ok, other=0) != 0)
        within = inside[:, None] & (cols < D)
        qd = tl.load(q + rows[:, None] * sqt + cols, mask=within, other=0.0).to(CT)
        kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
        dod = tl.load(do + rows[:, None] * sot + cols, mask=within, other=0.0).to(CT)
        vd = tl.load(v + rows[:, None] * svt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
        x = load_logits(s, sst, rows, ok, slots, n)
        z = tl.load(chunk_z + (i // C) * n + slots, mask=slots < n, other=EMPTY)
        kept = inside[:, None] & (slots < n)
        place = side + rows[:, None] * n + slots
        grad = tl.load(gs + place, mask=kept, other=0.0).to(tl.float32)
        p = tl.load(ps + place, mask=kept, other=0.0).to(tl.float32)
        u = tl.load(us + place, mask=kept, other=0.0).to(tl.float32)
        from_k = tl.dot(kd, tl.trans(qd), input_precision=PREC)
        from_v = tl.dot(vd, tl.trans(dod), input_precision=PREC)
        own_k, own_v, logits, weight, faded, keep = key_chunk(from_k, from_v, x, z, grad, p, u, CT, PREC)
        held_k = sum_k.to(CT)
        held_v = sum_v.to(CT)
        after = tl.dot(kd, tl.trans(held_k), input_precision=PREC)
        after = tl.dot(vd, tl.trans(held_v), after, input_precision=PREC)
        tl.store(ds + place, (logits + weight * (after - c[None, :])).to(ds.dtype.element_ty), mask=kept)
        weight = weight.to(CT)
        out = tl.dot(weight, held_k, input_precision=PREC)
        out = tl.dot(own_k, qd, out, input_precision=PREC)
        tl.store(dk + mine + rows[:, None] * D + cols, out.to(dk.dtype.element_ty), mask=within)
        out = tl.dot(weight, held_v, input_precision=PREC)
        out = tl.dot(own_v, dod, out, input_precision=PREC)
        tl.store(dv + mine + rows[:, None] * D + cols, out.to(dv.dtype.element_ty), mask=within)
        sum_k = tl.dot(tl.trans((grad * faded).to(CT)), qd, sum_k * keep[:, None], input_precision=PREC)
        sum_v = tl.dot(tl.trans((p * faded).to(CT)), dod, sum_v * keep[:, None], input_precision=PREC)
        c = c * keep + tl.sum(u * faded, 0)
    if ENDED:
        at = seq.to(tl.int64) * heads + h
        tl.store(to_k + at * n * D + slots[:, None] * D + cols, sum_k, mask=there)
        tl.store(to_v + at * n * D + slots[:, None] * D + cols, sum_v, mask=there)
        tl.store(to_c + at * n + slots, c, mask=slots < n)
