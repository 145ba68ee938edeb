"""The memory along a sequence: one program walks its chunks with a tile of the state in float32 registers.

Slots, columns, and keys and values are independent of one another, so that each program has a tile of them. Where there
are few sequences and heads, a sequence is cut into segments: a first pass takes each segment's total, and the second
starts from the totals beyond its own.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.abc.control import (
    EMPTY,
    HALF_EMPTY,
    IS_WIDE,
    LOG_HALF,
    LOG_QUARTER,
    MENDS,
    add_dot,
    chunk_masks,
    exp,
    in_full,
    load_logits,
    locate,
    rounded,
    within,
    zeros,
)

__all__ = ["sum_back", "weigh_logits", "write_states"]


@triton.jit(do_not_specialize=["T", "NT", "G"])
def weigh_logits(
    s, visible, weights, tops, totals, table, ssb, ssh, sst, sm, T, NT, G, N,
    C: tl.constexpr, NP: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """exp(s - top) of each chunk, where top is each slot's largest, and their sums."""
    unit, g = tl.program_id(0), tl.program_id(1)
    b, _, start, length = locate(unit, table, T, NT, C, VARLEN)
    if VARLEN and length == 0:
        return
    first, row = start.to(tl.int64), b.to(tl.int64)
    rows, slots, inside, ok, real = chunk_masks(length, visible, b, sm, start, N, C, NP, EVEN, FULL, MASKED)
    x = load_logits(s + row * ssb + g * ssh + first * sst, sst, rows, ok, slots, real)
    top = tl.maximum(tl.max(x, 0), HALF_EMPTY)
    CT: tl.constexpr = weights.dtype.element_ty
    e = rounded(exp(in_full(x, CT) - top[None, :]), CT)
    place = weights + ((row * G + g) * T + first) * N + (rows[:, None] * N + slots)
    tl.store(place, e, mask=inside[:, None] & real)
    at = (unit.to(tl.int64) * G + g) * N + slots
    tl.store(tops + at, top, mask=real)
    tl.store(totals + at, tl.sum(in_full(e, CT), 0), mask=real)


