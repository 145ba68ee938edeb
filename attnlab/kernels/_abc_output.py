"""Reading the memory: out_t = V~_t^T softmax(K~_t q_t), for a chunk of queries that share the state before it."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels._abc_chunk import mix_chunk, reference_of, score_chunk, soften
from attnlab.kernels._abc_control import EMPTY, HALF_EMPTY, LEAST, load_logits, locate

__all__ = ["read_states"]


@triton.jit(do_not_specialize=["T", "NT", "G", "R", "N"])
def read_states(
    q, k, v, s, visible, states, zs, own_zs, scores, wide, o, table,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sob, soh, sot, sm, T, NT, G, R, N, D, scale,
    C: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, WHOLE: tl.constexpr, SURE: tl.constexpr,
    SAVED: tl.constexpr, WIDE: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The output of each chunk of queries: from the state before it and, if causal, its own keys up to each query."""
    unit, h = tl.program_id(0), tl.program_id(1)
    g = h // R
    n = NP if FULL else N
    if WIDE and tl.load(wide + unit * G + g) == 0:
        return
    b, seq, start, length = locate(unit, table, T, NT, C, VARLEN)
    first, row = start.to(tl.int64), b.to(tl.int64)
    q += row * sqb + h * sqh + first * sqt
    o += row * sob + h * soh + first * sot
    rows = tl.arange(0, C)
    slots = tl.arange(0, NP)
    inside = rows < C if EVEN else rows < length
    ok = inside
    if CAUSAL:
        at = (unit.to(tl.int64) * G + g) * n
        k += row * skb + g * skh + first * skt
        v += row * svb + g * svh + first * svt
        s += row * ssb + g * ssh + first * sst
        if MASKED:
            ok = ok & (tl.load(visible + b * sm + start + rows, mask=ok, other=0) != 0)
    else:
        at = (seq.to(tl.int64) * G + g) * n
    states += at * 2 * D
    z = tl.load(zs + at + slots, mask=slots < n, other=EMPTY)

    past = tl.zeros([C, NP], tl.float32)
    products = tl.zeros([C, C], tl.float32)
    for i in range(0, D, BD):
        cols = i + tl.arange(0, BD)
        real = tl.arange(0, BD) < (BD if WHOLE else D - i)
        qd = tl.load(q + rows[:, None] * sqt + cols, mask=inside[:, None] & real, other=0.0).to(CT)
        memory = tl.load(
            states + slots[:, None] * D + cols, mask=(slots < n)[:, None] & real, other=0.0
        ).to(CT)  # fmt: skip
        past = tl.dot(qd, tl.trans(memory), past, input_precision=PREC)
        if CAUSAL:
            kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            products = tl.dot(qd, tl.trans(kd), products, input_precision=PREC)

    if CAUSAL:
        x = load_logits(s, sst, rows, ok, slots, n)
        z_own = tl.load(own_zs + at + slots, mask=slots < n, other=EMPTY)
        ref = reference_of(x, z, z_own, WIDE)
        score, total = score_chunk(past, products, x, z, ref, SURE, WIDE, CT, PREC)
        if not WIDE:
            small = tl.min(tl.where(inside[:, None] & (slots < n), total, 1.0))
            tl.store(wide + unit * G + g, (small < LEAST).to(tl.int32))
        if SAVED:
            side = ((row * G * R + h) * T + first) * n + rows[:, None] * n + slots
            tl.store(scores + side, score, mask=inside[:, None] & (slots < n))
        to_past, to_own = mix_chunk(soften(score, scale, SURE), x, z, ref, WIDE, CT, PREC)
    else:
        to_past = soften(tl.where((z > HALF_EMPTY)[None, :], past, float("-inf")), scale, False).to(CT)

    for i in range(0, D, BD):
        cols = i + tl.arange(0, BD)
        real = tl.arange(0, BD) < (BD if WHOLE else D - i)
        memory = tl.load(
            states + n * D + slots[:, None] * D + cols, mask=(slots < n)[:, None] & real, other=0.0
        ).to(CT)  # fmt: skip
        out = tl.dot(to_past, memory, input_precision=PREC)
        if CAUSAL:
            vd = tl.load(v + rows[:, None] * svt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            out = tl.dot(to_own, vd, out, input_precision=PREC)
        tl.store(o + rows[:, None] * sot + cols, out.to(o.dtype.element_ty), mask=inside[:, None] & real)
