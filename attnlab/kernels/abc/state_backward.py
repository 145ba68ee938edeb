"""The sums of the backward pass along a sequence: what later queries give the slots, walked from the last chunk.

Tiles, segments and STAGE are those of state.py.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.abc.control import (
    EMPTY,
    HALF_EMPTY,
    IS_WIDE,
    KEYS_MAY_FILL,
    LOG_HALF,
    add_dot,
    exp,
    in_full,
    rounded,
    within,
    zeros,
)
from attnlab.kernels.abc.state import program_tile, segment_chunks

__all__ = ["sum_back"]


@triton.jit(do_not_specialize=["T", "NT", "G", "SEGMENTS"])
def sum_back(
    # inputs and the output's gradient
    q, do,
    # saved by the forward pass
    states, z_before, z_after, chunk_flags,
    # the last state
    last_k, last_v,
    # from query_gradients
    shares, row_offsets, wide_offsets,
    # written for each chunk, if causal
    sums, offsets,
    # what queries after the last token give, and the sums over all queries, which are written
    seeds, seed_offsets, first_sums, first_offsets,
    # totals of the segments
    part_sums, part_offsets, part_fades,
    # packed sequences
    bounds, cu,
    # strides
    sqb, sqh, sqt, sob, soh, sot, SHARES_STRIDE,
    # sizes
    T, NT, G, N, D, SEGMENTS,
    # tiles
    C: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, R: tl.constexpr,
    # passes over segments
    STAGE: tl.constexpr, JOIN_SEGMENTS: tl.constexpr, SKIPPED: tl.constexpr,
    # the call
    SEEDED: tl.constexpr, DECAY: tl.constexpr, PACKED: tl.constexpr,
    # tiles without padding
    FULL_CHUNKS: tl.constexpr, FULL_SLOTS: tl.constexpr, FULL_COLUMNS: tl.constexpr,
    # numbers
    CORRECT_SUMS: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """What all queries after a chunk give its slots: sum_t share_t q_t (and do_t), relative to z after the chunk.

    STAGE is that of ``write_states``; this walk goes from the last chunk to the first. Without DECAY all queries read
    one state, and the shares are relative to nothing. ``offsets`` takes the sums of share_t S_t + share_t dP_t.

    Sums are stored rounded, and the gradient of a key's logit is k_i sums - offset. Where one key fills a slot the two
    nearly cancel. CORRECT_SUMS adds to the offset what rounding adds to K~ sums, a part for each tile: the rounding
    then gives a logit (k_i - K~) times its error, which is little exactly there. It is done only for slots that a key
    of the chunk may fill, those of which at most half is older than the chunk; often there are none.
    """
    # Which tile of which sums this program has.
    row, segment, which, slots, cols, lead = program_tile(SEGMENTS - SKIPPED if STAGE != "join" else 1, N, D, BN, BD, 0)
    segment += SKIPPED
    seq, g, mine = row // G, row % G, row.to(tl.int64) * N
    ok, real = within(slots, N, FULL_SLOTS), within(cols, D, FULL_COLUMNS)
    wanted, place = ok[:, None] & real, slots[:, None] * D + cols
    # The sums after the last chunk: zero, or the seeds, then joined with later segments' totals.
    acc = zeros(BN, BD, CT)
    c = in_full(tl.zeros([BN], tl.float32), CT)
    fade = in_full(tl.full([BN], 1.0, tl.float32), CT)
    if SEEDED and STAGE != "part":
        acc = in_full(tl.load(seeds + (2 * mine + which * N) * D + place, mask=wanted, other=0.0), CT)
        c = in_full(tl.load(seed_offsets + mine + slots, mask=ok, other=0.0), CT)
    if JOIN_SEGMENTS:
        for i in range(SEGMENTS if STAGE == "join" else SEGMENTS - 1 - segment):
            at = mine * SEGMENTS + (SEGMENTS - 1 - i) * N
            old = tl.load(part_fades + at + slots, mask=ok, other=0.0)
            c = c * old + tl.load(part_offsets + at + slots, mask=ok, other=0.0)
            acc = acc * old[:, None] + tl.load(part_sums + (2 * at + which * N) * D + place, mask=wanted, other=0.0)
    # Along the chunks, from the last: store the sums after each, then add what its own queries give.
    if STAGE != "join":
        b, head, count, begin, end, start, length = segment_chunks(seq, segment, SEGMENTS, NT, T, bounds, cu, PACKED)
        first = b.to(tl.int64) * G * R + g * R
        if which == 0:
            source = q + b.to(tl.int64) * sqb + g * R * sqh + start.to(tl.int64) * sqt
            across, heads = sqt, sqh
        else:
            source = do + b.to(tl.int64) * sob + g * R * soh + start.to(tl.int64) * sot
            across, heads = sot, soh
        side = (first * T + start) * N
        taken = shares + which.to(tl.int64) * SHARES_STRIDE + side
        final = (head + end - 1).to(tl.int64) * G + g
        z, z_end, is_wide, own, own_wide = _load_chunk_ahead(
            z_before,
            z_after,
            chunk_flags,
            row_offsets + side,
            wide_offsets,
            final,
            end - 1,
            begin,
            T,
            N,
            slots,
            lead,
            C,
            R,
            DECAY,
        )
        z_1, z_end_1, is_wide_1, own_1, own_wide_1 = _load_chunk_ahead(
            z_before,
            z_after,
            chunk_flags,
            row_offsets + side,
            wide_offsets,
            final - G,
            end - 2,
            begin,
            T,
            N,
            slots,
            lead,
            C,
            R,
            DECAY,
        )
        if CORRECT_SUMS and STAGE == "keep":
            tiles = 2 * tl.cdiv(D, BD)
            offsets += tl.program_id(0) % tiles * N
            # The state after the segment, as far as it is needed.
            last = tl.where(which == 0, last_k, last_v)
            fresh = ok & (z < z_end + LOG_HALF)
            no_more, more = slots < tl.where(end == count, N, 0), slots < tl.where(end < count, N, 0)
            no_more, more = fresh & no_more, fresh & more
            memory = tl.load(
                states + (2 * (final + G) + which) * N * D + place, mask=more[:, None] & real, other=0.0
            )  # fmt: skip
            memory += tl.load(last + mine * D + place, mask=no_more[:, None] & real, other=0.0).to(memory.dtype)
            may_fill = tl.load(chunk_flags + final, mask=end > begin, other=0) & KEYS_MAY_FILL
        for j in range(begin, end):
            i = begin + end - 1 - j
            chunk = (head + i).to(tl.int64) * G + g
            # Loaded two chunks ahead, which hides their latency.
            z_2, z_end_2, is_wide_2, own_2, own_wide_2 = _load_chunk_ahead(
                z_before,
                z_after,
                chunk_flags,
                row_offsets + side,
                wide_offsets,
                chunk - 2 * G,
                i - 2,
                begin,
                T,
                N,
                slots,
                lead,
                C,
                R,
                DECAY,
            )
            if STAGE == "keep":
                kept = rounded(acc, sums.dtype.element_ty)
                tl.store(sums + (2 * chunk + which) * N * D + place, kept, mask=wanted)
                if CORRECT_SUMS:
                    error = tl.zeros([BN], tl.float32)
                    if may_fill != 0:
                        error = tl.sum((kept.to(tl.float32) - acc) * memory.to(tl.float32), 1)
                    tl.store(offsets + chunk * tiles * N + slots, tl.where(lead, c, 0.0) + error, mask=ok)
                    # For the next turn, which is the chunk before this one.
                    fresh = ok & (z_1 < z_end_1 + LOG_HALF)
                    memory = tl.load(
                        states + (2 * chunk + which) * N * D + place, mask=fresh[:, None] & real, other=0.0
                    )  # fmt: skip
                    may_fill = tl.load(chunk_flags + chunk - G, mask=i > begin, other=0) & KEYS_MAY_FILL
                else:
                    tl.store(offsets + chunk * N + slots, c, mask=lead)
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
            in_sequence = within(rows, length, FULL_CHUNKS)
            rows = rows.to(tl.int64)
            for r in range(R):
                share = tl.load(
                    taken + (r * T + rows)[:, None] * N + slots, mask=in_sequence[:, None] & ok, other=0.0
                ).to(CT)  # fmt: skip
                x = tl.load(
                    source + r * heads + rows[:, None] * across + cols, mask=in_sequence[:, None] & real, other=0.0
                ).to(CT)  # fmt: skip
                acc = add_dot(tl.trans(share), x, acc, PREC)
            if DECAY:
                acc = acc * late[:, None]
            z, z_end, is_wide, own, own_wide = z_1 + 0.0, z_end_1 + 0.0, is_wide_1 + 0.0, own_1 + 0.0, own_wide_1 + 0.0
            z_1, z_end_1, is_wide_1, own_1, own_wide_1 = z_2, z_end_2, is_wide_2, own_2, own_wide_2
    # The segment's total, or the sums over all queries.
    if STAGE == "part":
        at = mine * SEGMENTS + segment * N
        tl.store(part_sums + (2 * at + which * N) * D + place, acc, mask=wanted)
        tl.store(part_offsets + at + slots, c, mask=lead)
        tl.store(part_fades + at + slots, fade, mask=lead)
    elif segment == 0:
        tl.store(first_sums + (2 * mine + which * N) * D + place, acc, mask=wanted)
        tl.store(first_offsets + mine + slots, c, mask=lead)


@triton.jit
def _load_chunk_ahead(
    z_before, z_after, chunk_flags, row_offsets, wide_offsets, chunk, i, begin, T, N, slots, lead,
    C: tl.constexpr, R: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """A chunk's z before and after it, whether it is wide (as a number for each slot), and its own offsets.

    There are two of the latter: those of a chunk that is not wide, and those of one that is. Chunks before ``begin``
    give zeros.
    """
    some = slots < tl.where(i >= begin, N, 0)
    own = tl.zeros(slots.shape, tl.float32)
    own_wide = tl.zeros(slots.shape, tl.float32)
    for r in tl.static_range(R):
        own_wide += tl.load(wide_offsets + (chunk * R + r) * N + slots, mask=some & lead, other=0.0)
        if DECAY:
            # Row offsets are sums over later rows, so the first row has that of the whole chunk.
            own += tl.load(row_offsets + (r * T + i.to(tl.int64) * C) * N + slots, mask=some & lead, other=0.0)
    z = own
    z_end = own
    is_wide = own
    if DECAY:
        z = tl.load(z_before + chunk * N + slots, mask=some, other=EMPTY)
        z_end = tl.load(z_after + chunk * N + slots, mask=some, other=EMPTY)
        is_wide = (tl.load(chunk_flags + chunk + 0 * slots, mask=some, other=0) & IS_WIDE).to(tl.float32)
    return z, z_end, is_wide, own, own_wide