@triton.jit(do_not_specialize=["T", "NT", "G", "SEGMENTS"])
def write_states(
    k, v, weights, tops, totals, visible, states, lows, peaks, zs, ends,
    first_k, first_v, first_z, last_k, last_v, last_z, parts, part_zs, part_peaks, bounds, cu,
    skb, skh, skt, svb, svh, svt, sm, T, NT, G, N, D, SEGMENTS,
    C: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, STAGE: tl.constexpr, JOIN: tl.constexpr, LESS: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, WHOLE: tl.constexpr, STARTED: tl.constexpr, FINE: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """(K~, V~, z) as averages and the logarithm of their weight.

    STAGE "keep" stores them before each chunk, and z after it; "part" only takes each segment's own, "whole" only what
    is there at the end; "join" makes that of parts. With JOIN the parts of earlier segments come first, so that the
    last segment's own is not needed: then there is one LESS. FINE keeps what rounding takes of a state, too, where one
    key makes more than a quarter of a slot, and the largest logit of each slot, which tells them. PAIR is the width of
    heads that have K~ and V~ in one tile, or 0.
    """
    row, segment, which, slots, cols, lead = _tile(SEGMENTS - LESS if STAGE != "join" else 1, N, D, BN, BD, PAIR)
    seq, g, mine = row // G, row % G, row.to(tl.int64) * N
    ok, real = within(slots, N, FULL), within(cols, D, WHOLE)
    of_values = which > 0
    if PAIR:
        of_values = (cols >= PAIR)[None, :]
        cols %= PAIR
        real = within(cols, D, True)
    wanted, here = ok[:, None] & real, slots[:, None] * D + cols
    alone = here
    if PAIR:
        here = tl.where(of_values, here + N * D, here)
    z = in_full(tl.full([BN], EMPTY, tl.float32), CT)
    peak = z
    acc = zeros(BN, BD, CT)
    if STARTED and STAGE != "part":
        z = in_full(tl.load(first_z + mine + slots, mask=ok, other=EMPTY), CT)
        peak = z
        acc = in_full(tl.load(tl.where(of_values, first_v, first_k) + mine * D + alone, mask=wanted, other=0.0), CT)
    if JOIN:
        for i in range(SEGMENTS if STAGE == "join" else segment):
            at = mine * SEGMENTS + i * N
            x = tl.load(parts + (2 * at + which * N) * D + here, mask=wanted, other=0.0)
            old, new, z = _merge(z, tl.load(part_zs + at + slots, mask=ok, other=EMPTY), 1.0)
            acc = acc * old[:, None] + x * new[:, None]
            if FINE:
                peak = tl.maximum(peak, tl.load(part_peaks + at + slots, mask=ok, other=EMPTY))
    if STAGE != "join":
        b, head, _, begin, end, start, length = _chunks(seq, segment, SEGMENTS, NT, T, bounds, cu, VARLEN)
        from_k = k + b.to(tl.int64) * skb + g * skh + start.to(tl.int64) * skt
        from_v = v + b.to(tl.int64) * svb + g * svh + start.to(tl.int64) * svt
        source, across = tl.where(of_values, from_v, from_k), tl.where(of_values, svt, skt)
        weights += ((b.to(tl.int64) * G + g) * T + start) * N
        unit = (head + begin).to(tl.int64) * G + g
        top, total = _weighed(tops, totals, unit, begin, end, N, slots)
        top_1, total_1 = _weighed(tops, totals, unit + G, begin + 1, end, N, slots)
        top_2, total_2 = _weighed(tops, totals, unit + 2 * G, begin + 2, end, N, slots)
        for i in range(begin, end):
            unit = (head + i).to(tl.int64) * G + g
            # Chunks ahead: it is long until they come.
            top_3, total_3 = _weighed(tops, totals, unit + 3 * G, i + 3, end, N, slots)
            rows = i * C + tl.arange(0, C)
            there = within(rows, length, EVEN)
            shown = there
            if MASKED:
                # What is hidden has no weight, but may be anything.
                shown = there & (tl.load(visible + b * sm + start + rows, mask=there, other=0) != 0)
            rows = rows.to(tl.int64)
            e = tl.load(weights + rows[:, None] * N + slots, mask=there[:, None] & ok, other=0.0)
            kd = tl.load(source + rows[:, None] * across + cols, mask=shown[:, None] & real, other=0.0).to(CT)
            if STAGE == "keep":
                kept = acc.to(states.dtype.element_ty)
                tl.store(states + (2 * unit + which) * N * D + here, kept, mask=wanted)
                tl.store(zs + unit * N + slots, z, mask=lead)
                if FINE:
                    if tl.max((peak > z + LOG_QUARTER).to(tl.int32), 0) > 0:
                        low = (acc - kept.to(tl.float32)).to(lows.dtype.element_ty)
                        tl.store(lows + (2 * unit + which) * N * D + here, low, mask=wanted)
                    tl.store(peaks + unit * N + slots, peak, mask=lead)
            if FINE:
                peak = tl.maximum(peak, top)
            old, new, z = _merge(z, top, total)
            acc = acc * old[:, None] + tl.dot(tl.trans(e), kd, input_precision=PREC) * new[:, None]
            if STAGE == "keep":
                tl.store(ends + unit * N + slots, z, mask=lead)
            # Handed on unchanged they would keep Triton from pipelining the loop.
            top, total = top_1 + 0.0, total_1 + 0.0
            top_1, total_1 = top_2 + 0.0, total_2 + 0.0
            top_2, total_2 = top_3, total_3
    if STAGE == "part":
        at = mine * SEGMENTS + segment * N
        tl.store(parts + (2 * at + which * N) * D + here, acc, mask=wanted)
        tl.store(part_zs + at + slots, z, mask=lead)
        if FINE:
            tl.store(part_peaks + at + slots, peak, mask=lead)
    elif segment == (SEGMENTS - 1 if STAGE != "join" else 0):
        tl.store(tl.where(of_values, last_v, last_k) + mine * D + alone, acc, mask=wanted)
        tl.store(last_z + mine + slots, z, mask=lead)


@triton.jit(do_not_specialize=["T", "NT", "G", "SEGMENTS"])
def sum_back(
    q, do, shares, rests, wide, wide_cs, states, last_k, last_v, zs, ends, sums, cs, seeds, seed_c, to, to_c,
    parts, part_cs, fades, bounds, cu,
    sqb, sqh, sqt, sob, soh, sot, SHARE, T, NT, G, N, D, SEGMENTS,
    C: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, R: tl.constexpr,
    STAGE: tl.constexpr, JOIN: tl.constexpr, LESS: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, WHOLE: tl.constexpr, SEEDED: tl.constexpr, DECAY: tl.constexpr,
    MEND: tl.constexpr, VARLEN: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """What all queries after a chunk hand to its slots: sum_t share_t q_t (and do_t), relative to z after the chunk.

    Stages as in ``write_states``, from the last chunk to the first. Without DECAY (all queries read one state) the
    shares are not relative to anything. ``cs`` takes the sums of share_t S_t + share_t dP_t.

    Sums are stored rounded, and a key's logit gets k_i sums - c. MEND adds what rounding adds to K~ sums to c, a part
    for each tile: then it gives a logit (k_i - K~) times as much, which is little where one key fills a slot. It is
    done in the slots that a chunk's keys may fill, those of which at most half was there before, and there may be none.
    """
    row, segment, which, slots, cols, lead = _tile(SEGMENTS - LESS if STAGE != "join" else 1, N, D, BN, BD, 0)
    segment += LESS
    seq, g, mine = row // G, row % G, row.to(tl.int64) * N
    ok, real = within(slots, N, FULL), within(cols, D, WHOLE)
    wanted, here = ok[:, None] & real, slots[:, None] * D + cols
    acc = zeros(BN, BD, CT)
    c = in_full(tl.zeros([BN], tl.float32), CT)
    fade = in_full(tl.full([BN], 1.0, tl.float32), CT)
    if SEEDED and STAGE != "part":
        acc = in_full(tl.load(seeds + (2 * mine + which * N) * D + here, mask=wanted, other=0.0), CT)
        c = in_full(tl.load(seed_c + mine + slots, mask=ok, other=0.0), CT)
    if JOIN:
        for i in range(SEGMENTS if STAGE == "join" else SEGMENTS - 1 - segment):
            at = mine * SEGMENTS + (SEGMENTS - 1 - i) * N
            old = tl.load(fades + at + slots, mask=ok, other=0.0)
            c = c * old + tl.load(part_cs + at + slots, mask=ok, other=0.0)
            acc = acc * old[:, None] + tl.load(parts + (2 * at + which * N) * D + here, mask=wanted, other=0.0)
    if STAGE != "join":
        b, head, count, begin, end, start, length = _chunks(seq, segment, SEGMENTS, NT, T, bounds, cu, VARLEN)
        first = b.to(tl.int64) * G * R + g * R
        if which == 0:
            source = q + b.to(tl.int64) * sqb + g * R * sqh + start.to(tl.int64) * sqt
            across, heads = sqt, sqh
        else:
            source = do + b.to(tl.int64) * sob + g * R * soh + start.to(tl.int64) * sot
            across, heads = sot, soh
        side = (first * T + start) * N
        taken = shares + which.to(tl.int64) * SHARE + side
        final = (head + end - 1).to(tl.int64) * G + g
        z, z_end, is_wide, own, own_wide = _fetch(
            zs, ends, wide, rests + side, wide_cs, final, end - 1, begin, T, N, slots, lead, C, R, DECAY
        )
        z_1, z_end_1, is_wide_1, own_1, own_wide_1 = _fetch(
            zs, ends, wide, rests + side, wide_cs, final - G, end - 2, begin, T, N, slots, lead, C, R, DECAY
        )
        if MEND and STAGE == "keep":
            tiles = 2 * tl.cdiv(D, BD)
            cs += tl.program_id(0) % tiles * N
            # The state after the segment, as far as it is needed.
            last = tl.where(which == 0, last_k, last_v)
            fresh = ok & (z < z_end + LOG_HALF)
            no_more, more = slots < tl.where(end == count, N, 0), slots < tl.where(end < count, N, 0)
            no_more, more = fresh & no_more, fresh & more
            memory = tl.load(
                states + (2 * (final + G) + which) * N * D + here, mask=more[:, None] & real, other=0.0
            )  # fmt: skip
            memory += tl.load(last + mine * D + here, mask=no_more[:, None] & real, other=0.0).to(memory.dtype)
            mends = tl.load(wide + final, mask=end > begin, other=0) & MENDS
        for j in range(begin, end):
            i = begin + end - 1 - j
            unit = (head + i).to(tl.int64) * G + g
            # Chunks ahead, as in writing.
            z_2, z_end_2, is_wide_2, own_2, own_wide_2 = _fetch(
                zs, ends, wide, rests + side, wide_cs, unit - 2 * G, i - 2, begin, T, N, slots, lead, C, R, DECAY
            )
            if STAGE == "keep":
                kept = rounded(acc, sums.dtype.element_ty)
                tl.store(sums + (2 * unit + which) * N * D + here, kept, mask=wanted)
                if MEND:
                    error = tl.zeros([BN], tl.float32)
                    if mends != 0:
                        error = tl.sum((kept.to(tl.float32) - acc) * memory.to(tl.float32), 1)
                    tl.store(cs + unit * tiles * N + slots, tl.where(lead, c, 0.0) + error, mask=ok)
                    # For the chunk before this.
                    fresh = ok & (z_1 < z_end_1 + LOG_HALF)
                    memory = tl.load(
                        states + (2 * unit + which) * N * D + here, mask=fresh[:, None] & real, other=0.0
                    )  # fmt: skip
                    mends = tl.load(wide + unit - G, mask=i > begin, other=0) & MENDS
                else:
                    tl.store(cs + unit * N + slots, c, mask=lead)
            if DECAY:
                keep = tl.where(z > HALF_EMPTY, exp(z - z_end), 0.0)
                # Shares of a wide chunk are relative to z before it, those of others to z after it.
                early = tl.where(is_wide != 0, keep, 1.0)
                late = tl.where(is_wide != 0, 1.0, keep)
                acc = acc * early[:, None]
                c = (c * early + tl.where(is_wide != 0, own_wide, own)) * late
                fade = fade * keep
            else:
                c += own_wide
            rows = i * C + tl.arange(0, C)
            there = within(rows, length, EVEN)
            rows = rows.to(tl.int64)
            for r in range(R):
                share = tl.load(
                    taken + (r * T + rows)[:, None] * N + slots, mask=there[:, None] & ok, other=0.0
                ).to(CT)  # fmt: skip
                x = tl.load(
                    source + r * heads + rows[:, None] * across + cols, mask=there[:, None] & real, other=0.0
                ).to(CT)  # fmt: skip
                acc = add_dot(tl.trans(share), x, acc, PREC)
            if DECAY:
                acc = acc * late[:, None]
            z, z_end, is_wide, own, own_wide = z_1 + 0.0, z_end_1 + 0.0, is_wide_1 + 0.0, own_1 + 0.0, own_wide_1 + 0.0
            z_1, z_end_1, is_wide_1, own_1, own_wide_1 = z_2, z_end_2, is_wide_2, own_2, own_wide_2
    if STAGE == "part":
        at = mine * SEGMENTS + segment * N
        tl.store(parts + (2 * at + which * N) * D + here, acc, mask=wanted)
        tl.store(part_cs + at + slots, c, mask=lead)
        tl.store(fades + at + slots, fade, mask=lead)
    elif segment == 0:
        tl.store(to + (2 * mine + which * N) * D + here, acc, mask=wanted)
        tl.store(to_c + mine + slots, c, mask=lead)


@triton.jit
def _weighed(tops, totals, unit, i, end, N, slots):
    """The largest logits of a chunk and the sums of its weights; nothing from ``end`` on."""
    some = slots < tl.where(i < end, N, 0)
    top = tl.load(tops + unit * N + slots, mask=some, other=EMPTY)
    return top, tl.load(totals + unit * N + slots, mask=some, other=0.0)


@triton.jit
def _fetch(
    zs, ends, wide, rests, wide_cs, unit, i, begin, T, N, slots, lead,
    C: tl.constexpr, R: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """z before and after a chunk, whether it is wide (the same for all slots), and what it adds to c if not, and if.

    Nothing of chunks before ``begin``.
    """
    some = slots < tl.where(i >= begin, N, 0)
    own = tl.zeros(slots.shape, tl.float32)
    own_wide = tl.zeros(slots.shape, tl.float32)
    for r in tl.static_range(R):
        own_wide += tl.load(wide_cs + (unit * R + r) * N + slots, mask=some & lead, other=0.0)
        if DECAY:
            # The first row's rest is that of all of the chunk.
            own += tl.load(rests + (r * T + i.to(tl.int64) * C) * N + slots, mask=some & lead, other=0.0)
    z = own
    z_end = own
    is_wide = own
    if DECAY:
        z = tl.load(zs + unit * N + slots, mask=some, other=EMPTY)
        z_end = tl.load(ends + unit * N + slots, mask=some, other=EMPTY)
        is_wide = (tl.load(wide + unit + 0 * slots, mask=some, other=0) & IS_WIDE).to(tl.float32)
    return z, z_end, is_wide, own, own_wide


@triton.jit
def _tile(SEGMENTS, N, D, BN: tl.constexpr, BD: tl.constexpr, PAIR: tl.constexpr):
    """A program's row (sequence and head), segment, keys or values, slots, columns; whether it writes what has none."""
    pid = tl.program_id(0)
    high = tl.cdiv(N, BN)
    which = pid * 0
    tile = which
    if not PAIR:
        which = pid % 2
        wide = tl.cdiv(D, BD)
        tile = pid // 2 % wide
        pid = pid // (2 * wide)
    slots = (pid % high) * BN + tl.arange(0, BN)
    pid = pid // high
    lead = slots + (which + tile) * 65536 < N
    return pid // SEGMENTS, pid % SEGMENTS, which, slots, tile * BD + tl.arange(0, BD), lead


@triton.jit
def _chunks(seq, segment, SEGMENTS, NT, T, bounds, cu, VARLEN: tl.constexpr):
    """The batch row, the sequence's first chunk and their number, the segment's in it, first token and length."""
    if VARLEN:
        b = seq * 0
        head = tl.load(bounds + seq)
        count = tl.load(bounds + seq + 1) - head
        start = tl.load(cu + seq).to(tl.int32)
        length = tl.load(cu + seq + 1).to(tl.int32) - start
    else:
        b = seq
        head = seq * NT
        count = NT
        start = seq * 0
        length = T
    each = (count + SEGMENTS - 1) // SEGMENTS
    begin = tl.minimum(segment * each, count)
    return b, head, count, begin, tl.minimum(begin + each, count), start, length


@triton.jit
def _merge(z, top, total):
    """What is kept of an average of weight exp(z), what each unit of weight exp(top) adds to it, and z after both.

    ``total`` of the latter are added.
    """
    high = tl.maximum(tl.maximum(z, top), HALF_EMPTY)
    old, new = exp(z - high), exp(top - high)
    both = old + new * total
    over = tl.where(both > 0, 1.0 / both, 0.0)
    return old * over, new * over, tl.where(both > 0, high + tl.log(both), EMPTY)
