"""Reading the memory: out_t = V~_t^T softmax(K~_t q_t), for a chunk of queries that share the state before it."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.abc.chunk import (
    add_low_parts,
    mix_chunk,
    multiply_side_by_side,
    reference_of,
    score_chunk,
    slots_of_one_key,
    softmax_over_slots,
)
from attnlab.kernels.abc.control import (
    EMPTY,
    HALF_EMPTY,
    IS_WIDE,
    KEYS_MAY_FILL,
    LEAST,
    LOG_HALF,
    add_dot,
    chunk_and_head,
    chunk_masks,
    exp,
    load_logits,
    locate_chunk,
    within,
    zeros,
)

__all__ = ["generic_read_states", "read_states"]


@triton.jit(do_not_specialize=["T", "NT", "G", "R"])
def read_states(
    # inputs
    q, k, v, s, visible,
    # saved by the forward pass; chunk_flags and scores are written here
    states, low_parts, peak_logits, z_before, z_after, chunk_flags, scores,
    # written
    o,
    # packed sequences
    table,
    # strides
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sob, soh, sot, sm,
    # sizes
    T, NT, G, R, N, D, scale,
    # tiles
    C: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr, SLOTS: tl.constexpr,
    # the call
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr, GROUPED: tl.constexpr, SAVE_SCORES: tl.constexpr,
    # tiles without padding
    FULL_CHUNKS: tl.constexpr, FULL_COLUMNS: tl.constexpr, ALL_WRITTEN: tl.constexpr,
    # which chunks, and when loads begin
    WIDE: tl.constexpr, EARLY_LOGITS: tl.constexpr,
    # numbers
    LOW_PARTS: tl.constexpr, PAIR_WIDTH: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The output of each chunk of queries: from the state before it and, if causal, its own keys up to each query.

    WIDE reads only wide chunks; without it, all are read and the wide ones are flagged. EARLY_LOGITS loads logits and z
    before the first products, which hides their latency. PAIR_WIDTH is the width of heads whose keys and values share
    one tile, or 0. SLOTS is the number of slots if the kernel is made for it, or 0. ALL_WRITTEN says that no slot is
    empty in any row, but for padding slots.
    """
    # Where the chunk lies, and the masks of its rows and slots.
    chunk, h = chunk_and_head(G * R, GROUPED)
    g = h // R
    n = SLOTS if SLOTS else N
    if WIDE and (tl.load(chunk_flags + chunk * G + g) & IS_WIDE) == 0:
        return
    b, seq, start, length = locate_chunk(chunk, table, T, NT, C, PACKED)
    if PACKED and length == 0:
        return
    first, row = start.to(tl.int64), b.to(tl.int64)
    q += row * sqb + h * sqh + first * sqt
    o += row * sob + h * soh + first * sot
    rows, slots, inside, ok, real_slots = chunk_masks(
        length, visible, b, sm, start, n, C, NP, FULL_CHUNKS, SLOTS == NP, MASKED and CAUSAL
    )  # fmt: skip
    k += row * skb + g * skh + first * skt
    v += row * svb + g * svh + first * svt
    s += row * ssb + g * ssh + first * sst
    at = ((chunk if CAUSAL else seq).to(tl.int64) * G + g) * n
    states += at * 2 * D
    z = tl.load(z_before + at + slots, mask=real_slots, other=EMPTY)

    if CAUSAL and EARLY_LOGITS:
        raw_x = tl.load(s + rows[:, None] * sst + slots, mask=ok[:, None] & real_slots, other=EMPTY)
        z_end = tl.load(z_after + at + slots, mask=real_slots, other=EMPTY)
        shown = real_slots
        if MASKED:
            shown = shown & (tl.load(visible + b * sm + start + 0 * slots) != 0)
        x_first = tl.load(s + slots, mask=shown, other=EMPTY).to(tl.float32)
    # First products: q K~^T and q k^T.
    past = zeros(C, NP, CT)
    products = zeros(C, C, CT)
    if PAIR_WIDTH:
        past, products, memories, both = multiply_side_by_side(
            q, sqt, states, D, k, skt, v, svt, n, rows, inside, ok, slots, real_slots, False, PAIR_WIDTH, CT, PREC
        )
    for i in range(0, 0 if PAIR_WIDTH else D, BD):
        cols = i + tl.arange(0, BD)
        real = within(cols, D, FULL_COLUMNS)
        qd = tl.load(q + rows[:, None] * sqt + cols, mask=inside[:, None] & real, other=0.0).to(CT)
        memory = tl.load(states + slots[:, None] * D + cols, mask=real_slots[:, None] & real, other=0.0).to(CT)
        past = add_dot(qd, tl.trans(memory), past, PREC)
        if CAUSAL:
            kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            products = add_dot(qd, tl.trans(kd), products, PREC)

    if LOW_PARTS:
        of_one_key = slots_of_one_key(peak_logits + at, z, slots, real_slots, CAUSAL)
        past = add_low_parts(past, q, sqt, low_parts + at * 2 * D, D, rows, inside, slots, of_one_key, BD, CT, PREC)
    # Scores of every row and slot, their softmax, and the weights of the past's slots and the chunk's keys.
    if CAUSAL:
        if EARLY_LOGITS:
            x = raw_x.to(tl.float32)
        else:
            x = load_logits(s, sst, rows, ok, slots, real_slots)
            z_end = tl.load(z_after + at + slots, mask=real_slots, other=EMPTY)
        ref = reference_of(x, z, z_end, WIDE)
        score, _ = score_chunk(past, products, x, z, ref, ALL_WRITTEN, WIDE, LOW_PARTS, CT, PREC)
        if ALL_WRITTEN and SLOTS != NP:
            score += tl.where(real_slots, 0.0, float("-inf"))[None, :]
        if not WIDE:
            # Sums of weights only grow along the rows: the first row shows whether one reference is enough.
            if not EARLY_LOGITS:
                shown = real_slots
                if MASKED:
                    shown = shown & (tl.load(visible + b * sm + start + 0 * slots) != 0)
                x_first = tl.load(s + slots, mask=shown, other=EMPTY).to(tl.float32)
            small = tl.min(tl.where(real_slots, exp(x_first - ref) + exp(z - ref), 1.0), 0)
            flags = tl.where(small < LEAST, IS_WIDE, 0)
            if SAVE_SCORES:
                flags += KEYS_MAY_FILL * tl.max((real_slots & (z < z_end + LOG_HALF)).to(tl.int32), 0)
            tl.store(chunk_flags + chunk * G + g, flags)
        if SAVE_SCORES:
            side = ((row * G * R + h) * T + first) * n + rows[:, None] * n + slots
            tl.store(scores + side, score, mask=inside[:, None] & real_slots)
        to_past, to_own = mix_chunk(softmax_over_slots(score, scale, ALL_WRITTEN), x, z, ref, products, WIDE, CT, PREC)
    else:
        to_past = softmax_over_slots(tl.where((z > HALF_EMPTY)[None, :], past, float("-inf")), scale, False).to(CT)

    # Last products: the output.
    if PAIR_WIDTH:
        out = add_dot(to_own, both, tl.dot(to_past, memories, input_precision=PREC), PREC)
        cols = tl.arange(0, 2 * PAIR_WIDTH)
        place = o + rows[:, None] * sot + (cols - PAIR_WIDTH)
        tl.store(place, out.to(o.dtype.element_ty), mask=inside[:, None] & (cols >= PAIR_WIDTH))
    for i in range(0, 0 if PAIR_WIDTH else D, BD):
        cols = i + tl.arange(0, BD)
        real = within(cols, D, FULL_COLUMNS)
        memory = tl.load(
            states + n * D + slots[:, None] * D + cols, mask=real_slots[:, None] & real, other=0.0
        ).to(CT)  # fmt: skip
        out = tl.dot(to_past, memory, input_precision=PREC)
        if CAUSAL:
            vd = tl.load(v + rows[:, None] * svt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            out = add_dot(to_own, vd, out, PREC)
        tl.store(o + rows[:, None] * sot + cols, out.to(o.dtype.element_ty), mask=inside[:, None] & real)


# See generic_key_gradients.
generic_read_states = triton.jit(do_not_specialize=["T", "NT", "G", "R", "N", "sst"])(read_states.fn)
