"""Gradients of reading, chunk by chunk: dq and each query's shares of its slots; then dk, dv and ds."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.abc.chunk import (
    add_lows,
    against,
    back_chunk,
    beside,
    dot_parts,
    gradients,
    half_row,
    mix_chunk,
    read_beside,
    reference_of,
    rest_of,
    score_chunk,
    soften,
    solid_slots,
)
from attnlab.kernels.abc.control import (
    EMPTY,
    HALF_EMPTY,
    IS_WIDE,
    add_dot,
    chunk_masks,
    exp,
    in_full,
    inverse,
    load_logits,
    locate,
    place_of,
    rounded,
    within,
    zeros,
)

__all__ = ["key_gradients", "loose_key_gradients", "loose_query_gradients", "query_gradients"]


@triton.jit(do_not_specialize=["T", "NT", "G", "R"])
def query_gradients(
    q, k, v, s, do, visible, states, lows, peaks, zs, ends, wide, dq, scores, shares, rests, wide_cs, table,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sob, soh, sot, sdb, sdh, sdt,
    SHARE, sm, T, NT, G, R, N, D, scale,
    C: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    EVEN: tl.constexpr, SLOTS: tl.constexpr, WHOLE: tl.constexpr, SURE: tl.constexpr, FINE: tl.constexpr,
    WIDE: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
    EARLY: tl.constexpr, PAIR: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """dq, the shares g / weight and p / weight of each query and slot, and what is left of share S + share dP.

    They are relative to z after the chunk; of a wide chunk, shares are relative to z before it, and dP stands for the
    rest. EARLY asks for logits first (1), and for scores before logits are needed (2) or first of all (4). The other
    constants are those of ``read_states``.
    """
    heads = G * R
    unit, h = place_of(heads, GROUPED)
    g_head = h // R
    n = SLOTS if SLOTS else N
    if WIDE and (tl.load(wide + unit * G + g_head) & IS_WIDE) == 0:
        return
    b, seq, start, length = locate(unit, table, T, NT, C, VARLEN)
    if VARLEN and length == 0:
        return
    first, row = start.to(tl.int64), b.to(tl.int64)
    q += row * sqb + h * sqh + first * sqt
    do += row * sob + h * soh + first * sot
    dq += row * sdb + h * sdh + first * sdt
    rows, slots, inside, ok, real_slots = chunk_masks(
        length, visible, b, sm, start, n, C, NP, EVEN, SLOTS == NP, MASKED and CAUSAL
    )  # fmt: skip
    kept = inside[:, None] & real_slots
    k += row * skb + g_head * skh + first * skt
    v += row * svb + g_head * svh + first * svt
    s += row * ssb + g_head * ssh + first * sst
    at = ((unit if CAUSAL else seq).to(tl.int64) * G + g_head) * n
    states += at * 2 * D
    z = tl.load(zs + at + slots, mask=real_slots, other=EMPTY)

    side = ((row * heads + h) * T + first) * n
    spot = rows[:, None] * n + slots
    if EARLY & 1:
        raw_x = tl.load(s + rows[:, None] * sst + slots, mask=ok[:, None] & real_slots, other=EMPTY)
        z_end = tl.load(ends + at + slots, mask=real_slots, other=EMPTY)
    if EARLY & 4:
        raw_score = tl.load(scores + side + spot, mask=kept, other=float("-inf"))
    past_k = zeros(C, NP, CT)
    past_v = past_k
    own_v = zeros(C, C, CT)
    if PAIR:
        past_v, own_v, memories, both = read_beside(
            do, sot, states, D, k, skt, v, svt, n, rows, inside, ok, slots, real_slots, True, PAIR, CT, PREC
        )
    for i in range(0, 0 if PAIR else D, BD):
        cols = i + tl.arange(0, BD)
        real = within(cols, D, WHOLE)
        here = inside[:, None] & real
        there = real_slots[:, None] & real
        dod = tl.load(do + rows[:, None] * sot + cols, mask=here, other=0.0).to(CT)
        place = slots[:, None] * D + cols
        memory_v = tl.load(states + n * D + place, mask=there, other=0.0).to(CT)
        past_v = add_dot(dod, tl.trans(memory_v), past_v, PREC)
        if CAUSAL:
            vd = tl.load(v + rows[:, None] * svt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            own_v = add_dot(dod, tl.trans(vd), own_v, PREC)
        else:
            qd = tl.load(q + rows[:, None] * sqt + cols, mask=here, other=0.0).to(CT)
            memory_k = tl.load(states + place, mask=there, other=0.0).to(CT)
            past_k = add_dot(qd, tl.trans(memory_k), past_k, PREC)

    if FINE:
        solid = solid_slots(peaks + at, z, slots, real_slots, CAUSAL)
        lows += at * 2 * D
        past_v = add_lows(past_v, do, sot, lows + n * D, D, rows, inside, slots, solid, BD, CT, PREC)
        if not CAUSAL:
            past_k = add_lows(past_k, q, sqt, lows, D, rows, inside, slots, solid, BD, CT, PREC)
    if CAUSAL:
        if EARLY & 1:
            x = raw_x.to(tl.float32)
        else:
            x = load_logits(s, sst, rows, ok, slots, real_slots)
            z_end = tl.load(ends + at + slots, mask=real_slots, other=EMPTY)
        if EARLY & 2:
            raw_score = tl.load(scores + side + spot, mask=kept, other=float("-inf"))
        ref = reference_of(x, z, z_end, WIDE)
        dp, total = score_chunk(past_v, own_v, x, z, ref, SURE, WIDE, FINE, CT, PREC)
        if EARLY & 6 == 0:
            tl.debug_barrier()
            raw_score = tl.load(scores + side + spot, mask=kept, other=float("-inf"))
        # Always so: it makes the scores lie in the registers as the product does, and the softmax with them.
        score = tl.where(total >= 0, raw_score, float("-inf"))
    else:
        score = tl.where((z > HALF_EMPTY)[None, :] & inside[:, None], past_k, float("-inf"))
        dp = past_v
    if not SURE:
        empty = score == float("-inf")
        dp = tl.where(empty, 0.0, dp)
    p = soften(score, scale, SURE)
    if not SURE:
        score = tl.where(empty, 0.0, score)
    middle = tl.sum(p * dp, 1)[:, None]
    if CAUSAL and not WIDE:
        p = p * inverse(total)
        p_share = rounded(p, CT)
        grad = p * ((dp - middle) * scale)
        share = rounded(grad, CT)
        if NP <= 64:
            grad_past = (grad * exp(z - ref)[None, :]).to(CT)
        _store_shares(shares + side + spot, share, p_share, SHARE, kept)
        taken = in_full(share, CT) * score + in_full(p_share, CT) * dp
        if NP > 64:
            # There are no registers to keep what was not rounded.
            grad_past = (in_full(share, CT) * exp(z - ref)[None, :]).to(CT)
        grad_own = tl.dot(share, tl.trans(exp(x - ref[None, :]).to(CT)), input_precision=PREC)
        tl.store(rests + side + spot, rest_of(taken, grad_own, CT, PREC), mask=kept)
        grad_own = tl.where(rows[:, None] >= rows, grad_own, 0.0).to(CT)
    else:
        grad = p * ((dp - middle) * scale)
        if CAUSAL:
            grad_past, grad_own = mix_chunk(grad, x, z, ref, own_v, WIDE, CT, PREC)
            p_share, _ = mix_chunk(p, x, z, ref, own_v, WIDE, CT, PREC)
            tl.store(rests + side + spot, dp, mask=kept)
        else:
            grad_past = grad.to(CT)
            p_share = p.to(CT)
        share = grad_past
        c = tl.sum(in_full(share, CT) * score + in_full(p_share, CT) * dp, 0)
        tl.store(wide_cs + (unit.to(tl.int64) * heads + h) * n + slots, c, mask=real_slots)
        _store_shares(shares + side + spot, share, p_share, SHARE, kept)

    if PAIR:
        out = add_dot(grad_own, both, tl.dot(grad_past, memories, input_precision=PREC), PREC)
        cols = tl.arange(0, 2 * PAIR)
        tl.store(dq + rows[:, None] * sdt + cols, out.to(dq.dtype.element_ty), mask=inside[:, None] & (cols < PAIR))
    for i in range(0, 0 if PAIR else D, BD):
        cols = i + tl.arange(0, BD)
        real = within(cols, D, WHOLE)
        there = real_slots[:, None] & real
        memory = tl.load(states + slots[:, None] * D + cols, mask=there, other=0.0).to(CT)
        out = tl.dot(grad_past, memory, input_precision=PREC)
        if CAUSAL:
            kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            out = add_dot(grad_own, kd, out, PREC)
        tl.store(dq + rows[:, None] * sdt + cols, out.to(dq.dtype.element_ty), mask=inside[:, None] & real)


@triton.jit(do_not_specialize=["T", "NT", "G", "PARTS"])
def key_gradients(
    q, k, v, s, do, visible, zs, ends, wide, scores, shares, rests, sums, cs, dk, dv, ds, table,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sob, soh, sot, SHARE, sm, T, NT, G, N, D, PARTS, scale,
    R: tl.constexpr, ONE: tl.constexpr, C: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
    EVEN: tl.constexpr, SLOTS: tl.constexpr, WHOLE: tl.constexpr, FINE: tl.constexpr, SUMS: tl.constexpr,
    WIDE: tl.constexpr, VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
    PAIR: tl.constexpr,
):  # fmt: skip
    """dk, dv and ds of a chunk, from all query heads of its head. ``cs`` come in PARTS, at most 8.

    ONE takes all columns at once, and PAIR those of keys and values (see ``beside``), if it is not 0. FINE products
    have a second part for what rounding takes, but what queries give the keys of wider heads. SUMS says that sums have
    more digits.
    """
    unit, g = tl.program_id(0), tl.program_id(1)
    n = SLOTS if SLOTS else N
    if WIDE and (tl.load(wide + unit * G + g) & IS_WIDE) == 0:
        return
    b, seq, start, length = locate(unit, table, T, NT, C, VARLEN)
    if VARLEN and length == 0:
        return
    first, row = start.to(tl.int64), b.to(tl.int64)
    rows, slots, inside, ok, real_slots = chunk_masks(
        length, visible, b, sm, start, n, C, NP, EVEN, SLOTS == NP, MASKED
    )  # fmt: skip
    kept = inside[:, None] & real_slots
    # Of the group's first query head; the next is T rows further.
    side = ((row * G + g) * R * T + first) * n
    spot = rows[:, None] * n + slots
    x = load_logits(s + row * ssb + g * ssh + first * sst, sst, rows, ok, slots, real_slots)
    at = (unit if CAUSAL else seq).to(tl.int64) * G + g
    z = tl.load(zs + at * n + slots, mask=real_slots, other=EMPTY)
    z_end = tl.maximum(tl.load(ends + at * n + slots, mask=real_slots, other=EMPTY), HALF_EMPTY) if CAUSAL else z
    ref = reference_of(x, z, z_end, WIDE) if CAUSAL else tl.maximum(z, HALF_EMPTY)
    weight = exp(tl.minimum(x - z_end[None, :], 0.0) if WIDE or not CAUSAL else x - ref[None, :]).to(CT)
    # What queries give its logits before that factor; in a wide chunk, what its own give.
    of_c = tl.arange(0, 8)[:, None]
    c = tl.load(cs + (at * PARTS + of_c) * n + slots, mask=(of_c < PARTS) & real_slots, other=0.0)
    after = zeros(C, NP, CT) - tl.sum(c, 0)[None, :]
    logits = zeros(C, NP, CT)
    if CAUSAL and not WIDE:
        for r in range(R):
            after -= tl.load(rests + side + r * T * n + spot, mask=kept, other=0.0)
    if PAIR:
        raw = beside(sums + 2 * at * n * D, D, sums + (2 * at + 1) * n * D, D, slots, real_slots, PAIR)
        both = beside(
            k + row * skb + g * skh + first * skt, skt, v + row * svb + g * svh + first * svt, svt, rows, ok, PAIR
        ).to(CT)  # fmt: skip
        out = zeros(C, 2 * PAIR, CT)
        for r in range(R):
            share = tl.load(shares + side + r * T * n + spot, mask=kept, other=0.0).to(CT)
            ad = half_row(q + row * sqb + (g * R + r) * sqh + first * sqt, sqt, rows, inside, False, PAIR).to(CT)
            after = _back_logits(both, ad, share, after, FINE, PREC)
            out = _back_own(share, weight, ad, out, FINE, PREC)
            share = tl.load(shares + SHARE + side + r * T * n + spot, mask=kept, other=0.0).to(CT)
            ad = half_row(do + row * sob + (g * R + r) * soh + first * sot, sot, rows, inside, True, PAIR).to(CT)
            after = _back_logits(both, ad, share, after, FINE, PREC)
            out = _back_own(share, weight, ad, out, FINE, PREC)
        after = against(both, raw, after, SUMS, CT, PREC)
        out = add_dot(weight, raw.to(CT), out, PREC)
        cols = tl.arange(0, 2 * PAIR)
        line = ((row * G + g) * T + first + rows)[:, None] * D
        place = tl.where((cols < PAIR)[None, :], dk + line + cols, dv + line + (cols - PAIR))
        tl.store(place, out.to(dk.dtype.element_ty), mask=inside[:, None] & (cols >= 0))
    for which in tl.static_range(0 if PAIR else 2):
        if which == 0:
            a = q + row * sqb + g * R * sqh + first * sqt
            keys = k + row * skb + g * skh + first * skt
            across, down, step = sqh, sqt, skt
            to = dk
        else:
            a = do + row * sob + g * R * soh + first * sot
            keys = v + row * svb + g * svh + first * svt
            across, down, step = soh, sot, svt
            to = dv
        memory = sums + (2 * at + which) * n * D
        own_shares = shares + which * SHARE + side + spot
        to += ((row * G + g) * T + first) * D
        if ONE:
            cols = tl.arange(0, BD)
            real = within(cols, D, WHOLE)
            # All is asked for before anything is waited for.
            share = tl.load(own_shares, mask=kept, other=0.0).to(CT)
            raw = tl.load(memory + slots[:, None] * D + cols, mask=real_slots[:, None] & real, other=0.0)
            kd = tl.load(keys + rows[:, None] * step + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            ad = tl.load(a + rows[:, None] * down + cols, mask=inside[:, None] & real, other=0.0).to(CT)
            after = _back_logits(kd, ad, share, after, FINE, PREC)
            to_own, to_own_low = _own_parts(share, weight, PREC)
            after = against(kd, raw, after, SUMS, CT, PREC)
            out = tl.dot(weight, raw.to(CT), input_precision=PREC)
            out = _add_parts(to_own, to_own_low, ad, out, FINE, PREC)
            for r in range(1, R):
                share = tl.load(own_shares + r * T * n, mask=kept, other=0.0).to(CT)
                place = a + r * across + rows[:, None] * down + cols
                ad = tl.load(place, mask=inside[:, None] & real, other=0.0).to(CT)
                after = _back_logits(kd, ad, share, after, FINE, PREC)
                out = _back_own(share, weight, ad, out, FINE, PREC)
            tl.store(to + rows[:, None] * D + cols, out.to(to.dtype.element_ty), mask=inside[:, None] & real)
        to_own = tl.zeros([C, C], CT)
        if CAUSAL and not ONE:
            for r in range(R):
                if not WIDE:
                    share = tl.load(own_shares + r * T * n, mask=kept, other=0.0).to(CT)
                pairs = zeros(C, C, CT)
                for i in range(0, D, BD):
                    cols = i + tl.arange(0, BD)
                    here, there = inside[:, None] & within(cols, D, WHOLE), ok[:, None] & within(cols, D, WHOLE)
                    ad = tl.load(a + r * across + rows[:, None] * down + cols, mask=here, other=0.0)
                    kd = tl.load(keys + rows[:, None] * step + cols, mask=there, other=0.0)
                    pairs = add_dot(kd.to(CT), tl.trans(ad.to(CT)), pairs, PREC)
                if WIDE:
                    score = tl.load(scores + side + r * T * n + spot, mask=kept, other=float("-inf"))
                    dp = tl.load(rests + side + r * T * n + spot, mask=kept, other=0.0)
                    y, other = _of(which, score, dp, scale)
                    to_own, part = back_chunk(pairs, y, other, x, z, ref, FINE, CT, PREC)
                    logits += part
                else:
                    pairs = tl.where(rows[:, None] <= rows, pairs, 0.0)
                    after = dot_parts(pairs, share, after, FINE, PREC)
                    to_own, _ = _own_parts(share, weight, PREC)
        for i in range(0, 0 if ONE else D, BD):
            cols = i + tl.arange(0, BD)
            real = within(cols, D, WHOLE)
            raw = tl.load(memory + slots[:, None] * D + cols, mask=real_slots[:, None] & real, other=0.0)
            kd = tl.load(keys + rows[:, None] * step + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            after = against(kd, raw, after, SUMS, CT, PREC)
            out = tl.dot(weight, raw.to(CT), input_precision=PREC)
            if CAUSAL:
                for r in range(R):
                    if R > 1:
                        # Once more: there are no registers to keep those of all heads.
                        if WIDE:
                            score = tl.load(scores + side + r * T * n + spot, mask=kept, other=float("-inf"))
                            dp = tl.load(rests + side + r * T * n + spot, mask=kept, other=0.0)
                            y, _ = _of(which, score, dp, scale)
                            _, to_own = mix_chunk(y, x, z, ref, zeros(C, C, CT), WIDE, CT, PREC)
                            to_own = tl.trans(to_own)
                        else:
                            share = tl.load(own_shares + r * T * n, mask=kept, other=0.0).to(CT)
                            to_own, _ = _own_parts(share, weight, PREC)
                    place = a + r * across + rows[:, None] * down + cols
                    ad = tl.load(place, mask=inside[:, None] & real, other=0.0).to(CT)
                    out = add_dot(to_own, ad, out, PREC)
            tl.store(to + rows[:, None] * D + cols, out.to(to.dtype.element_ty), mask=inside[:, None] & real)
    after = after * in_full(weight, CT)
    if WIDE:
        after += logits
    tl.store(ds + ((row * G + g) * T + first) * n + spot, after.to(ds.dtype.element_ty), mask=kept)


@triton.jit
def _store_shares(place, share, p_share, SHARE, kept):
    """As soon as they are known, or they would be kept in two layouts until then."""
    tl.store(place, share.to(place.dtype.element_ty), mask=kept)
    tl.store(place + SHARE, p_share.to(place.dtype.element_ty), mask=kept)


@triton.jit
def _back_logits(keys, ad, share, after, FINE: tl.constexpr, PREC: tl.constexpr):
    """after, with what the queries of one head give the logits of their own chunk."""
    rows = tl.arange(0, share.shape[0])
    pairs = tl.where(rows[:, None] <= rows, tl.dot(keys, tl.trans(ad), input_precision=PREC), 0.0)
    return dot_parts(pairs, share, after, FINE, PREC)


@triton.jit
def _back_own(share, weight, ad, out, FINE: tl.constexpr, PREC: tl.constexpr):
    """out, with what the queries of one head give the keys of their own chunk."""
    to_own, to_own_low = _own_parts(share, weight, PREC)
    return _add_parts(to_own, to_own_low, ad, out, FINE, PREC)


@triton.jit
def _add_parts(high, low, ad, out, FINE: tl.constexpr, PREC: tl.constexpr):
    out = add_dot(high, ad, out, PREC)
    if FINE:
        out = add_dot(low, ad, out, PREC)
    return out


@triton.jit
def _own_parts(share, weight, PREC: tl.constexpr):
    """What each key of a chunk gives each of its queries, rounded, and what rounding takes."""
    rows = tl.arange(0, share.shape[0])
    own = tl.where(rows[:, None] >= rows, tl.dot(share, tl.trans(weight), input_precision=PREC), 0.0)
    high = own.to(share.dtype)
    return tl.trans(high), tl.trans((own - high.to(tl.float32)).to(share.dtype))


@triton.jit
def _of(which: tl.constexpr, score, dp, scale):
    """g and S for the keys, p and dP for the values, from S and dP."""
    empty = score == float("-inf")
    dp = tl.where(empty, 0.0, dp)
    p, grad = gradients(score, dp, scale, False)
    if which == 0:
        return grad, tl.where(empty, 0.0, score)
    return p, dp


# For more than 128 slots in several references: one kernel for all, since Triton 3.6 could not lay out key_gradients of
# rows that it knew to be multiples of 16.
loose_key_gradients = triton.jit(do_not_specialize=["T", "NT", "G", "N", "PARTS", "sst"])(key_gradients.fn)
loose_query_gradients = triton.jit(do_not_specialize=["T", "NT", "G", "R", "N", "sst"])(query_gradients.fn)
