"""Reading the memory: out_t = V~_t^T softmax(K~_t q_t), for a chunk of queries that share the state before it."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels._abc_chunk import mix_chunk, score_chunk, soften
from attnlab.kernels._abc_control import HALF_EMPTY, load_logits, locate

__all__ = ["read_states"]


@triton.jit
def read_states(
    q, k, v, s, visible, states, zs, o, table,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sob, soh, sot, sm, T, NT, G, R, N, scale,
    C: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The output of each chunk of queries: from the state before it and, if causal, its own keys up to each query."""
    unit, h = tl.program_id(0), tl.program_id(1)
    g = h // R
    b, seq, start, length = locate(unit, table, T, NT, C, VARLEN)
    first, row = start.to(tl.int64), b.to(tl.int64)
    q += row * sqb + h * sqh + first * sqt
    o += row * sob + h * soh + first * sot
    rows = tl.arange(0, C)
    slots = tl.arange(0, NP)
    inside = rows < length
    ok = inside
    if CAUSAL:
        at = (unit.to(tl.int64) * G + g) * N
        k += row * skb + g * skh + first * skt
        v += row * svb + g * svh + first * svt
        s += row * ssb + g * ssh + first * sst
        if MASKED:
            ok = ok & (tl.load(visible + b * sm + start + rows, mask=ok, other=0) != 0)
    else:
        at = (seq.to(tl.int64) * G + g) * N
    states += at * 2 * D
    z = tl.load(zs + at + slots, mask=slots < N, other=-1e30)

    past = tl.zeros([C, NP], tl.float32)
    products = tl.zeros([C, C], tl.float32)
    for i in range(0, D, BD):
        cols = i + tl.arange(0, BD)
        qd = tl.load(q + rows[:, None] * sqt + cols, mask=inside[:, None] & (cols < D), other=0.0).to(CT)
        memory = tl.load(
            states + slots[:, None] * D + cols, mask=(slots < N)[:, None] & (cols < D), other=0.0
        ).to(CT)  # fmt: skip
        past = tl.dot(qd, tl.trans(memory), past, input_precision=PREC)
        if CAUSAL:
            kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
            products = tl.dot(qd, tl.trans(kd), products, input_precision=PREC)

    if CAUSAL:
        x = load_logits(s, sst, rows, ok, slots, N)
        scores, _, _, _ = score_chunk(past, products, x, z, CT, PREC)
        to_past, to_own, _, _, _ = mix_chunk(soften(scores * scale), x, z, CT, PREC)
    else:
        to_past = soften(tl.where((z > HALF_EMPTY)[None, :], past * scale, float("-inf"))).to(CT)

    for i in range(0, D, BD):
        cols = i + tl.arange(0, BD)
        memory = tl.load(
            states + N * D + slots[:, None] * D + cols, mask=(slots < N)[:, None] & (cols < D), other=0.0
        ).to(CT)  # fmt: skip
        out = tl.dot(to_past, memory, input_precision=PREC)
        if CAUSAL:
            vd = tl.load(v + rows[:, None] * svt + cols, mask=ok[:, None] & (cols < D), other=0.0).to(CT)
            out = tl.dot(to_own, vd, out, input_precision=PREC)
        tl.store(o + rows[:, None] * sot + cols, out.to(o.dtype.element_ty), mask=inside[:, None] & (cols < D))
