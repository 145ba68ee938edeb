"""Reading the memory: out_t = V~_t^T softmax(K~_t q_t), for a chunk of queries that share the state before it."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.abc.chunk import (
    add_lows,
    mix_chunk,
    read_beside,
    reference_of,
    score_chunk,
    soften,
    solid_slots,
)
from attnlab.kernels.abc.control import (
    EMPTY,
    HALF_EMPTY,
    IS_WIDE,
    LEAST,
    LOG_HALF,
    MENDS,
    add_dot,
    chunk_masks,
    exp,
    load_logits,
    locate,
    place_of,
    within,
    zeros,
)

__all__ = ["loose_read_states", "read_states"]


@triton.jit(do_not_specialize=["T", "NT", "G", "R"])
def read_states(
    q, k, v, s, visible, states, lows, peaks, zs, ends, scores, wide, o, table,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sob, soh, sot, sm, T, NT, G, R, N, D, scale,
    C: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    EVEN: tl.constexpr, SLOTS: tl.constexpr, WHOLE: tl.constexpr, SURE: tl.constexpr,
    SAVED: tl.constexpr, FINE: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
    PAIR: tl.constexpr, GROUPED: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The output of each chunk of queries: from the state before it and, if causal, its own keys up to each query.

    EARLY asks for logits and z before the products that come first: it is long until they are there. PAIR is the width
    of heads that have keys and values in one tile, or 0. SLOTS is their number if the kernel is made for it, or 0. SURE
    says that every slot is written in every row, but those that only pad.
    """
    unit, h = place_of(G * R, GROUPED)
    g = h // R
    n = SLOTS if SLOTS else N
    if WIDE and (tl.load(wide + unit * G + g) & IS_WIDE) == 0:
        return
    b, seq, start, length = locate(unit, table, T, NT, C, VARLEN)
    if VARLEN and length == 0:
        return
    first, row = start.to(tl.int64), b.to(tl.int64)
    q += row * sqb + h * sqh + first * sqt
    o += row * sob + h * soh + first * sot
    rows, slots, inside, ok, real_slots = chunk_masks(
        length, visible, b, sm, start, n, C, NP, EVEN, SLOTS == NP, MASKED and CAUSAL
    )  # fmt: skip
    k += row * skb + g * skh + first * skt
    v += row * svb + g * svh + first * svt
    s += row * ssb + g * ssh + first * sst
    at = ((unit if CAUSAL else seq).to(tl.int64) * G + g) * n
    states += at * 2 * D
    z = tl.load(zs + at + slots, mask=real_slots, other=EMPTY)

    if CAUSAL and EARLY:
        raw_x = tl.load(s + rows[:, None] * sst + slots, mask=ok[:, None] & real_slots, other=EMPTY)
        z_end = tl.load(ends + at + slots, mask=real_slots, other=EMPTY)
        shown = real_slots
        if MASKED:
            shown = shown & (tl.load(visible + b * sm + start + 0 * slots) != 0)
        x_first = tl.load(s + slots, mask=shown, other=EMPTY).to(tl.float32)
    past = zeros(C, NP, CT)
    products = zeros(C, C, CT)
    if PAIR:
        past, products, memories, both = read_beside(
            q, sqt, states, D, k, skt, v, svt, n, rows, inside, ok, slots, real_slots, False, PAIR, CT, PREC
        )
    for i in range(0, 0 if PAIR else D, BD):
        cols = i + tl.arange(0, BD)
        real = within(cols, D, WHOLE)
        qd = tl.load(q + rows[:, None] * sqt + cols, mask=inside[:, None] & real, other=0.0).to(CT)
        memory = tl.load(states + slots[:, None] * D + cols, mask=real_slots[:, None] & real, other=0.0).to(CT)
        past = add_dot(qd, tl.trans(memory), past, PREC)
        if CAUSAL:
            kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            products = add_dot(qd, tl.trans(kd), products, PREC)

    if FINE:
        solid = solid_slots(peaks + at, z, slots, real_slots, CAUSAL)
        past = add_lows(past, q, sqt, lows + at * 2 * D, D, rows, inside, slots, solid, BD, CT, PREC)
    if CAUSAL:
        if EARLY:
            x = raw_x.to(tl.float32)
        else:
            x = load_logits(s, sst, rows, ok, slots, real_slots)
            z_end = tl.load(ends + at + slots, mask=real_slots, other=EMPTY)
        ref = reference_of(x, z, z_end, WIDE)
        score, _ = score_chunk(past, products, x, z, ref, SURE, WIDE, FINE, CT, PREC)
        if SURE and SLOTS != NP:
            score += tl.where(real_slots, 0.0, float("-inf"))[None, :]
        if not WIDE:
            # Weights only grow along the rows: the first one tells whether one reference is enough.
            if not EARLY:
                shown = real_slots
                if MASKED:
                    shown = shown & (tl.load(visible + b * sm + start + 0 * slots) != 0)
                x_first = tl.load(s + slots, mask=shown, other=EMPTY).to(tl.float32)
            small = tl.min(tl.where(real_slots, exp(x_first - ref) + exp(z - ref), 1.0), 0)
            kind = tl.where(small < LEAST, IS_WIDE, 0)
            if SAVED:
                kind += MENDS * tl.max((real_slots & (z < z_end + LOG_HALF)).to(tl.int32), 0)
            tl.store(wide + unit * G + g, kind)
        if SAVED:
            side = ((row * G * R + h) * T + first) * n + rows[:, None] * n + slots
            tl.store(scores + side, score, mask=inside[:, None] & real_slots)
        to_past, to_own = mix_chunk(soften(score, scale, SURE), x, z, ref, products, WIDE, CT, PREC)
    else:
        to_past = soften(tl.where((z > HALF_EMPTY)[None, :], past, float("-inf")), scale, False).to(CT)

    if PAIR:
        out = add_dot(to_own, both, tl.dot(to_past, memories, input_precision=PREC), PREC)
        cols = tl.arange(0, 2 * PAIR)
        place = o + rows[:, None] * sot + (cols - PAIR)
        tl.store(place, out.to(o.dtype.element_ty), mask=inside[:, None] & (cols >= PAIR))
    for i in range(0, 0 if PAIR else D, BD):
        cols = i + tl.arange(0, BD)
        real = within(cols, D, WHOLE)
        memory = tl.load(
            states + n * D + slots[:, None] * D + cols, mask=real_slots[:, None] & real, other=0.0
        ).to(CT)  # fmt: skip
        out = tl.dot(to_past, memory, input_precision=PREC)
        if CAUSAL:
            vd = tl.load(v + rows[:, None] * svt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            out = add_dot(to_own, vd, out, PREC)
        tl.store(o + rows[:, None] * sot + cols, out.to(o.dtype.element_ty), mask=inside[:, None] & real)


# See loose_key_gradients.
loose_read_states = triton.jit(do_not_specialize=["T", "NT", "G", "R", "N", "sst"])(read_states.fn)
