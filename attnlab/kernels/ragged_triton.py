"""The kernels of ``ragged``: queries of each head over keys whose number differs by head; one more key of each."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["append_token", "combine_parts", "read_part"]

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def read_part(
    q, keys, values, bias, columns, visible, starts, counts,
    # written: the output, or the parts' outputs, greatest scores and sums of weights
    o, part_o, part_top, part_sum,
    # strides, svb and svt of ``visible``; key heads, queries, parts that fit into the tensors of parts
    sqb, sqh, sqt, sob, soh, sot, svb, svt, G, N, PARTS, scale,
    # tiles: query heads of a key head, rows, columns of keys and of values, keys at a time and in all; with padding
    R: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    BN: tl.constexpr, SPAN: tl.constexpr,
    # the call
    MANY: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr, EACH: tl.constexpr, COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Keys [SPAN part, SPAN (part + 1)) of one segment, for the R query heads that read it.

    MANY: row i of all N R is query i // R of head i % R, and a program has RP of them; query j sees the first
    count - N + j + 1 keys. Otherwise there is one query, and a program has all of its R heads.
    MASKED: what a row's queries see is said by column of the text, key i of a segment being column i unless COLUMNS;
    EACH: for each query. WHOLE: no segment has a second part, so that the output is written at once.
    """
    segment, part = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + segment)
    first = part * SPAN
    if (first >= count) & (part > 0):
        return
    b, g = segment // G, segment % G
    here = tl.minimum(count - first, SPAN)
    # Places times columns may exceed 32 bits.
    start = tl.load(starts + segment).to(tl.int64) + first
    keys += start * D
    values += start * E
    numbers, dims, cols = tl.arange(0, RP), tl.arange(0, BD), tl.arange(0, BE)
    in_dims, in_cols = dims < D, cols < E
    if MANY:
        numbers += tl.program_id(2) * RP
        queries, heads, real = numbers // R, numbers % R, numbers < N * R
        # The place of the last key that each query sees; no key behind all of them is read.
        last = count - N + queries - first
        here = tl.minimum(here, tl.max(tl.where(real, last, -1), 0) + 1)
        rows = (b.to(tl.int64) * sqb + (g * R + heads) * sqh + queries.to(tl.int64) * sqt)[:, None]
    else:
        heads, real = numbers, numbers < R
        rows = (b.to(tl.int64) * sqb + (g * R + heads) * sqh)[:, None]
    query = tl.load(q + rows + dims[None, :], mask=real[:, None] & in_dims[None, :], other=0.0)
    top = tl.full([RP], float("-inf"), tl.float32)
    total = tl.zeros([RP], tl.float32)
    out = tl.zeros([RP, BE], tl.float32)
    for i in range(0, here, BN):
        at = i + tl.arange(0, BN)
        there = at < here
        if BIASED:
            added = tl.load(bias + start + at, mask=there, other=float("-inf"))
            there = there & (added > float("-inf"))
        if MASKED:
            column = first + at
            if COLUMNS:
                column = tl.load(columns + start + at, mask=there, other=0)
            shown = visible + b.to(tl.int64) * svb
            if EACH:
                each = (shown + queries.to(tl.int64) * svt)[:, None] + column[None, :]
                seen = tl.load(each, mask=real[:, None] & there[None, :], other=0) != 0
                # What no query sees may be anything.
                there = there & (tl.max(seen.to(tl.int32), 0) > 0)
            else:
                there = there & (tl.load(shown + column, mask=there, other=0) != 0)
        key = tl.load(keys + at[:, None] * D + dims[None, :], mask=there[:, None] & in_dims[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PREC) * (scale * LOG2E)
        if BIASED:
            scores += added[None, :] * LOG2E
        scores = tl.where(there[None, :], scores, float("-inf"))
        if MANY:
            scores = tl.where(at[None, :] <= last[:, None], scores, float("-inf"))
        if EACH:
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        value = tl.load(values + at[:, None] * E + cols[None, :], mask=there[:, None] & in_cols[None, :], other=0.0)
        out = out * shrink[:, None] + tl.dot(p.to(value.dtype), value, input_precision=PREC)
        top = higher
    mine = real[:, None] & in_cols[None, :]
    if WHOLE:
        out = out / tl.where(total > 0, total, 1.0)[:, None]
        if MANY:
            rows = (b.to(tl.int64) * sob + (g * R + heads) * soh + queries.to(tl.int64) * sot)[:, None]
        else:
            rows = (b.to(tl.int64) * sob + (g * R + heads) * soh)[:, None]
        tl.store(o + rows + cols[None, :], out.to(o.dtype.element_ty), mask=mine)
    else:
        at_part = (segment.to(tl.int64) * PARTS + part) * R * N + numbers
        tl.store(part_o + at_part[:, None] * E + cols[None, :], out, mask=mine)
        tl.store(part_top + at_part, top, mask=real)
        tl.store(part_sum + at_part, total, mask=real)


@triton.jit
def combine_parts(
    part_o, part_top, part_sum, counts, o,
    sob, soh, sot, G, N, PARTS,
    R: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The output of one query of one head from the parts of its segment."""
    segment, r, query = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, g = segment // G, segment % G
    parts = tl.cdiv(tl.maximum(tl.load(counts + segment), 1), SPAN)
    cols = tl.arange(0, BE)
    in_cols = cols < E
    top = float("-inf")
    total = 0.0
    out = tl.zeros([BE], tl.float32)
    for i in range(0, parts, BP):
        part = i + tl.arange(0, BP)
        there = part < parts
        at = (segment.to(tl.int64) * PARTS + part) * R * N + query * R + r
        tops = tl.load(part_top + at, mask=there, other=float("-inf"))
        higher = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(tops - safe)
        shrink = tl.exp2(top - safe)
        sums = tl.load(part_sum + at, mask=there, other=0.0)
        some = tl.load(part_o + at[:, None] * E + cols[None, :], mask=there[:, None] & in_cols[None, :], other=0.0)
        total = total * shrink + tl.sum(sums * weight, 0)
        out = out * shrink + tl.sum(some * weight[:, None], 0)
        top = higher
    out = out / tl.where(total > 0, total, 1.0)
    o += b.to(tl.int64) * sob + (g * R + r) * soh + query.to(tl.int64) * sot
    tl.store(o + cols, out.to(o.dtype.element_ty), mask=in_cols)


@triton.jit
def append_token(
    k, v, keys, values, counts,
    # strides of the new token's rows and heads; key heads, places that a segment has
    skb, skh, svb, svh, G, room,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """One segment's new key and value behind its last, and one more in its count.

    Where there is no room, its first key becomes NaN, and so does all that reads it.
    """
    segment = tl.program_id(0)
    b, g = segment // G, segment % G
    count = tl.load(counts + segment)
    fits = count < room
    place = segment.to(tl.int64) * room + tl.where(fits, count, 0)
    dims, cols = tl.arange(0, BD), tl.arange(0, BE)
    key = tl.load(k + b.to(tl.int64) * skb + g * skh + dims, mask=dims < D, other=0.0)
    value = tl.load(v + b.to(tl.int64) * svb + g * svh + cols, mask=cols < E, other=0.0)
    key = tl.where(fits, key, float("nan")).to(keys.dtype.element_ty)
    tl.store(keys + place * D + dims, key, mask=dims < D)
    tl.store(values + place * E + cols, value, mask=cols < E)
    tl.store(counts + segment, tl.minimum(count + 1, room))
