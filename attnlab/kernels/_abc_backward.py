"""Gradients of reading, chunk by chunk: dq and what each chunk hands to the keys before it, then dk, dv and ds."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels._abc_chunk import back_chunk, gradients, mix_chunk, score_chunk
from attnlab.kernels._abc_control import HALF_EMPTY, load_logits, locate

__all__ = ["key_gradients", "query_gradients"]


@triton.jit
def query_gradients(
    q, k, v, s, do, visible, states, zs, dq, scores, dps, sums, cs, table,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sob, soh, sot, sdb, sdh, sdt,
    sm, T, NT, G, R, N, scale,
    C: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq; S and dP of each query and slot; and what the chunk hands to the keys and values before it."""
    unit, h = tl.program_id(0), tl.program_id(1)
    g_head, heads = h // R, G * R
    b, seq, start, length = locate(unit, table, T, NT, C, VARLEN)
    first, row = start.to(tl.int64), b.to(tl.int64)
    q += row * sqb + h * sqh + first * sqt
    do += row * sob + h * soh + first * sot
    dq += row * sdb + h * sdh + first * sdt
    rows = tl.arange(0, C)
    slots = tl.arange(0, NP)
    inside = rows < length
    ok = inside
    if CAUSAL:
        at = (unit.to(tl.int64) * G + g_head) * N
        k += row * skb + g_head * skh + first * skt
        v += row * svb + g_head * svh + first * svt
        s += row * ssb + g_head * ssh + first * sst
        if MASKED:
            ok = ok & (tl.load(visible + b * sm + start + rows, mask=ok, other=0) != 0)
    else:
        at = (seq.to(tl.int64) * G + g_head) * N
    states += at * 2 * D
    z = tl.load(zs + at + slots, mask=slots < N, other=-1e30)

    past_k = tl.zeros([C, NP], tl.float32)
    past_v = tl.zeros([C, NP], tl.float32)
    own_k = tl.zeros([C, C], tl.float32)
    own_v = tl.zeros([C, C], tl.float32)
    for i in range(0, D, BD):
        cols = i + tl.arange(0, BD)
        here = inside[:, None] & (cols < D)
        there = (slots < N)[:, None] & (cols < D)
        qd = tl.load(q + rows[:, None] * sqt + cols, mask=here, other=0.0).to(CT)
        dod = tl.load(do + rows[:, None] * sot + cols, mask=here, other=0.0).to(CT)
        memory = tl.load(states + slots[:, None] * D + cols, mask=there, other=0.0).to(CT)
        past_k = tl.dot(qd, tl.trans(memory), past_k, input_precision=PREC)
        memory = tl.load(states + N * D + slots[:, None] * D + cols, mask=there, other=0.0).to(CT)
        past_v = tl.dot(dod, tl.trans(memory), past_v, input_precision=PREC)
        if CAUSAL:
            kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
            vd = tl.load(v + rows[:, None] * svt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
            own_k = tl.dot(qd, tl.trans(kd), own_k, input_precision=PREC)
            own_v = tl.dot(dod, tl.trans(vd), own_v, input_precision=PREC)

    if CAUSAL:
        x = load_logits(s, sst, rows, ok, slots, N)
        score, _, _, _ = score_chunk(past_k, own_k, x, z, CT, PREC)
        dp, _, _, _ = score_chunk(past_v, own_v, x, z, CT, PREC)
        score = tl.where(inside[:, None], score, float("-inf"))
        side = ((row * heads + h) * T + first) * N + rows[:, None] * N + slots
        kept = inside[:, None] & (slots < N)
        tl.store(scores + side, score, mask=kept)
        tl.store(dps + side, dp, mask=kept)
    else:
        score = tl.where((z > HALF_EMPTY)[None, :] & inside[:, None], past_k, float("-inf"))
        dp = past_v
    empty = score == float("-inf")
    dp = tl.where(empty, 0.0, dp)
    p, grad = gradients(score, dp, scale)
    score = tl.where(empty, 0.0, score)
    if CAUSAL:
        grad_past, grad_own, _, _, _ = mix_chunk(grad, x, z, CT, PREC)
        p_past, _, _, _, _ = mix_chunk(p, x, z, CT, PREC)
    else:
        grad_past = grad.to(CT)
        p_past = p.to(CT)

    mine = (unit.to(tl.int64) * heads + h) * 2 * N
    tl.store(cs + mine + slots, tl.sum(grad_past.to(tl.float32) * score, 0), mask=slots < N)
    tl.store(cs + mine + N + slots, tl.sum(p_past.to(tl.float32) * dp, 0), mask=slots < N)
    sums += mine * D
    for i in range(0, D, BD):
        cols = i + tl.arange(0, BD)
        here = inside[:, None] & (cols < D)
        there = (slots < N)[:, None] & (cols < D)
        memory = tl.load(states + slots[:, None] * D + cols, mask=there, other=0.0).to(CT)
        out = tl.dot(grad_past, memory, input_precision=PREC)
        if CAUSAL:
            kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
            out = tl.dot(grad_own, kd, out, input_precision=PREC)
        tl.store(dq + rows[:, None] * sdt + cols, out.to(dq.dtype.element_ty), mask=here)
        qd = tl.load(q + rows[:, None] * sqt + cols, mask=here, other=0.0).to(CT)
        dod = tl.load(do + rows[:, None] * sot + cols, mask=here, other=0.0).to(CT)
        to_k = tl.dot(tl.trans(grad_past), qd, input_precision=PREC)
        to_v = tl.dot(tl.trans(p_past), dod, input_precision=PREC)
        tl.store(sums + slots[:, None] * D + cols, to_k.to(sums.dtype.element_ty), mask=there)
        tl.store(sums + N * D + slots[:, None] * D + cols, to_v.to(sums.dtype.element_ty), mask=there)


@triton.jit
def key_gradients(
    q, k, v, s, do, visible, zs, scores, dps, sums, cs, dk, dv, ds, table,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sob, soh, sot, sm, T, NT, G, R, N, scale,
    C: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk, dv and ds of a chunk for one query head: from all queries after it, and from its own."""
    unit, h = tl.program_id(0), tl.program_id(1)
    g_head, heads = h // R, G * R
    b, seq, start, length = locate(unit, table, T, NT, C, VARLEN)
    first, row = start.to(tl.int64), b.to(tl.int64)
    k += row * skb + g_head * skh + first * skt
    v += row * svb + g_head * svh + first * svt
    s += row * ssb + g_head * ssh + first * sst
    rows = tl.arange(0, C)
    slots = tl.arange(0, NP)
    inside = rows < length
    ok = inside
    if MASKED:
        ok = ok & (tl.load(visible + b * sm + start + rows, mask=ok, other=0) != 0)
    x = load_logits(s, sst, rows, ok, slots, N)
    side = ((row * heads + h) * T + first) * N + rows[:, None] * N + slots
    kept = inside[:, None] & (slots < N)

    if CAUSAL:
        q += row * sqb + h * sqh + first * sqt
        do += row * sob + h * soh + first * sot
        from_k = tl.zeros([C, C], tl.float32)
        from_v = tl.zeros([C, C], tl.float32)
        for i in range(0, D, BD):
            cols = i + tl.arange(0, BD)
            qd = tl.load(q + rows[:, None] * sqt + cols, mask=inside[:, None] & (cols < D), other=0.0).to(CT)
            kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
            from_k = tl.dot(kd, tl.trans(qd), from_k, input_precision=PREC)
            dod = tl.load(do + rows[:, None] * sot + cols, mask=inside[:, None] & (cols < D), other=0.0).to(CT)
            vd = tl.load(v + rows[:, None] * svt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
            from_v = tl.dot(vd, tl.trans(dod), from_v, input_precision=PREC)
        z = tl.load(zs + (unit.to(tl.int64) * G + g_head) * N + slots, mask=slots < N, other=-1e30)
        score = tl.load(scores + side, mask=kept, other=float("-inf"))
        dp = tl.load(dps + side, mask=kept, other=0.0)
        empty = score == float("-inf")
        dp = tl.where(empty, 0.0, dp)
        p, grad = gradients(score, dp, scale)
        to_k, logits, _, weight, _ = back_chunk(from_k, grad, tl.where(empty, 0.0, score), x, z, CT, PREC)
        to_v, more, _, _, _ = back_chunk(from_v, p, dp, x, z, CT, PREC)
        logits += more
        at = (unit.to(tl.int64) * heads + h) * 2 * N
    else:
        z = tl.load(zs + (seq.to(tl.int64) * G + g_head) * N + slots, mask=slots < N, other=-1e30)
        weight = tl.exp(tl.minimum(x - tl.maximum(z, HALF_EMPTY)[None, :], 0.0))
        at = (seq.to(tl.int64) * heads + h) * 2 * N

    c = tl.load(cs + at + slots, mask=slots < N, other=0.0)
    c += tl.load(cs + at + N + slots, mask=slots < N, other=0.0)
    after = tl.zeros([C, NP], tl.float32)
    sums += at * D
    weight_c = weight.to(CT)
    out = ((row * heads + h) * T + first) * D + rows[:, None] * D
    for i in range(0, D, BD):
        cols = i + tl.arange(0, BD)
        here = ok[:, None] & (cols < D)
        there = (slots < N)[:, None] & (cols < D)
        memory = tl.load(sums + slots[:, None] * D + cols, mask=there, other=0.0).to(CT)
        kd = tl.load(k + rows[:, None] * skt + cols, mask=here, other=0.0).to(CT)
        after = tl.dot(kd, tl.trans(memory), after, input_precision=PREC)
        grad_k = tl.dot(weight_c, memory, input_precision=PREC)
        if CAUSAL:
            qd = tl.load(q + rows[:, None] * sqt + cols, mask=inside[:, None] & (cols < D), other=0.0).to(CT)
            grad_k = tl.dot(to_k, qd, grad_k, input_precision=PREC)
        tl.store(dk + out + cols, grad_k.to(dk.dtype.element_ty), mask=inside[:, None] & (cols < D))
        memory = tl.load(sums + N * D + slots[:, None] * D + cols, mask=there, other=0.0).to(CT)
        vd = tl.load(v + rows[:, None] * svt + cols, mask=here, other=0.0).to(CT)
        after = tl.dot(vd, tl.trans(memory), after, input_precision=PREC)
        grad_v = tl.dot(weight_c, memory, input_precision=PREC)
        if CAUSAL:
            dod = tl.load(do + rows[:, None] * sot + cols, mask=inside[:, None] & (cols < D), other=0.0).to(CT)
            grad_v = tl.dot(to_v, dod, grad_v, input_precision=PREC)
        tl.store(dv + out + cols, grad_v.to(dv.dtype.element_ty), mask=inside[:, None] & (cols < D))
    result = weight * (after - c[None, :])
    if CAUSAL:
        result += logits
    tl.store(ds + side, result.to(ds.dtype.element_ty), mask=kept)
