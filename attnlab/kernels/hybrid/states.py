"""The slots after every block of tokens, and the way back: sums over segments of blocks, then block after block."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["EMPTY", "HALF_EMPTY", "row_start", "sum_back", "sum_segments", "write_gradients", "write_states"]

# The logarithm of an empty slot's mass.
EMPTY = tl.constexpr(-1e30)
HALF_EMPTY = tl.constexpr(-5e29)


@triton.jit
def row_start(starts, b, PADDED: tl.constexpr):
    """How many tokens of a row are padding, which comes first."""
    start = 0
    if PADDED:
        start = tl.load(starts + b)
    return start


@triton.jit
def _load_log(x, sxt, c, length, C: tl.constexpr, S: tl.constexpr, N: tl.constexpr, NP: tl.constexpr):
    """log alpha of block c (C, NP); minus infinity for sinks and beyond the row's end."""
    place, slots = c * C + tl.arange(0, C), tl.arange(0, NP)
    written = (place >= S) & (place < length)
    mask = written[:, None] & (slots < N)[None, :]
    return tl.load(x + place[:, None] * sxt + slots[None, :], mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def _load_block(t, stt, c, length, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Keys or values of block c (C, BD), and where they lie; zeros beyond the row's end."""
    place, cols = c * C + tl.arange(0, C), tl.arange(0, BD)
    at = place[:, None].to(tl.int64) * stt + cols[None, :]
    mask = (place < length)[:, None] & (cols < D)[None, :]
    return tl.load(t + at, mask=mask, other=0.0), at, mask


@triton.jit
def _add_block(total, mass, t, stt, x, sxt, c, length, C: tl.constexpr, S: tl.constexpr, N: tl.constexpr,
               NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PREC: tl.constexpr):  # fmt: skip
    """The sums of alpha t and of alpha with those of block c."""
    logs = _load_log(x, sxt, c, length, C, S, N, NP)
    # Against each slot's largest: alpha itself may be too small for half precision.
    top = tl.max(logs, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    tokens, _, _ = _load_block(t, stt, c, length, C, D, BD)
    alpha = tl.exp(logs - top[None, :]).to(tokens.dtype)
    scale = tl.exp(top)
    total += tl.dot(tl.trans(alpha), tokens, input_precision=PREC) * scale[:, None]
    return total, mass + tl.sum(alpha.to(tl.float32), 0) * scale


@triton.jit
def _row_of(k, v, x, starts, which, row, skb, skh, skt, svb, svh, svt, sxb, sxh, G, sxt, PADDED: tl.constexpr):
    """Where a row's keys (values, if ``which``) and logarithms begin, the step between tokens, and the padding."""
    b, g = (row // G).to(tl.int64), (row % G).to(tl.int64)
    start = row_start(starts, b, PADDED)
    t, stt = k + b * skb + g * skh + start * skt, skt
    if which == 1:
        t, stt = v + b * svb + g * svh + start * svt, svt
    return t, stt, x + b * sxb + g * sxh + start * sxt, start


@triton.jit
def sum_segments(
    k, v, x, starts,
    # written: (b g, segment, k or v, N, D), (b g, segment, N)
    total, mass,
    skb, skh, skt, svb, svh, svt, sxb, sxh, sxt, T, G, NS,
    SEG: tl.constexpr, C: tl.constexpr, S: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, PREC: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The sums of alpha k or alpha v, and of alpha, over each segment but the last."""
    segment, which, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, stt, x, start = _row_of(k, v, x, starts, which, row, skb, skh, skt, svb, svh, svt, sxb, sxh, G, sxt, PADDED)
    sums, masses = tl.zeros([NP, BD], tl.float32), tl.zeros([NP], tl.float32)
    for i in range(SEG):
        sums, masses = _add_block(sums, masses, t, stt, x, sxt, segment * SEG + i, T - start, C, S, N, NP, D, BD, PREC)
    slots, cols = tl.arange(0, NP), tl.arange(0, BD)
    at = row.to(tl.int64) * tl.num_programs(0) + segment
    mask = (slots < N)[:, None] & (cols < D)[None, :]
    tl.store(total + (at * 2 + which) * N * D + slots[:, None] * D + cols[None, :], sums, mask=mask)
    if which == 0:
        tl.store(mass + at * N + slots, masses, mask=slots < N)


@triton.jit
def write_states(
    k, v, x, starts,
    # the sums up to the end of each segment; written: (b g, state, k or v, N, D), (b g, state, N)
    total, mass, states, log_mass,
    skb, skh, skt, svb, svh, svt, sxb, sxh, sxt, T, G, NS,
    SEG: tl.constexpr, C: tl.constexpr, S: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, PREC: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """K~ or V~, and log m, after each block of a segment."""
    segment, which, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, stt, x, start = _row_of(k, v, x, starts, which, row, skb, skh, skt, svb, svh, svt, sxb, sxh, G, sxt, PADDED)
    slots, cols = tl.arange(0, NP), tl.arange(0, BD)
    mask = (slots < N)[:, None] & (cols < D)[None, :]
    inside = slots[:, None] * D + cols[None, :]
    sums, masses = tl.zeros([NP, BD], tl.float32), tl.zeros([NP], tl.float32)
    if segment > 0:
        at = row.to(tl.int64) * (tl.num_programs(0) - 1) + segment - 1
        sums = tl.load(total + (at * 2 + which) * N * D + inside, mask=mask, other=0.0)
        masses = tl.load(mass + at * N + slots, mask=slots < N, other=0.0)
    for c in range(segment * SEG, tl.minimum(segment * SEG + SEG, NS)):
        sums, masses = _add_block(sums, masses, t, stt, x, sxt, c, T - start, C, S, N, NP, D, BD, PREC)
        at = row.to(tl.int64) * NS + c
        mean = sums / tl.where(masses > 0, masses, 1.0)[:, None]
        tl.store(states + (at * 2 + which) * N * D + inside, mean.to(states.dtype.element_ty), mask=mask)
        if which == 0:
            logs = tl.where(masses > 0, tl.log(tl.where(masses > 0, masses, 1.0)), EMPTY)
            tl.store(log_mass + at * N + slots, logs, mask=slots < N)


@triton.jit
def _load_log_mass(log_mass, at, N: tl.constexpr, NP: tl.constexpr):
    slots = tl.arange(0, NP)
    return tl.load(log_mass + at * N + slots, mask=slots < N, other=EMPTY)


@triton.jit
def sum_back(
    d_states, d_mass, log_mass,
    # written: (b g, segment, k or v, N, D), (b g, segment, N)
    total, mass,
    NS,
    SEG: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The sums of gradients / m over the states of each segment but the first."""
    segment, which, row = tl.program_id(0) + 1, tl.program_id(1), tl.program_id(2).to(tl.int64)
    slots, cols = tl.arange(0, NP), tl.arange(0, BD)
    mask = (slots < N)[:, None] & (cols < D)[None, :]
    inside = slots[:, None] * D + cols[None, :]
    sums, masses = tl.zeros([NP, BD], tl.float32), tl.zeros([NP], tl.float32)
    for c in range(segment * SEG, tl.minimum(segment * SEG + SEG, NS)):
        at = row * NS + c
        logs = _load_log_mass(log_mass, at, N, NP)
        full = logs > HALF_EMPTY
        over = tl.where(full, tl.exp(-tl.where(full, logs, 0.0)), 0.0)
        new = tl.load(d_states + (at * 2 + which) * N * D + inside, mask=mask, other=0.0).to(tl.float32)
        sums += new * over[:, None]
        masses += tl.load(d_mass + at * N + slots, mask=slots < N, other=0.0) * over
    at = row * tl.num_programs(0) + segment - 1
    tl.store(total + (at * 2 + which) * N * D + inside, sums, mask=mask)
    if which == 0:
        tl.store(mass + at * N + slots, masses, mask=slots < N)


@triton.jit
def _in_two(t, dtype):
    """A tensor as the sum of two in ``dtype``: the second is what rounding takes from the first."""
    high = t.to(dtype)
    return high, (t - high.to(tl.float32)).to(dtype)


@triton.jit
def write_gradients(
    k, v, x, starts, d_states, d_mass, log_mass,
    # the sums over each segment and all later ones; dk and dv are added to, dx written
    total, mass, dk, dv, dx,
    skb, skh, skt, svb, svh, svt, sxb, sxh, sxt, sdb, sdh, sdt, T, G, NS,
    SEG: tl.constexpr, C: tl.constexpr, S: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, PREC: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """What the states give back to the tokens of a segment, from its last block to its first.

    With G the gradient of the sums of alpha k by all states from c on, m_c G is carried: it is multiplied with
    phi = alpha / m_c, which is at most 1.
    """
    segment, row = tl.program_id(0), tl.program_id(1)
    b, g = (row // G).to(tl.int64), (row % G).to(tl.int64)
    start = row_start(starts, b, PADDED)
    length = T - start
    x += b * sxb + g * sxh + start * sxt
    k += b * skb + g * skh + start * skt
    v += b * svb + g * svh + start * svt
    # Gradients of keys and values are laid out alike, and that of log alpha is dense.
    dk += b * sdb + g * sdh + start * sdt
    dv += b * sdb + g * sdh + start * sdt
    dx += (row.to(tl.int64) * T + start) * N
    slots, cols = tl.arange(0, NP), tl.arange(0, BD)
    mask = (slots < N)[:, None] & (cols < D)[None, :]
    inside = slots[:, None] * D + cols[None, :]
    hk, hv = tl.zeros([NP, BD], tl.float32), tl.zeros([NP, BD], tl.float32)
    hm, before = tl.zeros([NP], tl.float32), tl.zeros([NP], tl.float32)
    if (segment + 1) * SEG < NS:
        at = row.to(tl.int64) * (tl.num_programs(0) - 1) + segment
        hk = tl.load(total + at * 2 * N * D + inside, mask=mask, other=0.0)
        hv = tl.load(total + (at * 2 + 1) * N * D + inside, mask=mask, other=0.0)
        hm = tl.load(mass + at * N + slots, mask=slots < N, other=0.0)
    for i in range(SEG):
        c = segment * SEG + SEG - 1 - i
        if c < NS:
            at = row.to(tl.int64) * NS + c
            logs = _load_log_mass(log_mass, at, N, NP)
            full = logs > HALF_EMPTY
            logs = tl.where(full, logs, 0.0)
            ratio = tl.where(full, tl.exp(logs - before), 0.0)
            before = logs
            new_k = tl.load(d_states + at * 2 * N * D + inside, mask=mask, other=0.0).to(tl.float32)
            new_v = tl.load(d_states + (at * 2 + 1) * N * D + inside, mask=mask, other=0.0).to(tl.float32)
            hk, hv = hk * ratio[:, None] + new_k, hv * ratio[:, None] + new_v
            hm = hm * ratio + tl.load(d_mass + at * N + slots, mask=slots < N, other=0.0)
            key, _, _ = _load_block(k, skt, c, length, C, D, BD)
            value, _, _ = _load_block(v, svt, c, length, C, D, BD)
            phi = tl.exp(_load_log(x, sxt, c, length, C, S, N, NP) - before[None, :])
            # k H - K~ H is a small difference where a slot holds one key: H keeps its digits.
            high, low = _in_two(hk, key.dtype)
            slope = tl.dot(key, tl.trans(high), input_precision=PREC)
            slope += tl.dot(key, tl.trans(low), input_precision=PREC)
            rounded = phi.to(key.dtype)
            of_key, at, there = _load_block(dk, sdt, c, length, C, D, BD)
            of_key += tl.dot(rounded, high, input_precision=PREC).to(of_key.dtype)
            high, low = _in_two(hv, key.dtype)
            slope += tl.dot(value, tl.trans(high), input_precision=PREC)
            slope += tl.dot(value, tl.trans(low), input_precision=PREC)
            of_value, at, there = _load_block(dv, sdt, c, length, C, D, BD)
            of_value += tl.dot(rounded, high, input_precision=PREC).to(of_value.dtype)
            # Several threads may hold the same numbers: all must have loaded before one stores.
            tl.debug_barrier()
            tl.store(dk + at, of_key, mask=there)
            tl.store(dv + at, of_value, mask=there)
            place = c * C + tl.arange(0, C)
            stored = (place < length)[:, None] & (slots < N)[None, :]
            slope = phi * (slope + hm[None, :])
            tl.store(dx + place[:, None] * N + slots[None, :], slope.to(dx.dtype.element_ty), mask=stored)
