"""Gradients of reading, chunk by chunk, last part: dk, dv and ds, from the shares of the queries and their sums."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.abc.chunk import (
    add_against,
    back_chunk,
    dot_parts,
    load_half_row,
    load_side_by_side,
    mix_chunk,
    reference_of,
    softmax_gradients,
)
from attnlab.kernels.abc.control import (
    EMPTY,
    HALF_EMPTY,
    IS_WIDE,
    add_dot,
    chunk_masks,
    exp,
    in_full,
    load_logits,
    locate_chunk,
    within,
    zeros,
)

__all__ = ["generic_key_gradients", "key_gradients"]


@triton.jit(do_not_specialize=["T", "NT", "G", "PARTS"])
def key_gradients(
    # inputs and the output's gradient
    q, k, v, s, do, visible,
    # saved by the forward pass
    z_before, z_after, chunk_flags, scores,
    # from query_gradients
    shares, row_offsets,
    # from sum_back
    sums, offsets,
    # written
    dk, dv, ds,
    # packed sequences
    table,
    # strides
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sob, soh, sot, SHARES_STRIDE, sm,
    # sizes
    T, NT, G, N, D, PARTS, scale,
    # tiles
    C: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr, SLOTS: tl.constexpr, R: tl.constexpr,
    # the call
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr,
    # tiles without padding
    FULL_CHUNKS: tl.constexpr, FULL_COLUMNS: tl.constexpr, ALL_COLUMNS: tl.constexpr,
    # which chunks
    WIDE: tl.constexpr,
    # numbers
    LOW_PARTS: tl.constexpr, SUMS_IN_FULL: tl.constexpr, PAIR_WIDTH: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk, dv and ds of a chunk, from all query heads of its key head. ``offsets`` come in PARTS, at most 8.

    ALL_COLUMNS takes all columns of a head at once. PAIR_WIDTH, if it is not 0, takes those of keys and values at once
    (see ``load_side_by_side``). LOW_PARTS gives products a second part for what rounding takes, except in the gradients
    that queries give the keys of wider heads. SUMS_IN_FULL says that sums have more digits than CT.
    """
    # Where the chunk lies, and the masks of its rows and slots.
    chunk, g = tl.program_id(0), tl.program_id(1)
    n = SLOTS if SLOTS else N
    if WIDE and (tl.load(chunk_flags + chunk * G + g) & IS_WIDE) == 0:
        return
    b, seq, start, length = locate_chunk(chunk, table, T, NT, C, PACKED)
    if PACKED and length == 0:
        return
    first, row = start.to(tl.int64), b.to(tl.int64)
    rows, slots, inside, ok, real_slots = chunk_masks(
        length, visible, b, sm, start, n, C, NP, FULL_CHUNKS, SLOTS == NP, MASKED
    )  # fmt: skip
    kept = inside[:, None] & real_slots
    # Where the group's first query head has its shares; those of the next head are T rows further.
    side = ((row * G + g) * R * T + first) * n
    spot = rows[:, None] * n + slots
    x = load_logits(s + row * ssb + g * ssh + first * sst, sst, rows, ok, slots, real_slots)
    at = (chunk if CAUSAL else seq).to(tl.int64) * G + g
    z = tl.load(z_before + at * n + slots, mask=real_slots, other=EMPTY)
    z_end = tl.maximum(tl.load(z_after + at * n + slots, mask=real_slots, other=EMPTY), HALF_EMPTY) if CAUSAL else z
    ref = reference_of(x, z, z_end, WIDE) if CAUSAL else tl.maximum(z, HALF_EMPTY)
    weight = exp(tl.minimum(x - z_end[None, :], 0.0) if WIDE or not CAUSAL else x - ref[None, :]).to(CT)
    # ``after`` sums the gradients of logits before the factor ``weight``: minus the offsets, plus products with shares
    # and sums. ``logits`` has what the queries of a wide chunk give its own logits.
    of_c = tl.arange(0, 8)[:, None]
    c = tl.load(offsets + (at * PARTS + of_c) * n + slots, mask=(of_c < PARTS) & real_slots, other=0.0)
    after = zeros(C, NP, CT) - tl.sum(c, 0)[None, :]
    logits = zeros(C, NP, CT)
    if CAUSAL and not WIDE:
        for r in range(R):
            after -= tl.load(row_offsets + side + r * T * n + spot, mask=kept, other=0.0)
    # Keys and values in one tile.
    if PAIR_WIDTH:
        raw = load_side_by_side(sums + 2 * at * n * D, D, sums + (2 * at + 1) * n * D, D, slots, real_slots, PAIR_WIDTH)
        both = load_side_by_side(
            k + row * skb + g * skh + first * skt, skt, v + row * svb + g * svh + first * svt, svt, rows, ok, PAIR_WIDTH
        ).to(CT)  # fmt: skip
        out = zeros(C, 2 * PAIR_WIDTH, CT)
        for r in range(R):
            share = tl.load(shares + side + r * T * n + spot, mask=kept, other=0.0).to(CT)
            ad = load_half_row(
                q + row * sqb + (g * R + r) * sqh + first * sqt, sqt, rows, inside, False, PAIR_WIDTH
            ).to(CT)
            after = _add_to_logits(both, ad, share, after, LOW_PARTS, PREC)
            out = _add_to_keys(share, weight, ad, out, LOW_PARTS, PREC)
            share = tl.load(shares + SHARES_STRIDE + side + r * T * n + spot, mask=kept, other=0.0).to(CT)
            ad = load_half_row(
                do + row * sob + (g * R + r) * soh + first * sot, sot, rows, inside, True, PAIR_WIDTH
            ).to(CT)
            after = _add_to_logits(both, ad, share, after, LOW_PARTS, PREC)
            out = _add_to_keys(share, weight, ad, out, LOW_PARTS, PREC)
        after = add_against(both, raw, after, SUMS_IN_FULL, CT, PREC)
        out = add_dot(weight, raw.to(CT), out, PREC)
        cols = tl.arange(0, 2 * PAIR_WIDTH)
        line = ((row * G + g) * T + first + rows)[:, None] * D
        place = tl.where((cols < PAIR_WIDTH)[None, :], dk + line + cols, dv + line + (cols - PAIR_WIDTH))
        tl.store(place, out.to(dk.dtype.element_ty), mask=inside[:, None] & (cols >= 0))
    # Keys, then values: from the chunk's own queries by pairs, and from later ones by their sums.
    for which in tl.static_range(0 if PAIR_WIDTH else 2):
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
        own_shares = shares + which * SHARES_STRIDE + side + spot
        to += ((row * G + g) * T + first) * D
        if ALL_COLUMNS:
            cols = tl.arange(0, BD)
            real = within(cols, D, FULL_COLUMNS)
            # All loads begin before the first product.
            share = tl.load(own_shares, mask=kept, other=0.0).to(CT)
            raw = tl.load(memory + slots[:, None] * D + cols, mask=real_slots[:, None] & real, other=0.0)
            kd = tl.load(keys + rows[:, None] * step + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            ad = tl.load(a + rows[:, None] * down + cols, mask=inside[:, None] & real, other=0.0).to(CT)
            after = _add_to_logits(kd, ad, share, after, LOW_PARTS, PREC)
            to_own, to_own_low = _own_shares(share, weight, PREC)
            after = add_against(kd, raw, after, SUMS_IN_FULL, CT, PREC)
            out = tl.dot(weight, raw.to(CT), input_precision=PREC)
            out = _add_parts(to_own, to_own_low, ad, out, LOW_PARTS, PREC)
            for r in range(1, R):
                share = tl.load(own_shares + r * T * n, mask=kept, other=0.0).to(CT)
                place = a + r * across + rows[:, None] * down + cols
                ad = tl.load(place, mask=inside[:, None] & real, other=0.0).to(CT)
                after = _add_to_logits(kd, ad, share, after, LOW_PARTS, PREC)
                out = _add_to_keys(share, weight, ad, out, LOW_PARTS, PREC)
            tl.store(to + rows[:, None] * D + cols, out.to(to.dtype.element_ty), mask=inside[:, None] & real)
        to_own = tl.zeros([C, C], CT)
        if CAUSAL and not ALL_COLUMNS:
            for r in range(R):
                if not WIDE:
                    share = tl.load(own_shares + r * T * n, mask=kept, other=0.0).to(CT)
                pairs = zeros(C, C, CT)
                for i in range(0, D, BD):
                    cols = i + tl.arange(0, BD)
                    query_mask, key_mask = (
                        inside[:, None] & within(cols, D, FULL_COLUMNS),
                        ok[:, None] & within(cols, D, FULL_COLUMNS),
                    )
                    ad = tl.load(a + r * across + rows[:, None] * down + cols, mask=query_mask, other=0.0)
                    kd = tl.load(keys + rows[:, None] * step + cols, mask=key_mask, other=0.0)
                    pairs = add_dot(kd.to(CT), tl.trans(ad.to(CT)), pairs, PREC)
                if WIDE:
                    score = tl.load(scores + side + r * T * n + spot, mask=kept, other=float("-inf"))
                    dp = tl.load(row_offsets + side + r * T * n + spot, mask=kept, other=0.0)
                    y, other = _share_factors(which, score, dp, scale)
                    to_own, part = back_chunk(pairs, y, other, x, z, ref, LOW_PARTS, CT, PREC)
                    logits += part
                else:
                    pairs = tl.where(rows[:, None] <= rows, pairs, 0.0)
                    after = dot_parts(pairs, share, after, LOW_PARTS, PREC)
                    to_own, _ = _own_shares(share, weight, PREC)
        for i in range(0, 0 if ALL_COLUMNS else D, BD):
            cols = i + tl.arange(0, BD)
            real = within(cols, D, FULL_COLUMNS)
            raw = tl.load(memory + slots[:, None] * D + cols, mask=real_slots[:, None] & real, other=0.0)
            kd = tl.load(keys + rows[:, None] * step + cols, mask=ok[:, None] & real, other=0.0).to(CT)
            after = add_against(kd, raw, after, SUMS_IN_FULL, CT, PREC)
            out = tl.dot(weight, raw.to(CT), input_precision=PREC)
            if CAUSAL:
                for r in range(R):
                    if R > 1:
                        # Computed again: there are too few registers to keep those of all heads.
                        if WIDE:
                            score = tl.load(scores + side + r * T * n + spot, mask=kept, other=float("-inf"))
                            dp = tl.load(row_offsets + side + r * T * n + spot, mask=kept, other=0.0)
                            y, _ = _share_factors(which, score, dp, scale)
                            _, to_own = mix_chunk(y, x, z, ref, zeros(C, C, CT), WIDE, CT, PREC)
                            to_own = tl.trans(to_own)
                        else:
                            share = tl.load(own_shares + r * T * n, mask=kept, other=0.0).to(CT)
                            to_own, _ = _own_shares(share, weight, PREC)
                    place = a + r * across + rows[:, None] * down + cols
                    ad = tl.load(place, mask=inside[:, None] & real, other=0.0).to(CT)
                    out = add_dot(to_own, ad, out, PREC)
            tl.store(to + rows[:, None] * D + cols, out.to(to.dtype.element_ty), mask=inside[:, None] & real)
    # The gradients of the logits.
    after = after * in_full(weight, CT)
    if WIDE:
        after += logits
    tl.store(ds + ((row * G + g) * T + first) * n + spot, after.to(ds.dtype.element_ty), mask=kept)


@triton.jit
def _add_to_logits(keys, ad, share, after, LOW_PARTS: tl.constexpr, PREC: tl.constexpr):
    """``after`` plus what the queries of one head give the logits of their own chunk."""
    rows = tl.arange(0, share.shape[0])
    pairs = tl.where(rows[:, None] <= rows, tl.dot(keys, tl.trans(ad), input_precision=PREC), 0.0)
    return dot_parts(pairs, share, after, LOW_PARTS, PREC)


@triton.jit
def _add_to_keys(share, weight, ad, out, LOW_PARTS: tl.constexpr, PREC: tl.constexpr):
    """``out`` plus what the queries of one head give the keys of their own chunk."""
    to_own, to_own_low = _own_shares(share, weight, PREC)
    return _add_parts(to_own, to_own_low, ad, out, LOW_PARTS, PREC)


@triton.jit
def _add_parts(high, low, ad, out, LOW_PARTS: tl.constexpr, PREC: tl.constexpr):
    """out + high ad, and + low ad with LOW_PARTS."""
    out = add_dot(high, ad, out, PREC)
    if LOW_PARTS:
        out = add_dot(low, ad, out, PREC)
    return out


@triton.jit
def _own_shares(share, weight, PREC: tl.constexpr):
    """The share that each query of a chunk has of each of its keys (keys by rows), rounded, and what rounding takes."""
    rows = tl.arange(0, share.shape[0])
    own = tl.where(rows[:, None] >= rows, tl.dot(share, tl.trans(weight), input_precision=PREC), 0.0)
    high = own.to(share.dtype)
    return tl.trans(high), tl.trans((own - high.to(tl.float32)).to(share.dtype))


@triton.jit
def _share_factors(which: tl.constexpr, score, dp, scale):
    """From S and dP: g and S for the keys, p and dP for the values."""
    empty = score == float("-inf")
    dp = tl.where(empty, 0.0, dp)
    p, grad = softmax_gradients(score, dp, scale, False)
    if which == 0:
        return grad, tl.where(empty, 0.0, score)
    return p, dp


# For wide chunks of more than 128 slots, one kernel for all strides and numbers of slots: Triton 3.6 fails to lay out
# key_gradients of rows that it knows to be multiples of 16.
generic_key_gradients = triton.jit(do_not_specialize=["T", "NT", "G", "N", "PARTS", "sst"])(key_gradients.fn)
