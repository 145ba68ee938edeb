"""Gradients of reading, chunk by chunk, first part: dq and each query's shares of the slots."""

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
    sum_of_later_rows,
)
from attnlab.kernels.abc.control import (
    EMPTY,
    HALF_EMPTY,
    IS_WIDE,
    add_dot,
    chunk_and_head,
    chunk_masks,
    exp,
    in_full,
    inverse,
    load_logits,
    locate_chunk,
    rounded,
    within,
    zeros,
)

__all__ = ["generic_query_gradients", "query_gradients"]


@triton.jit(do_not_specialize=["T", "NT", "G", "R"])
def query_gradients(
    # inputs and the output's gradient
    q, k, v, s, do, visible,
    # saved by the forward pass
    states, low_parts, peak_logits, z_before, z_after, chunk_flags, scores,
    # written for sum_back and key_gradients
    shares, row_offsets, wide_offsets,
    # written
    dq,
    # packed sequences
    table,
    # strides
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sob, soh, sot, sdb, sdh, sdt, SHARES_STRIDE, sm,
    # sizes
    T, NT, G, R, N, D, scale,
    # tiles
    C: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr, SLOTS: tl.constexpr,
    # the call
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr, GROUPED: tl.constexpr,
    # tiles without padding
    FULL_CHUNKS: tl.constexpr, FULL_COLUMNS: tl.constexpr, ALL_WRITTEN: tl.constexpr,
    # which chunks, and when loads begin
    WIDE: tl.constexpr, EARLY_LOGITS: tl.constexpr, EARLY_SCORES: tl.constexpr, SCORES_WITH_LOGITS: tl.constexpr,
    # numbers
    LOW_PARTS: tl.constexpr, PAIR_WIDTH: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq; the shares g / weight and p / weight of each query and slot; and the row offsets.

    A row offset is sum_{t >= i} (share_t S_t + share_t dP_t) over the chunk's rows. Shares are relative to z after the
    chunk. In a wide chunk they are relative to z before it, and dP stands in place of the row offsets.

    EARLY_LOGITS loads logits before the first products, and EARLY_SCORES the scores; SCORES_WITH_LOGITS loads the
    scores after these products, and without both flags they are loaded last. The other constants are those of
    ``read_states``.
    """
    # Where the chunk lies, and the masks of its rows and slots.
    heads = G * R
    chunk, h = chunk_and_head(heads, GROUPED)
    g_head = h // R
    n = SLOTS if SLOTS else N
    if WIDE and (tl.load(chunk_flags + chunk * G + g_head) & IS_WIDE) == 0:
        return
    b, seq, start, length = locate_chunk(chunk, table, T, NT, C, PACKED)
    if PACKED and length == 0:
        return
    first, row = start.to(tl.int64), b.to(tl.int64)
    q += row * sqb + h * sqh + first * sqt
    do += row * sob + h * soh + first * sot
    dq += row * sdb + h * sdh + first * sdt
    rows, slots, inside, ok, real_slots = chunk_masks(
        length, visible, b, sm, start, n, C, NP, FULL_CHUNKS, SLOTS == NP, MASKED and CAUSAL
    )  # fmt: skip
    kept = inside[:, None] & real_slots
    k += row * skb + g_head * skh + first * skt
    v += row * svb + g_head * svh + first * svt
    s += row * ssb + g_head * ssh + first * sst
    at = ((chunk if CAUSAL else seq).to(tl.int64) * G + g_head) * n
    states += at * 2 * D
    z = tl.load(z_before + at + slots, mask=real_slots, other=EMPTY)

    side = ((row * heads + h) * T + first) * n
    spot = rows[:, None] * n + slots
    if EARLY_LOGITS:
        raw_x = tl.load(s + rows[:, None] * sst + slots, mask=ok[:, None] & real_slots, other=EMPTY)
        z_end = tl.load(z_after + at + slots, mask=real_slots, other=EMPTY)
    if EARLY_SCORES:
        raw_score = tl.load(scores + side + spot, mask=kept, other=float("-inf"))
    # First products: do V~^T and do v^T; without causal also q K~^T, since scores are not saved.
    past_k = zeros(C, NP, CT)
    past_v = past_k
    own_v = zeros(C, C, CT)
    if PAIR_WIDTH:
        past_v, own_v, memories, both = multiply_side_by_side(
            do, sot, states, D, k, skt, v, svt, n, rows, inside, ok, slots, real_slots, True, PAIR_WIDTH, CT, PREC
        )
    for i in range(0, 0 if PAIR_WIDTH else D, BD):
        cols = i + tl.arange(0, BD)
        real = within(cols, D, FULL_COLUMNS)
        query_mask = inside[:, None] & real
        state_mask = real_slots[:, None] & real
        dod = tl.load(do + rows[:, None] * sot + cols, mask=query_mask, other=0.0).to(CT)
        place = slots[:, None] * D + cols
        memory_v = tl.load(states + n * D + place, mask=state_mask, other=0.0).to(CT)
        past_v = add_dot(dod, tl.trans(memory_v), past_v, PREC)
        if CAUSAL:
            vd = tl.load(v + rows[:, None] * svt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            own_v = add_dot(dod, tl.trans(vd), own_v, PREC)
        else:
            qd = tl.load(q + rows[:, None] * sqt + cols, mask=query_mask, other=0.0).to(CT)
            memory_k = tl.load(states + place, mask=state_mask, other=0.0).to(CT)
            past_k = add_dot(qd, tl.trans(memory_k), past_k, PREC)

    if LOW_PARTS:
        of_one_key = slots_of_one_key(peak_logits + at, z, slots, real_slots, CAUSAL)
        low_parts += at * 2 * D
        past_v = add_low_parts(past_v, do, sot, low_parts + n * D, D, rows, inside, slots, of_one_key, BD, CT, PREC)
        if not CAUSAL:
            past_k = add_low_parts(past_k, q, sqt, low_parts, D, rows, inside, slots, of_one_key, BD, CT, PREC)
    # Scores S and their gradient dP.
    if CAUSAL:
        if EARLY_LOGITS:
            x = raw_x.to(tl.float32)
        else:
            x = load_logits(s, sst, rows, ok, slots, real_slots)
            z_end = tl.load(z_after + at + slots, mask=real_slots, other=EMPTY)
        if SCORES_WITH_LOGITS:
            raw_score = tl.load(scores + side + spot, mask=kept, other=float("-inf"))
        ref = reference_of(x, z, z_end, WIDE)
        dp, total = score_chunk(past_v, own_v, x, z, ref, ALL_WRITTEN, WIDE, LOW_PARTS, CT, PREC)
        if not EARLY_SCORES and not SCORES_WITH_LOGITS:
            tl.debug_barrier()
            raw_score = tl.load(scores + side + spot, mask=kept, other=float("-inf"))
        # The condition always holds. It gives the scores, and so the softmax, the register layout of the product.
        score = tl.where(total >= 0, raw_score, float("-inf"))
    else:
        score = tl.where((z > HALF_EMPTY)[None, :] & inside[:, None], past_k, float("-inf"))
        dp = past_v
    if not ALL_WRITTEN:
        empty = score == float("-inf")
        dp = tl.where(empty, 0.0, dp)
    # The softmax, its gradient, and the shares.
    p = softmax_over_slots(score, scale, ALL_WRITTEN)
    if not ALL_WRITTEN:
        score = tl.where(empty, 0.0, score)
    middle = tl.sum(p * dp, 1)[:, None]
    if CAUSAL and not WIDE:
        p = p * inverse(total)
        p_share = rounded(p, CT)
        grad = p * ((dp - middle) * scale)
        share = rounded(grad, CT)
        if NP <= 64:
            grad_past = (grad * exp(z - ref)[None, :]).to(CT)
        _store_shares(shares + side + spot, share, p_share, SHARES_STRIDE, kept)
        taken = in_full(share, CT) * score + in_full(p_share, CT) * dp
        if NP > 64:
            # From the rounded shares: there are too few registers to keep the gradient itself.
            grad_past = (in_full(share, CT) * exp(z - ref)[None, :]).to(CT)
        grad_own = tl.dot(share, tl.trans(exp(x - ref[None, :]).to(CT)), input_precision=PREC)
        tl.store(row_offsets + side + spot, sum_of_later_rows(taken, grad_own, CT, PREC), mask=kept)
        grad_own = tl.where(rows[:, None] >= rows, grad_own, 0.0).to(CT)
    else:
        grad = p * ((dp - middle) * scale)
        if CAUSAL:
            grad_past, grad_own = mix_chunk(grad, x, z, ref, own_v, WIDE, CT, PREC)
            p_share, _ = mix_chunk(p, x, z, ref, own_v, WIDE, CT, PREC)
            tl.store(row_offsets + side + spot, dp, mask=kept)
        else:
            grad_past = grad.to(CT)
            p_share = p.to(CT)
        share = grad_past
        c = tl.sum(in_full(share, CT) * score + in_full(p_share, CT) * dp, 0)
        tl.store(wide_offsets + (chunk.to(tl.int64) * heads + h) * n + slots, c, mask=real_slots)
        _store_shares(shares + side + spot, share, p_share, SHARES_STRIDE, kept)

    # Last products: dq.
    if PAIR_WIDTH:
        out = add_dot(grad_own, both, tl.dot(grad_past, memories, input_precision=PREC), PREC)
        cols = tl.arange(0, 2 * PAIR_WIDTH)
        tl.store(
            dq + rows[:, None] * sdt + cols, out.to(dq.dtype.element_ty), mask=inside[:, None] & (cols < PAIR_WIDTH)
        )
    for i in range(0, 0 if PAIR_WIDTH else D, BD):
        cols = i + tl.arange(0, BD)
        real = within(cols, D, FULL_COLUMNS)
        state_mask = real_slots[:, None] & real
        memory = tl.load(states + slots[:, None] * D + cols, mask=state_mask, other=0.0).to(CT)
        out = tl.dot(grad_past, memory, input_precision=PREC)
        if CAUSAL:
            kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            out = add_dot(grad_own, kd, out, PREC)
        tl.store(dq + rows[:, None] * sdt + cols, out.to(dq.dtype.element_ty), mask=inside[:, None] & real)


@triton.jit
def _store_shares(place, share, p_share, SHARES_STRIDE, kept):
    """Store both shares. Stored later, they would be kept in two register layouts until then."""
    tl.store(place, share.to(place.dtype.element_ty), mask=kept)
    tl.store(place + SHARES_STRIDE, p_share.to(place.dtype.element_ty), mask=kept)


# For wide chunks of more than 128 slots, like ``generic_key_gradients``.
generic_query_gradients = triton.jit(do_not_specialize=["T", "NT", "G", "R", "N", "sst"])(query_gradients.fn)
