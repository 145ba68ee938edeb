"""Gradients of the read: of queries, of states, of sinks, and of the window's keys and values."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.hybrid.read import (
    LOG2E,
    load_keys,
    load_rows,
    load_state,
    sink_scores,
    slot_scores,
    window_scores,
)
from attnlab.kernels.hybrid.states import row_start

__all__ = ["key_gradients", "query_gradients"]


@triton.jit
def _pull(scores, lse, do, value, delta, PREC: tl.constexpr):
    """The weights p and the gradient of the scores, p (<do, v> - <do, out>)."""
    p = tl.exp2(scores - lse[:, None])
    return p, p * (tl.dot(do, tl.trans(value), input_precision=PREC) - delta[:, None])


@triton.jit
def _rows_of(t, b, g, first, j, start, length, T, G, R: tl.constexpr, RT: tl.constexpr, C: tl.constexpr):
    """Where the numbers of each row lie in a dense (b, head, token), and which rows exist."""
    rows = tl.arange(0, RT * C)
    head, place = first + rows // C, j * C + rows % C
    return t + (b * G * R + g * R + head) * T + start + place, (head < R) & (place < length)


@triton.jit
def _store_state(t, at, mean, gradient, N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Store the gradient of K~ or V~ as it is rounded; <K~, it> for each slot."""
    slots, cols = tl.arange(0, NP), tl.arange(0, BD)
    mask = (slots < N)[:, None] & (cols < D)[None, :]
    rounded = gradient.to(t.dtype.element_ty)
    tl.store(t + at * N * D + slots[:, None] * D + cols[None, :], rounded, mask=mask)
    return tl.sum(rounded.to(tl.float32) * mean.to(tl.float32), 1)


