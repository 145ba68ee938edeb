"""The memory along a sequence: one program walks its chunks with a tile of the state in registers.

Slots, columns, keys and values are independent of one another: each program has a tile of them. Where there are few
sequences and heads, a sequence is cut into segments. A first pass takes each segment's total; the second pass starts
every segment from the totals of the segments before it.

STAGE says what a launch of ``write_states`` or ``sum_back`` stores:
"keep"   what there is at every chunk (in one pass, or as the second of two);
"part"   each segment's own total (the first of two passes);
"whole"  only what there is at the end (one pass; all queries read one state);
"join"   only what there is at the end, from the segments' totals (the second of two passes).
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.abc.control import (
    EMPTY,
    HALF_EMPTY,
    LOG_QUARTER,
    chunk_masks,
    exp,
    in_full,
    load_logits,
    locate_chunk,
    rounded,
    within,
    zeros,
)

__all__ = ["program_tile", "segment_chunks", "weigh_logits", "write_states"]


@triton.jit(do_not_specialize=["T", "NT", "G"])
def weigh_logits(
    # inputs
    s, visible,
    # written: the logits' weights, each chunk's largest logit and sum of weights
    weights, top_logits, weight_sums,
    # packed sequences
    table,
    # strides
    ssb, ssh, sst, sm,
    # sizes
    T, NT, G, N,
    # tiles
    C: tl.constexpr, NP: tl.constexpr,
    # the call
    PACKED: tl.constexpr, MASKED: tl.constexpr,
    # tiles without padding
    FULL_CHUNKS: tl.constexpr, FULL_SLOTS: tl.constexpr,
):  # fmt: skip
    """exp(s - top) of each chunk, where top is each slot's largest logit, and the sums of these weights."""
    chunk, g = tl.program_id(0), tl.program_id(1)
    b, _, start, length = locate_chunk(chunk, table, T, NT, C, PACKED)
    if PACKED and length == 0:
        return
    first, row = start.to(tl.int64), b.to(tl.int64)
    rows, slots, inside, ok, real = chunk_masks(
        length, visible, b, sm, start, N, C, NP, FULL_CHUNKS, FULL_SLOTS, MASKED
    )
    x = load_logits(s + row * ssb + g * ssh + first * sst, sst, rows, ok, slots, real)
    top = tl.maximum(tl.max(x, 0), HALF_EMPTY)
    CT: tl.constexpr = weights.dtype.element_ty
    e = rounded(exp(in_full(x, CT) - top[None, :]), CT)
    place = weights + ((row * G + g) * T + first) * N + (rows[:, None] * N + slots)
    tl.store(place, e, mask=inside[:, None] & real)
    at = (chunk.to(tl.int64) * G + g) * N + slots
    tl.store(top_logits + at, top, mask=real)
    tl.store(weight_sums + at, tl.sum(in_full(e, CT), 0), mask=real)


