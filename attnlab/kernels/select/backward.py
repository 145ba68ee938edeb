"""Gradients of the read: of queries, of the listed keys by segments, and of all keys, values and scores."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.hybrid.read import LOG2E, load_keys
from attnlab.kernels.select.choose import first_exact, first_segment
from attnlab.kernels.select.read import load_listed, near_scores, selected_by

__all__ = ["key_gradients", "listed_gradients", "query_gradients", "sum_lives", "sum_rows"]


@triton.jit
def sum_lives(
    lives,
    # written
    ends,
    L,
    MT: tl.constexpr,
):  # fmt: skip
    """Where the rows of each key end, which lie one key after another: sums of ``lives``."""
    i, before = tl.arange(0, MT), 0
    lives += tl.program_id(0).to(tl.int64) * L
    ends += tl.program_id(0).to(tl.int64) * L
    for lo in range(0, L, MT):
        own = tl.load(lives + lo + i, mask=lo + i < L, other=0)
        tl.store(ends + lo + i, before + tl.cumsum(own, 0), mask=lo + i < L)
        before += tl.sum(own, 0)


@triton.jit
def query_gradients(
    q, k, v, keys, counts, out, lse, do,
    # written
    dq, delta,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sob, soh, sot, sdb, sdh, sdt, sgb, sgh, sgt, T, G, NQ, NS, scale,
    R: tl.constexpr, W: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, QB: tl.constexpr, ROOM: tl.constexpr,
    LT: tl.constexpr, KT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    LEARN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dq of QB of one head's queries, and their <do, out>."""
    row, first = (tl.program_id(0) // NQ).to(tl.int64), tl.program_id(0) % NQ * QB
    b, g = row // G, row % G
    h = g * R + tl.program_id(1)
    k += b * skb + g * skh
    v += b * svb + g * svh
    at = row * NS + first // Q
    p = first + tl.arange(0, QB)
    s = first_exact(p, W, B)
    query = load_keys(q + b * sqb + h * sqh, sqt, p, T, D, BD)
    pull = load_keys(do + b * sdb + h * sdh, sdt, p, T, E, BE)
    answer = load_keys(out + b * sob + h * soh, sot, p, T, E, BE)
    mine = tl.sum(pull.to(tl.float32) * answer.to(tl.float32), 1)
    of_row = (row * R + tl.program_id(1)) * T + p
    tl.store(delta + of_row, mine, mask=p < T)
    # Rows that do not exist weigh nothing.
    sums = tl.load(lse + of_row, mask=p < T, other=float("inf"))
    acc = tl.zeros([QB, BD], tl.float32)
    begin, end = first_exact(first, W, B), tl.minimum(first + QB, T)
    for lo in range(begin, end, KT):
        place = lo + tl.arange(0, KT)
        near_k, near_v = load_keys(k, skt, place, T, D, BD), load_keys(v, svt, place, T, E, BE)
        near = tl.exp2(near_scores(query, near_k, p, s, place, scale * LOG2E, PREC) - sums[:, None])
        near = near * (tl.dot(pull, tl.trans(near_v), input_precision=PREC) - mine[:, None])
        acc += tl.dot(near.to(query.dtype), near_k, input_precision=PREC)
    keys += at * (2 + LEARN) * ROOM
    count = tl.load(counts + at * 2)
    for lo in range(0, count, LT):
        j, y = load_listed(keys, lo, count, ROOM, LT)
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
def _load_sums(lse, delta, of_row, there):
    """The log-sum-exps of some rows, and their <do, out>; rows that do not exist weigh nothing."""
    return tl.load(lse + of_row, mask=there, other=float("inf")), tl.load(delta + of_row, mask=there, other=0.0)


@triton.jit
def _begin(ends, j):
    """Where the rows of key j begin: where those of the key before it end."""
    return tl.load(ends + j - 1, mask=j > 0, other=0)


@triton.jit
def listed_gradients(
    q, k, v, score, keys, counts, ends, middle, lse, top, delta, do,
    # written: part (b g, segments CAP, D + E), part_score (b g, segments ROOM)
    part, part_score,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt, T, L, G, NS, NW, scale,
    R: tl.constexpr, W: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, CAP: tl.constexpr,
    ROOM: tl.constexpr, LT: tl.constexpr, QT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr,
    BE: tl.constexpr, CLAMP: tl.constexpr, LEARN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of a segment's list by all queries of the segment."""
    row, segment = (tl.program_id(0) // NS).to(tl.int64), tl.program_id(0) % NS
    b, g = row // G, row % G
    at = row * NS + segment
    # Of keys that are selected, and of all: those that are only counted come last.
    selects = tl.load(counts + at * 2)
    count = tl.load(counts + at * 2 + 1) if LEARN else selects
    lo = tl.program_id(1) * LT
    if lo < count:
        q += b * sqb + g * R * sqh
        do += b * sdb + g * R * sdh
        keys += at * (2 + LEARN) * ROOM
        j, y = load_listed(keys, lo, count, ROOM, LT)
        key = load_keys(k + b * skb + g * skh, skt, j, T, D, BD)
        value = load_keys(v + b * svb + g * svh, svt, j, T, E, BE)
        d_key, d_value = tl.zeros([LT, BD], tl.float32), tl.zeros([LT, BE], tl.float32)
        if LEARN:
            z = tl.load(keys + 2 * ROOM + lo + tl.arange(0, LT), mask=j >= 0, other=-1)
            u = tl.load(score + row * T + j, mask=j >= 0, other=0.0)
            d_score = tl.zeros([LT], tl.float32)
            # What is selected is counted, too, but for sinks, whose scores learn nothing.
            last = tl.maximum(y, z)
        else:
            last = y
        for place in range(segment * Q, tl.minimum(segment * Q + Q, T), QT):
            p = place + tl.arange(0, QT)
            s = first_exact(p, W, B)
            # Keys are rows here, so that products with queries need no other layout.
            seen = (j[:, None] < s[None, :]) & (s[None, :] <= last[:, None])
            if LEARN:
                gate = tl.zeros([LT, QT], tl.float32)
            for head in range(R):
                of_row = (row * R + head) * T + p
                sums, mine = _load_sums(lse, delta, of_row, p < T)
                query = load_keys(q + head * sqh, sqt, p, T, D, BD)
                pull = load_keys(do + head * sdh, sdt, p, T, E, BE)
                scores = tl.dot(key, tl.trans(query), input_precision=PREC) * (scale * LOG2E)
                if LEARN:
                    # What a key that is not selected would weigh, at most.
                    most = tl.load(top + of_row, mask=p < T, other=0.0) + CLAMP * LOG2E
                    scores = tl.minimum(scores, most[None, :], propagate_nan=tl.PropagateNan.ALL)
                weights = tl.exp2(tl.where(seen, scores, float("-inf")) - sums[None, :])
                slope = weights * (tl.dot(value, tl.trans(pull), input_precision=PREC) - mine[None, :])
                if LEARN:
                    gate += slope
                if lo < selects:
                    if LEARN:
                        shown = s[None, :] <= y[:, None]
                        slope, weights = tl.where(shown, slope, 0.0), tl.where(shown, weights, 0.0)
                    d_key += tl.dot(slope.to(query.dtype), query, input_precision=PREC)
                    d_value += tl.dot(weights.to(pull.dtype), pull, input_precision=PREC)
            if LEARN:
                between = tl.load(middle + row * NW + s // B, mask=p < T, other=float("-inf"))
                soft = tl.sigmoid(u[:, None] - between[None, :])
                d_score += tl.sum(tl.where(seen, gate * soft * (1.0 - soft), 0.0), 1)
        cols, value_cols = tl.arange(0, BD), tl.arange(0, BE)
        since = segment - first_segment(j, W, B, Q)
        if lo < selects:
            there = (lo + tl.arange(0, LT) < selects)[:, None]
            into = part + (row * NS * CAP + _begin(ends + row * 2 * L, j) + since)[:, None] * (D + E)
            tl.store(into + cols[None, :], d_key * scale, mask=there & (cols < D)[None, :])
            tl.store(into + D + value_cols[None, :], d_value, mask=there & (value_cols < E)[None, :])
        if LEARN:
            into = row * NS * ROOM + _begin(ends + (row * 2 + 1) * L, j) + since
            tl.store(part_score + into, d_score, mask=z >= 0)


@triton.jit
def _rows_of(ends, j, L):
    """Where the rows of keys j begin, and how many they are; of a key that never leaves the window there are none."""
    begin = _begin(ends, tl.minimum(j, L))
    return begin, tl.load(ends + j, mask=j < L, other=0) - begin


@triton.jit
def sum_rows(
    ends,
    # read and written
    part, part_score,
    L, NS,
    CAP: tl.constexpr, ROOM: tl.constexpr, KT: tl.constexpr, PIECE: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BC: tl.constexpr, STAGES: tl.constexpr, LEARN: tl.constexpr,
):  # fmt: skip
    """The sum of PIECE rows of each key that has more than one, in place of the first of them.

    So programs that have keys in common with a whole text are not the last of all by far.
    """
    tiles = tl.cdiv(L, KT)
    row, j = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * KT + tl.arange(0, KT)
    first = tl.program_id(1) * PIECE
    ends += row * 2 * L
    begin, rows = _rows_of(ends, j, L)
    rows = tl.minimum(rows - first, PIECE)
    most, cols = tl.max(rows, 0), tl.arange(0, BC)
    if most > 1:
        of_key = part + (row * NS * CAP + begin + first)[:, None] * (D + E) + cols[None, :]
        there = (cols < D + E)[None, :]
        total = tl.zeros([KT, BC], tl.float32)
        for i in tl.range(0, most, num_stages=STAGES):
            total += tl.load(of_key + i * (D + E), mask=there & (i < rows)[:, None], other=0.0)
        tl.store(of_key, total, mask=there & (rows > 1)[:, None])
    if LEARN:
        begin, rows = _rows_of(ends + L, j, L)
        rows = tl.minimum(rows - first, PIECE)
        if tl.max(rows, 0) > 1:
            of_key, i = part_score + row * NS * ROOM + begin + first, tl.arange(0, PIECE)
            each = tl.load(of_key[:, None] + i[None, :], mask=i[None, :] < rows[:, None], other=0.0)
            tl.store(of_key, tl.sum(each, 1), mask=rows > 1)


@triton.jit
def key_gradients(
    q, k, v, ends, lse, delta, do, part, part_score,
    # written
    dk, dv, d_score,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt, T, L, G, NS, scale,
    R: tl.constexpr, W: tl.constexpr, B: tl.constexpr, CAP: tl.constexpr, ROOM: tl.constexpr, QT: tl.constexpr,
    KT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, PIECE: tl.constexpr,
    LEARN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """dk, dv and d score of a tile: by the queries that have it in their window, and those that list its keys."""
    tiles = tl.cdiv(T, KT)
    row, lowest = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * KT
    b, g = row // G, row % G
    q += b * sqb + g * R * sqh
    do += b * sdb + g * R * sdh
    j = lowest + tl.arange(0, KT)
    key = load_keys(k + b * skb + g * skh, skt, j, T, D, BD)
    value = load_keys(v + b * svb + g * svh, svt, j, T, E, BE)
    d_key, d_value = tl.zeros([KT, BD], tl.float32), tl.zeros([KT, BE], tl.float32)
    for lo in range(lowest, tl.minimum(lowest + KT + W - 1, T), QT):
        p = lo + tl.arange(0, QT)
        s = first_exact(p, W, B)
        for head in range(R):
            sums, mine = _load_sums(lse, delta, (row * R + head) * T + p, p < T)
            query = load_keys(q + head * sqh, sqt, p, T, D, BD)
            pull = load_keys(do + head * sdh, sdt, p, T, E, BE)
            scores = tl.dot(key, tl.trans(query), input_precision=PREC) * (scale * LOG2E)
            scores = tl.where((j[:, None] >= s[None, :]) & (j[:, None] <= p[None, :]), scores, float("-inf"))
            weights = tl.exp2(scores - sums[None, :])
            slope = weights * (tl.dot(value, tl.trans(pull), input_precision=PREC) - mine[None, :])
            d_key += tl.dot(slope.to(query.dtype), query, input_precision=PREC)
            d_value += tl.dot(weights.to(pull.dtype), pull, input_precision=PREC)
    d_key = d_key * scale
    cols, value_cols = tl.arange(0, BD), tl.arange(0, BE)
    begin, rows = _rows_of(ends + row * 2 * L, j, L)
    for i in range(0, tl.max(rows, 0), PIECE):
        of_key = part + (row * NS * CAP + begin + i)[:, None] * (D + E)
        there = (i < rows)[:, None]
        d_key += tl.load(of_key + cols[None, :], mask=there & (cols < D)[None, :], other=0.0)
        d_value += tl.load(of_key + D + value_cols[None, :], mask=there & (value_cols < E)[None, :], other=0.0)
    into = (row * T + j)[:, None]
    tl.store(dk + into * D + cols[None, :], d_key.to(dk.dtype.element_ty), mask=(j < T)[:, None] & (cols < D)[None, :])
    tl.store(dv + into * E + value_cols[None, :], d_value.to(dv.dtype.element_ty),
             mask=(j < T)[:, None] & (value_cols < E)[None, :])  # fmt: skip
    if LEARN:
        begin, rows = _rows_of(ends + (row * 2 + 1) * L, j, L)
        total = tl.zeros([KT], tl.float32)
        for i in range(0, tl.max(rows, 0), PIECE):
            total += tl.load(part_score + row * NS * ROOM + begin + i, mask=i < rows, other=0.0)
        tl.store(d_score + row * T + j, total, mask=j < T)