@triton.jit
def query_gradients(
    q, k, v, starts, states, log_mass, out, lse, do,
    # written; d_sinks is (b g, block, k or v, S, D)
    dq, d_states, d_mass, d_sinks, delta,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sob, soh, sot, sdb, sdh, sdt, T, G, NS, scale,
    R: tl.constexpr, RT: tl.constexpr, W: tl.constexpr, KT: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASS: tl.constexpr,
    PREC: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """For one block of queries of all heads that read a key head: dq, and the gradients of its state and of sinks."""
    j, row = tl.program_id(0), tl.program_id(1)
    b, g = (row // G).to(tl.int64), (row % G).to(tl.int64)
    start = row_start(starts, b, PADDED)
    length = T - start
    q += b * sqb + g * R * sqh + start * sqt
    k += b * skb + g * skh + start * skt
    v += b * svb + g * svh + start * svt
    out += b * sob + g * R * soh + start * sot
    do += b * sdb + g * R * sdh + start * sdt
    # dq is laid out as out is.
    dq += b * sob + g * R * soh + start * sot
    slots, cols, sinks = tl.arange(0, NP), tl.arange(0, BD), tl.arange(0, SP)
    at = row.to(tl.int64) * NS + j - W // C
    past = j * C >= W
    d_mean_k, d_mean_v = tl.zeros([NP, BD], tl.float32), tl.zeros([NP, BD], tl.float32)
    d_sink_k, d_sink_v = tl.zeros([SP, BD], tl.float32), tl.zeros([SP, BD], tl.float32)
    d_log = tl.zeros([NP], tl.float32)
    own = j * C + tl.arange(0, RT * C) % C
    for first in range(0, R, RT):
        query, at_rows, mask = load_rows(q, sqt, sqh, j, first, length, R, RT, C, D, BD)
        pull, _, _ = load_rows(do, sdt, sdh, j, first, length, R, RT, C, D, BD)
        answer, at_rows, mask = load_rows(out, sot, soh, j, first, length, R, RT, C, D, BD)
        of_row, there = _rows_of(delta, b, g, first, j, start, length, T, G, R, RT, C)
        mine = tl.sum(pull.to(tl.float32) * answer.to(tl.float32), 1)
        tl.store(of_row, mine, mask=there)
        of_row, there = _rows_of(lse, b, g, first, j, start, length, T, G, R, RT, C)
        # Rows that do not exist weigh nothing.
        sums = tl.load(of_row, mask=there, other=float("inf"))
        dq_rows = tl.zeros([RT * C, BD], tl.float32)
        if past:
            if N > 0:
                mean_k, mean_v = load_state(states, 2 * at, N, NP, D, BD), load_state(states, 2 * at + 1, N, NP, D, BD)
                scores = slot_scores(query, mean_k, log_mass, at, scale * LOG2E, MASS, N, NP, PREC)
                p, ds = _pull(scores, sums, pull, mean_v, mine, PREC)
                d_log += tl.sum(ds, 0)
                p, ds = p.to(query.dtype), ds.to(query.dtype)
                dq_rows += tl.dot(ds, mean_k, input_precision=PREC)
                d_mean_k += tl.dot(tl.trans(ds), query, input_precision=PREC)
                d_mean_v += tl.dot(tl.trans(p), pull, input_precision=PREC)
            if S > 0:
                key, value = load_keys(k, skt, sinks, length, D, BD), load_keys(v, svt, sinks, length, D, BD)
                scores = sink_scores(query, key, j, scale * LOG2E, W, C, S, SP, PREC)
                p, ds = _pull(scores, sums, pull, value, mine, PREC)
                p, ds = p.to(query.dtype), ds.to(query.dtype)
                dq_rows += tl.dot(ds, key, input_precision=PREC)
                d_sink_k += tl.dot(tl.trans(ds), query, input_precision=PREC)
                d_sink_v += tl.dot(tl.trans(p), pull, input_precision=PREC)
        for i in range(0, W, KT):
            place = j * C + C - W + i + tl.arange(0, KT)
            near_k, near_v = load_keys(k, skt, place, length, D, BD), load_keys(v, svt, place, length, D, BD)
            near = window_scores(query, near_k, own, place, scale * LOG2E, PREC)
            _weights, slope = _pull(near, sums, pull, near_v, mine, PREC)
            dq_rows += tl.dot(slope.to(query.dtype), near_k, input_precision=PREC)
        tl.store(dq + at_rows, (dq_rows * scale).to(dq.dtype.element_ty), mask=mask)
    if past & (N > 0):
        mean_k, mean_v = load_state(states, 2 * at, N, NP, D, BD), load_state(states, 2 * at + 1, N, NP, D, BD)
        known = _store_state(d_states, 2 * at, mean_k, d_mean_k * scale, N, NP, D, BD)
        known += _store_state(d_states, 2 * at + 1, mean_v, d_mean_v, N, NP, D, BD)
        # The gradient of m by what it divides, and by log m where that is read.
        tl.store(d_mass + at * N + slots, (d_log if MASS else 0.0) - known, mask=slots < N)
    if S > 0:
        into = d_sinks + (row.to(tl.int64) * tl.num_programs(0) + j) * 2 * S * D + sinks[:, None] * D + cols[None, :]
        mask = (sinks < S)[:, None] & (cols < D)[None, :]
        tl.store(into, d_sink_k * scale, mask=mask)
        tl.store(into + S * D, d_sink_v, mask=mask)


@triton.jit
def key_gradients(
    q, k, v, starts, lse, delta, do,
    # written
    dk, dv,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdb, sdh, sdt, sgb, sgh, sgt, T, G, NB, scale,
    R: tl.constexpr, RT: tl.constexpr, W: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    PREC: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block by the queries that have it in their window."""
    c, row = tl.program_id(0), tl.program_id(1)
    b, g = (row // G).to(tl.int64), (row % G).to(tl.int64)
    start = row_start(starts, b, PADDED)
    length = T - start
    q += b * sqb + g * R * sqh + start * sqt
    k += b * skb + g * skh + start * skt
    v += b * svb + g * svh + start * svt
    do += b * sdb + g * R * sdh + start * sdt
    place, cols = c * C + tl.arange(0, C), tl.arange(0, BD)
    key, value = load_keys(k, skt, place, length, D, BD), load_keys(v, svt, place, length, D, BD)
    d_key, d_value = tl.zeros([C, BD], tl.float32), tl.zeros([C, BD], tl.float32)
    for j in range(c, tl.minimum(c + W // C, NB)):
        own = j * C + tl.arange(0, RT * C) % C
        for first in range(0, R, RT):
            query, _, _ = load_rows(q, sqt, sqh, j, first, length, R, RT, C, D, BD)
            pull, _, _ = load_rows(do, sdt, sdh, j, first, length, R, RT, C, D, BD)
            of_row, there = _rows_of(lse, b, g, first, j, start, length, T, G, R, RT, C)
            sums = tl.load(of_row, mask=there, other=float("inf"))
            of_row, there = _rows_of(delta, b, g, first, j, start, length, T, G, R, RT, C)
            mine = tl.load(of_row, mask=there, other=0.0)
            p, ds = _pull(window_scores(query, key, own, place, scale * LOG2E, PREC), sums, pull, value, mine, PREC)
            d_key += tl.dot(tl.trans(ds.to(query.dtype)), query, input_precision=PREC)
            d_value += tl.dot(tl.trans(p.to(query.dtype)), pull, input_precision=PREC)
    into = b * sgb + g * sgh + (start + place[:, None]).to(tl.int64) * sgt + cols[None, :]
    mask = (place < length)[:, None] & (cols < D)[None, :]
    tl.store(dk + into, (d_key * scale).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + into, d_value.to(dv.dtype.element_ty), mask=mask)
