"""Gradients of reading, chunk by chunk: dq and what each chunk hands to the keys before it, then dk, dv and ds."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels._abc_chunk import back_chunk, gradients, mix_chunk, reference_of, score_chunk, soften
from attnlab.kernels._abc_control import EMPTY, HALF_EMPTY, exp, load_logits, locate

__all__ = ["key_gradients", "query_gradients"]


@triton.jit(do_not_specialize=["T", "NT", "G", "R", "N"])
def query_gradients(
    q, k, v, s, do, visible, states, zs, own_zs, wide, dq, scores, dps, sums, cs, table,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sob, soh, sot, sdb, sdh, sdt,
    sm, T, NT, G, R, N, D, scale,
    C: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, WHOLE: tl.constexpr, SURE: tl.constexpr, WIDE: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq; dP of each query and slot; and what the chunk hands to the keys and values before it, relative to z."""
    unit, h = tl.program_id(0), tl.program_id(1)
    g_head, heads = h // R, G * R
    n = NP if FULL else N
    if WIDE and tl.load(wide + unit * G + g_head) == 0:
        return
    b, seq, start, length = locate(unit, table, T, NT, C, VARLEN)
    first, row = start.to(tl.int64), b.to(tl.int64)
    q += row * sqb + h * sqh + first * sqt
    do += row * sob + h * soh + first * sot
    dq += row * sdb + h * sdh + first * sdt
    rows = tl.arange(0, C)
    slots = tl.arange(0, NP)
    inside = rows < C if EVEN else rows < length
    ok = inside
    kept = inside[:, None] & (slots < n)
    if CAUSAL:
        at = (unit.to(tl.int64) * G + g_head) * n
        k += row * skb + g_head * skh + first * skt
        v += row * svb + g_head * svh + first * svt
        s += row * ssb + g_head * ssh + first * sst
        if MASKED:
            ok = ok & (tl.load(visible + b * sm + start + rows, mask=ok, other=0) != 0)
    else:
        at = (seq.to(tl.int64) * G + g_head) * n
    states += at * 2 * D
    z = tl.load(zs + at + slots, mask=slots < n, other=EMPTY)

    past_k = tl.zeros([C, NP], tl.float32)
    past_v = tl.zeros([C, NP], tl.float32)
    own_v = tl.zeros([C, C], tl.float32)
    for i in range(0, D, BD):
        cols = i + tl.arange(0, BD)
        real = tl.arange(0, BD) < (BD if WHOLE else D - i)
        here = inside[:, None] & real
        there = (slots < n)[:, None] & real
        dod = tl.load(do + rows[:, None] * sot + cols, mask=here, other=0.0).to(CT)
        memory_v = tl.load(states + n * D + slots[:, None] * D + cols, mask=there, other=0.0).to(CT)
        past_v = tl.dot(dod, tl.trans(memory_v), past_v, input_precision=PREC)
        if CAUSAL:
            vd = tl.load(v + rows[:, None] * svt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            own_v = tl.dot(dod, tl.trans(vd), own_v, input_precision=PREC)
        else:
            qd = tl.load(q + rows[:, None] * sqt + cols, mask=here, other=0.0).to(CT)
            memory_k = tl.load(states + slots[:, None] * D + cols, mask=there, other=0.0).to(CT)
            past_k = tl.dot(qd, tl.trans(memory_k), past_k, input_precision=PREC)

    if CAUSAL:
        x = load_logits(s, sst, rows, ok, slots, n)
        side = ((row * heads + h) * T + first) * n + rows[:, None] * n + slots
        ref = reference_of(x, z, tl.load(own_zs + at + slots, mask=slots < n, other=EMPTY), WIDE)
        dp, _ = score_chunk(past_v, own_v, x, z, ref, SURE, WIDE, CT, PREC)
        tl.store(dps + side, dp, mask=kept)
        score = tl.load(scores + side, mask=kept, other=float("-inf"))
    else:
        score = tl.where((z > HALF_EMPTY)[None, :] & inside[:, None], past_k, float("-inf"))
        dp = past_v
    if SURE:
        p, grad = gradients(score, dp, scale, True)
    else:
        empty = score == float("-inf")
        dp = tl.where(empty, 0.0, dp)
        p, grad = gradients(score, dp, scale, False)
        score = tl.where(empty, 0.0, score)
    if CAUSAL:
        grad_past, grad_own = mix_chunk(grad, x, z, ref, WIDE, CT, PREC)
        p_past, _ = mix_chunk(p, x, z, ref, WIDE, CT, PREC)
    else:
        grad_past = grad.to(CT)
        p_past = p.to(CT)

    mine = (unit.to(tl.int64) * heads + h) * 2 * n
    tl.store(cs + mine + slots, tl.sum(grad_past.to(tl.float32) * score, 0), mask=slots < n)
    tl.store(cs + mine + n + slots, tl.sum(p_past.to(tl.float32) * dp, 0), mask=slots < n)
    sums += mine * D
    to_k = tl.trans(grad_past)
    to_v = tl.trans(p_past)
    for i in range(0, D, BD):
        cols = i + tl.arange(0, BD)
        real = tl.arange(0, BD) < (BD if WHOLE else D - i)
        here = inside[:, None] & real
        there = (slots < n)[:, None] & real
        memory = tl.load(states + slots[:, None] * D + cols, mask=there, other=0.0).to(CT)
        out = tl.dot(grad_past, memory, input_precision=PREC)
        if CAUSAL:
            kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            out = tl.dot(grad_own, kd, out, input_precision=PREC)
        tl.store(dq + rows[:, None] * sdt + cols, out.to(dq.dtype.element_ty), mask=here)
        qd = tl.load(q + rows[:, None] * sqt + cols, mask=here, other=0.0).to(CT)
        out = tl.dot(to_k, qd, input_precision=PREC)
        tl.store(sums + slots[:, None] * D + cols, out.to(sums.dtype.element_ty), mask=there)
        dod = tl.load(do + rows[:, None] * sot + cols, mask=here, other=0.0).to(CT)
        out = tl.dot(to_v, dod, input_precision=PREC)
        tl.store(sums + n * D + slots[:, None] * D + cols, out.to(sums.dtype.element_ty), mask=there)


@triton.jit
def _of_keys(scores, dps, kept, scale, SURE: tl.constexpr):
    """g and S."""
    if SURE:
        score = tl.load(scores)
        _, grad = gradients(score, tl.load(dps), scale, True)
    else:
        score = tl.load(scores, mask=kept, other=float("-inf"))
        empty = score == float("-inf")
        dp = tl.where(empty, 0.0, tl.load(dps, mask=kept, other=0.0))
        _, grad = gradients(score, dp, scale, False)
        score = tl.where(empty, 0.0, score)
    return grad, score


@triton.jit
def _of_values(scores, dps, kept, scale, SURE: tl.constexpr):
    """p and dP."""
    score = tl.load(scores, mask=kept, other=float("-inf"))
    dp = tl.load(dps, mask=kept, other=0.0)
    if not SURE:
        dp = tl.where(score == float("-inf"), 0.0, dp)
    return soften(score, scale, SURE), dp


@triton.jit(do_not_specialize=["T", "NT", "G", "R", "N"])
def key_gradients(
    q, k, v, s, do, visible, zs, own_zs, wide, scores, dps, sums, cs, dk, dv, ds, table,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sob, soh, sot, sm, T, NT, G, R, N, D, scale, DS,
    C: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, WHOLE: tl.constexpr, SURE: tl.constexpr,
    WIDE: tl.constexpr, SPLIT: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk and its part of ds, or (odd programs) dv and its part, of a chunk and one query head."""
    unit, h, which = tl.program_id(0) // 2, tl.program_id(1), tl.program_id(0) % 2
    g_head, heads = h // R, G * R
    n = NP if FULL else N
    if WIDE and tl.load(wide + unit * G + g_head) == 0:
        return
    b, seq, start, length = locate(unit, table, T, NT, C, VARLEN)
    first, row = start.to(tl.int64), b.to(tl.int64)
    if which == 0:
        a = q + row * sqb + h * sqh + first * sqt
        k = k + row * skb + g_head * skh + first * skt
        sat = sqt
    else:
        a = do + row * sob + h * soh + first * sot
        k = v + row * svb + g_head * svh + first * svt
        dk = dv
        skt = svt
        sat = sot
    s += row * ssb + g_head * ssh + first * sst
    rows = tl.arange(0, C)
    slots = tl.arange(0, NP)
    inside = rows < C if EVEN else rows < length
    ok = inside
    if MASKED:
        ok = ok & (tl.load(visible + b * sm + start + rows, mask=ok, other=0) != 0)
    kept = inside[:, None] & (slots < n)
    side = ((row * heads + h) * T + first) * n + rows[:, None] * n + slots

    if CAUSAL:
        pairs = tl.zeros([C, C], tl.float32)
        for i in range(0, D, BD):
            cols = i + tl.arange(0, BD)
            real = tl.arange(0, BD) < (BD if WHOLE else D - i)
            ad = tl.load(a + rows[:, None] * sat + cols, mask=inside[:, None] & real, other=0.0).to(CT)
            kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            pairs = tl.dot(kd, tl.trans(ad), pairs, input_precision=PREC)
        # Two of the four stay in each branch; after it there are registers for no more.
        if which == 0:
            y, score = _of_keys(scores + side, dps + side, kept, scale, SURE)
        else:
            y, score = _of_values(scores + side, dps + side, kept, scale, SURE)
        x = load_logits(s, sst, rows, ok, slots, n)
        place = (unit.to(tl.int64) * G + g_head) * n + slots
        z = tl.load(zs + place, mask=slots < n, other=EMPTY)
        z_own = tl.load(own_zs + place, mask=slots < n, other=EMPTY)
        ref = reference_of(x, z, z_own, WIDE)
        to_own, logits, e = back_chunk(pairs, y, score, x, z, ref, WIDE, CT, PREC)
        # exp(s - z_end), where exp(z_end) = exp(z) + exp(z_own).
        faded = 1.0 / (exp(z - ref) + exp(z_own - ref) + 1e-30)
        weight = (e.to(tl.float32) * faded[None, :]).to(CT)
        at = ((unit.to(tl.int64) * heads + h) * 2 + which) * n
    else:
        x = load_logits(s, sst, rows, ok, slots, n)
        z = tl.load(zs + (seq.to(tl.int64) * G + g_head) * n + slots, mask=slots < n, other=EMPTY)
        e = exp(tl.minimum(x - tl.maximum(z, HALF_EMPTY)[None, :], 0.0))
        weight = e.to(CT)
        at = ((seq.to(tl.int64) * heads + h) * 2 + which) * n

    c = tl.load(cs + at + slots, mask=slots < n, other=0.0)
    after = tl.zeros([C, NP], tl.float32)
    sums += at * D
    dk += ((row * heads + h) * T + first) * D
    for i in range(0, D, BD):
        cols = i + tl.arange(0, BD)
        real = tl.arange(0, BD) < (BD if WHOLE else D - i)
        raw = tl.load(sums + slots[:, None] * D + cols, mask=(slots < n)[:, None] & real, other=0.0)
        memory = raw.to(CT)
        kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
        after = tl.dot(kd, tl.trans(memory), after, input_precision=PREC)
        if SPLIT:
            low = (raw - memory.to(tl.float32)).to(CT)
            after = tl.dot(kd, tl.trans(low), after, input_precision=PREC)
        out = tl.dot(weight, memory, input_precision=PREC)
        if CAUSAL:
            ad = tl.load(a + rows[:, None] * sat + cols, mask=inside[:, None] & real, other=0.0).to(CT)
            out = tl.dot(to_own, ad, out, input_precision=PREC)
        tl.store(dk + rows[:, None] * D + cols, out.to(dk.dtype.element_ty), mask=inside[:, None] & real)
    after -= c[None, :]
    if CAUSAL and WIDE:
        after = logits + after * (e.to(tl.float32) * faded[None, :])
    elif CAUSAL:
        after = (logits + after * faded[None, :]) * e.to(tl.float32)
    else:
        after = after * e
    tl.store(ds + which.to(tl.int64) * DS + side, after.to(ds.dtype.element_ty), mask=kept)
