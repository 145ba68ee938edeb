"""Gradients of the read: of queries, of the listed keys by segments, and of all keys, values and scores."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.hybrid.read import LOG2E, load_keys
from attnlab.kernels.select.choose import first_exact
from attnlab.kernels.select.read import load_listed, near_scores, selected_by

__all__ = ["key_gradients", "listed_gradients", "query_gradients"]


@triton.jit
def query_gradients(
    q, k, v, keys, counts, selected_to, out, lse, do,
    # written
    dq, delta,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sob, soh, sot, sdb, sdh, sdt, sgb, sgh, sgt, T, L, G, NS, scale,
    R: tl.constexpr, W: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, CAP: tl.constexpr, MORE: tl.constexpr,
    LT: tl.constexpr, KT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """dq of a segment of one head's queries, and their <do, out>."""
    row, segment = (tl.program_id(0) // NS).to(tl.int64), tl.program_id(0) % NS
    b, g = row // G, row % G
    h = g * R + tl.program_id(1)
    k += b * skb + g * skh
    v += b * svb + g * svh
    at = row * NS + segment
    p = segment * Q + tl.arange(0, Q)
    s = first_exact(p, W, B)
    query = load_keys(q + b * sqb + h * sqh, sqt, p, T, D, BD)
    pull = load_keys(do + b * sdb + h * sdh, sdt, p, T, E, BE)
    answer = load_keys(out + b * sob + h * soh, sot, p, T, E, BE)
    mine = tl.sum(pull.to(tl.float32) * answer.to(tl.float32), 1)
    of_row = (row * R + tl.program_id(1)) * T + p
    tl.store(delta + of_row, mine, mask=p < T)
    # Rows that do not exist weigh nothing.
    sums = tl.load(lse + of_row, mask=p < T, other=float("inf"))
    acc = tl.zeros([Q, BD], tl.float32)
    begin, end = first_exact(segment * Q, W, B), tl.minimum(segment * Q + Q, T)
    for lo in range(begin, end, KT):
        place = lo + tl.arange(0, KT)
        near_k, near_v = load_keys(k, skt, place, T, D, BD), load_keys(v, svt, place, T, E, BE)
        near = tl.exp2(near_scores(query, near_k, p, s, place, scale * LOG2E, PREC) - sums[:, None])
        near = near * (tl.dot(pull, tl.trans(near_v), input_precision=PREC) - mine[:, None])
        acc += tl.dot(near.to(query.dtype), near_k, input_precision=PREC)
    for lo in range(0, tl.load(counts + at * 2), LT):
        j, y = load_listed(keys + at * (CAP + MORE), selected_to + row * L, lo, tl.load(counts + at * 2), LT)
        key, value = load_keys(k, skt, j, T, D, BD), load_keys(v, svt, j, T, E, BE)
        far = tl.dot(query, tl.trans(key), input_precision=PREC) * (scale * LOG2E)
        far = tl.exp2(tl.where(selected_by(j, y, s), far, float("-inf")) - sums[:, None])
        far = far * (tl.dot(pull, tl.trans(value), input_precision=PREC) - mine[:, None])
        acc += tl.dot(far.to(query.dtype), key, input_precision=PREC)
    cols = tl.arange(0, BD)
    mask = (p < T)[:, None] & (cols < D)[None, :]
    into = dq + b * sgb + h * sgh + p[:, None].to(tl.int64) * sgt + cols[None, :]
    tl.store(into, (acc * scale).to(dq.dtype.element_ty), mask=mask)


@triton.jit
def listed_gradients(
    q, k, v, score, keys, counts, selected_to, counted_to, middle, lse, top, delta, do,
    # written: part (b g, segments, CAP, D + E), part_score (b g, segments, CAP + MORE)
    part, part_score,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt, T, L, G, NS, scale,
    R: tl.constexpr, W: tl.constexpr, B: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, CAP: tl.constexpr,
    MORE: tl.constexpr, V: tl.constexpr, LT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr,
    BE: tl.constexpr, CLAMP: tl.constexpr, LEARN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of a segment's list by all queries of the segment."""
    row, segment = (tl.program_id(0) // NS).to(tl.int64), tl.program_id(0) % NS
    b, g = row // G, row % G
    at = row * NS + segment
    # Tiles of keys that are selected come first, then those of keys that are only counted.
    tiles: tl.constexpr = (CAP + LT - 1) // LT
    selects = tl.program_id(1) < tiles
    first = tl.where(selects, 0, CAP)
    count = tl.load(counts + at * 2 + tl.where(selects, 0, 1))
    tile = tl.program_id(1) - tl.where(selects, 0, tiles)
    lo = tile * LT
    if lo < count:
        q += b * sqb + g * R * sqh
        do += b * sdb + g * R * sdh
        p = segment * Q + tl.arange(0, Q)
        s = first_exact(p, W, B)
        j, y = load_listed(keys + at * (CAP + MORE) + first, selected_to + row * L, lo, count, LT)
        key = load_keys(k + b * skb + g * skh, skt, j, T, D, BD)
        value = load_keys(v + b * svb + g * svh, svt, j, T, E, BE)
        shown = selected_by(j, y, s)
        seen = shown
        if LEARN:
            z = tl.load(counted_to + row * L + j, mask=j >= S, other=-1)
            counted = selected_by(j, z, s)
            seen = shown | counted
            gate = tl.zeros([Q, LT], tl.float32)
        d_key, d_value = tl.zeros([LT, BD], tl.float32), tl.zeros([LT, BE], tl.float32)
        for head in range(0, R):
            of_row = (row * R + head) * T + p
            sums = tl.load(lse + of_row, mask=p < T, other=float("inf"))
            mine = tl.load(delta + of_row, mask=p < T, other=0.0)
            query = load_keys(q + head * sqh, sqt, p, T, D, BD)
            pull = load_keys(do + head * sdh, sdt, p, T, E, BE)
            scores = tl.dot(query, tl.trans(key), input_precision=PREC) * (scale * LOG2E)
            if LEARN:
                # What a key that is not selected would weigh, at most.
                most = tl.load(top + of_row, mask=p < T, other=0.0) + CLAMP * LOG2E
                scores = tl.where(scores > most[:, None], most[:, None], scores)
            weights = tl.exp2(tl.where(seen, scores, float("-inf")) - sums[:, None])
            slope = weights * (tl.dot(pull, tl.trans(value), input_precision=PREC) - mine[:, None])
            if LEARN:
                gate += slope
                slope = tl.where(shown, slope, 0.0)
                weights = tl.where(shown, weights, 0.0)
            if selects:
                d_key += tl.dot(tl.trans(slope.to(query.dtype)), query, input_precision=PREC)
                d_value += tl.dot(tl.trans(weights.to(pull.dtype)), pull, input_precision=PREC)
        listed, cols, value_cols = lo + tl.arange(0, LT), tl.arange(0, BD), tl.arange(0, BE)
        there = listed < count
        if selects:
            into = part + (at * CAP + listed)[:, None] * (D + E)
            tl.store(into + cols[None, :], d_key * scale, mask=there[:, None] & (cols < D)[None, :])
            tl.store(into + D + value_cols[None, :], d_value, mask=there[:, None] & (value_cols < E)[None, :])
        if LEARN:
            begin = first_exact(segment * Q, W, B)
            between = tl.load(middle + at * V + (s - begin) // B, mask=p < T, other=float("-inf"))
            u = tl.load(score + row * T + j, mask=there, other=0.0)
            soft = tl.sigmoid(u[None, :] - between[:, None])
            total = tl.sum(tl.where(counted, gate * soft * (1.0 - soft), 0.0), 0)
            tl.store(part_score + at * (CAP + MORE) + first + listed, total, mask=there)


@triton.jit
def _listed_at(keys, count, j, KT: tl.constexpr, CT: tl.constexpr):
    """Where keys stand in a list; -1 where they do not."""
    place = tl.full([KT], -1, tl.int32)
    for lo in range(0, count, CT):
        at = lo + tl.arange(0, CT)
        listed = tl.load(keys + at, mask=at < count, other=-1)
        place = tl.maximum(place, tl.max(tl.where(listed[None, :] == j[:, None], at[None, :], -1), 1))
    return place


@triton.jit
def key_gradients(
    q, k, v, keys, counts, selected_to, counted_to, lse, delta, do, part, part_score,
    # written; dv is laid out as dk is
    dk, dv, d_score,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt, T, L, G, NS, scale,
    R: tl.constexpr, W: tl.constexpr, B: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, CAP: tl.constexpr,
    MORE: tl.constexpr, CT: tl.constexpr, KT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, LEARN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk, dv and d score of a tile: by the queries that have it in their window, and the segments that list its keys."""
    tiles = tl.cdiv(T, KT)
    row, lowest = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * KT
    b, g = row // G, row % G
    q += b * sqb + g * R * sqh
    do += b * sdb + g * R * sdh
    j = lowest + tl.arange(0, KT)
    key = load_keys(k + b * skb + g * skh, skt, j, T, D, BD)
    value = load_keys(v + b * svb + g * svh, svt, j, T, E, BE)
    d_key, d_value = tl.zeros([KT, BD], tl.float32), tl.zeros([KT, BE], tl.float32)
    for lo in range(lowest, tl.minimum(lowest + KT + W - 1, T), Q):
        p = lo + tl.arange(0, Q)
        s = first_exact(p, W, B)
        for head in range(0, R):
            of_row = (row * R + head) * T + p
            sums = tl.load(lse + of_row, mask=p < T, other=float("inf"))
            mine = tl.load(delta + of_row, mask=p < T, other=0.0)
            query = load_keys(q + head * sqh, sqt, p, T, D, BD)
            pull = load_keys(do + head * sdh, sdt, p, T, E, BE)
            weights = tl.exp2(near_scores(query, key, p, s, j, scale * LOG2E, PREC) - sums[:, None])
            slope = weights * (tl.dot(pull, tl.trans(value), input_precision=PREC) - mine[:, None])
            d_key += tl.dot(tl.trans(slope.to(query.dtype)), query, input_precision=PREC)
            d_value += tl.dot(tl.trans(weights.to(pull.dtype)), pull, input_precision=PREC)
    d_key = d_key * scale
    cols, value_cols = tl.arange(0, BD), tl.arange(0, BE)
    # The last window that some key of the tile is read before.
    last = tl.max(tl.load(selected_to + row * L + j, mask=j < L, other=-1), 0)
    total = tl.zeros([KT], tl.float32)
    if LEARN:
        last = tl.maximum(last, tl.max(tl.load(counted_to + row * L + j, mask=(j < L) & (j >= S), other=-1), 0))
    for segment in range((lowest + W - B + 1) // Q, tl.minimum((last + W - 1) // Q + 1, NS)):
        listing = row * NS + segment
        of_segment = keys + listing * (CAP + MORE)
        at = _listed_at(of_segment, tl.load(counts + listing * 2), j, KT, CT)
        if tl.max(at, 0) >= 0:
            rows = part + (listing * CAP + at)[:, None] * (D + E)
            there = (at >= 0)[:, None]
            d_key += tl.load(rows + cols[None, :], mask=there & (cols < D)[None, :], other=0.0)
            d_value += tl.load(rows + D + value_cols[None, :], mask=there & (value_cols < E)[None, :], other=0.0)
            if LEARN:
                total += tl.load(part_score + listing * (CAP + MORE) + at, mask=at >= 0, other=0.0)
        if LEARN:
            at = _listed_at(of_segment + CAP, tl.load(counts + listing * 2 + 1), j, KT, CT)
            total += tl.load(part_score + listing * (CAP + MORE) + CAP + at, mask=at >= 0, other=0.0)
    into = (row * T + j)[:, None]
    tl.store(dk + into * D + cols[None, :], d_key.to(dk.dtype.element_ty), mask=(j < T)[:, None] & (cols < D)[None, :])
    tl.store(dv + into * E + value_cols[None, :], d_value.to(dv.dtype.element_ty),
             mask=(j < T)[:, None] & (value_cols < E)[None, :])  # fmt: skip
    if LEARN:
        tl.store(d_score + row * T + j, total, mask=j < T)