@triton.jit(do_not_specialize=["T", "NT", "G", "SEGMENTS"])
def write_states(
    # inputs
    k, v, visible,
    # from weigh_logits
    weights, top_logits, weight_sums,
    # written for each chunk, if causal
    states, low_parts, peak_logits, z_before, z_after,
    # the first state, and the last, which is written
    first_k, first_v, first_z, last_k, last_v, last_z,
    # totals of the segments
    part_states, part_z, part_peak_logits,
    # packed sequences
    bounds, cu,
    # strides
    skb, skh, skt, svb, svh, svt, sm,
    # sizes
    T, NT, G, N, D, SEGMENTS,
    # tiles
    C: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    # passes over segments
    STAGE: tl.constexpr, JOIN_SEGMENTS: tl.constexpr, SKIPPED: tl.constexpr,
    # the call
    STARTED: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr,
    # tiles without padding
    FULL_CHUNKS: tl.constexpr, FULL_SLOTS: tl.constexpr, FULL_COLUMNS: tl.constexpr,
    # numbers
    LOW_PARTS: tl.constexpr, PAIR_WIDTH: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(K~, V~, z): averages of keys and values, and the logarithm of their total weight.

    For STAGE see the top of this file. JOIN_SEGMENTS starts a segment from the totals of those before it. The last
    segment's own total is not needed then, and the first pass leaves out the SKIPPED one. LOW_PARTS keeps what rounding
    takes of a state where one key makes more than a quarter of a slot, and the largest logit of each slot, by which
    readers find these slots. PAIR_WIDTH is the width of heads whose K~ and V~ share one tile, or 0.
    """
    # Which tile of which state this program has.
    row, segment, which, slots, cols, lead = program_tile(
        SEGMENTS - SKIPPED if STAGE != "join" else 1, N, D, BN, BD, PAIR_WIDTH
    )
    seq, g, mine = row // G, row % G, row.to(tl.int64) * N
    ok, real = within(slots, N, FULL_SLOTS), within(cols, D, FULL_COLUMNS)
    of_values = which > 0
    if PAIR_WIDTH:
        of_values = (cols >= PAIR_WIDTH)[None, :]
        cols %= PAIR_WIDTH
        real = within(cols, D, True)
    wanted, place = ok[:, None] & real, slots[:, None] * D + cols
    place_in_last = place
    if PAIR_WIDTH:
        place = tl.where(of_values, place + N * D, place)
    # The state before the first chunk: empty, or the first state, then joined with earlier segments' totals.
    z = in_full(tl.full([BN], EMPTY, tl.float32), CT)
    peak = z
    acc = zeros(BN, BD, CT)
    if STARTED and STAGE != "part":
        z = in_full(tl.load(first_z + mine + slots, mask=ok, other=EMPTY), CT)
        peak = z
        acc = in_full(
            tl.load(tl.where(of_values, first_v, first_k) + mine * D + place_in_last, mask=wanted, other=0.0), CT
        )
    if JOIN_SEGMENTS:
        for i in range(SEGMENTS if STAGE == "join" else segment):
            at = mine * SEGMENTS + i * N
            x = tl.load(part_states + (2 * at + which * N) * D + place, mask=wanted, other=0.0)
            old, new, z = _merge(z, tl.load(part_z + at + slots, mask=ok, other=EMPTY), 1.0)
            acc = acc * old[:, None] + x * new[:, None]
            if LOW_PARTS:
                peak = tl.maximum(peak, tl.load(part_peak_logits + at + slots, mask=ok, other=EMPTY))
    # Along the chunks: store the state before each, then add its keys (or values) by one product.
    if STAGE != "join":
        b, head, _, begin, end, start, length = segment_chunks(seq, segment, SEGMENTS, NT, T, bounds, cu, PACKED)
        from_k = k + b.to(tl.int64) * skb + g * skh + start.to(tl.int64) * skt
        from_v = v + b.to(tl.int64) * svb + g * svh + start.to(tl.int64) * svt
        source, across = tl.where(of_values, from_v, from_k), tl.where(of_values, svt, skt)
        weights += ((b.to(tl.int64) * G + g) * T + start) * N
        chunk = (head + begin).to(tl.int64) * G + g
        top, total = _load_weight_sums(top_logits, weight_sums, chunk, begin, end, N, slots)
        top_1, total_1 = _load_weight_sums(top_logits, weight_sums, chunk + G, begin + 1, end, N, slots)
        top_2, total_2 = _load_weight_sums(top_logits, weight_sums, chunk + 2 * G, begin + 2, end, N, slots)
        for i in range(begin, end):
            chunk = (head + i).to(tl.int64) * G + g
            # Loaded three chunks ahead, which hides their latency.
            top_3, total_3 = _load_weight_sums(top_logits, weight_sums, chunk + 3 * G, i + 3, end, N, slots)
            rows = i * C + tl.arange(0, C)
            in_sequence = within(rows, length, FULL_CHUNKS)
            shown = in_sequence
            if MASKED:
                # Hidden keys have no weight, but may be NaN.
                shown = in_sequence & (tl.load(visible + b * sm + start + rows, mask=in_sequence, other=0) != 0)
            rows = rows.to(tl.int64)
            e = tl.load(weights + rows[:, None] * N + slots, mask=in_sequence[:, None] & ok, other=0.0)
            kd = tl.load(source + rows[:, None] * across + cols, mask=shown[:, None] & real, other=0.0).to(CT)
            if STAGE == "keep":
                kept = acc.to(states.dtype.element_ty)
                tl.store(states + (2 * chunk + which) * N * D + place, kept, mask=wanted)
                tl.store(z_before + chunk * N + slots, z, mask=lead)
                if LOW_PARTS:
                    if tl.max((peak > z + LOG_QUARTER).to(tl.int32), 0) > 0:
                        low = (acc - kept.to(tl.float32)).to(low_parts.dtype.element_ty)
                        tl.store(low_parts + (2 * chunk + which) * N * D + place, low, mask=wanted)
                    tl.store(peak_logits + chunk * N + slots, peak, mask=lead)
            if LOW_PARTS:
                peak = tl.maximum(peak, top)
            old, new, z = _merge(z, top, total)
            acc = acc * old[:, None] + tl.dot(tl.trans(e), kd, input_precision=PREC) * new[:, None]
            if STAGE == "keep":
                tl.store(z_after + chunk * N + slots, z, mask=lead)
            # Adding 0.0: Triton does not pipeline a loop that hands on a variable unchanged.
            top, total = top_1 + 0.0, total_1 + 0.0
            top_1, total_1 = top_2 + 0.0, total_2 + 0.0
            top_2, total_2 = top_3, total_3
    # The segment's total, or the last state.
    if STAGE == "part":
        at = mine * SEGMENTS + segment * N
        tl.store(part_states + (2 * at + which * N) * D + place, acc, mask=wanted)
        tl.store(part_z + at + slots, z, mask=lead)
        if LOW_PARTS:
            tl.store(part_peak_logits + at + slots, peak, mask=lead)
    elif segment == (SEGMENTS - 1 if STAGE != "join" else 0):
        tl.store(tl.where(of_values, last_v, last_k) + mine * D + place_in_last, acc, mask=wanted)
        tl.store(last_z + mine + slots, z, mask=lead)


@triton.jit
def _load_weight_sums(top_logits, weight_sums, chunk, i, end, N, slots):
    """The largest logits of a chunk and the sums of its weights; none for chunks from ``end`` on."""
    some = slots < tl.where(i < end, N, 0)
    top = tl.load(top_logits + chunk * N + slots, mask=some, other=EMPTY)
    return top, tl.load(weight_sums + chunk * N + slots, mask=some, other=0.0)


@triton.jit
def program_tile(SEGMENTS, N, D, BN: tl.constexpr, BD: tl.constexpr, PAIR_WIDTH: tl.constexpr):
    """A program's row (a sequence and key head), segment, keys (0) or values (1), slots and columns; and ``lead``.

    Of the programs that share slots, only the lead one writes numbers that have no columns, such as z.
    """
    pid = tl.program_id(0)
    high = tl.cdiv(N, BN)
    which = pid * 0
    tile = which
    if not PAIR_WIDTH:
        which = pid % 2
        across = tl.cdiv(D, BD)
        tile = pid // 2 % across
        pid = pid // (2 * across)
    slots = (pid % high) * BN + tl.arange(0, BN)
    pid = pid // high
    lead = slots + (which + tile) * 65536 < N
    return pid // SEGMENTS, pid % SEGMENTS, which, slots, tile * BD + tl.arange(0, BD), lead


@triton.jit
def segment_chunks(seq, segment, SEGMENTS, NT, T, bounds, cu, PACKED: tl.constexpr):
    """Where a segment lies: its batch row, its sequence's first chunk and number of chunks, the first chunk of the
    segment in the sequence and the one after its last, the sequence's first token and its length.
    """
    if PACKED:
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
    """Two averages as one: of weight exp(z), and of ``total`` times exp(top).

    Returns the factor of the first, the factor of each unit of the second's weight, and z of both.
    """
    high = tl.maximum(tl.maximum(z, top), HALF_EMPTY)
    old, new = exp(z - high), exp(top - high)
    both = old + new * total
    over = tl.where(both > 0, 1.0 / both, 0.0)
    return old * over, new * over, tl.where(both > 0, high + tl.log(both), EMPTY)
