"""Decoding: one token enters the window, a block leaves it for the slots if it is time, and all are read, in place."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.hybrid.read import LOG2E, add_keys

__all__ = ["take_and_read"]


@triton.jit
def _load_tile(t, at, rows, D: tl.constexpr, STRIDE: tl.constexpr, BD: tl.constexpr, mask):
    """Rows of a dense memory, D of STRIDE numbers each."""
    cols = tl.arange(0, BD)
    inside = at + rows[:, None] * STRIDE + cols[None, :]
    return tl.load(t + inside, mask=mask[:, None] & (cols < D)[None, :], other=0.0), inside


@triton.jit
def _controls(key, weight, bias, g, N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
              MASS: tl.constexpr):  # fmt: skip
    """log alpha of keys (C, NP), as ``AbcHybrid.log_alpha`` has it."""
    slots = tl.arange(0, NP)
    matrix, _ = _load_tile(weight, g * N * D, slots, D, D, BD, slots < N)
    u = tl.dot(key.to(tl.float32), tl.trans(matrix.to(tl.float32)), input_precision="tf32x3")
    u += tl.load(bias + g * N + slots, mask=slots < N, other=0.0).to(tl.float32)[None, :]
    u = tl.minimum(tl.maximum(u, -1e4), 1e4)
    if MASS:
        u = tl.where((slots < N)[None, :], u, float("-inf"))
        u -= tl.max(u, 1)[:, None]
        log = tl.maximum(u - tl.log(tl.sum(tl.exp(u), 1))[:, None], -40.0)
    else:
        # 20 tanh(u / 20) - 20
        log = -40.0 / (tl.exp(tl.minimum(u, 800.0) / 10.0) + 1.0)
    return log


@triton.jit
def take_and_read(
    # the token: query, key, value, log alpha unless keys make it, whether it is visible; the control of keys
    q, k, v, x, visible, weight, bias,
    # what is kept, updated in place
    sink_k, sink_v, ring_k, ring_v, ring_x, slots_kv, slots_z, count,
    # written
    out,
    sqb, sqh, skb, skh, svb, svh, sxb, sxh, sob, soh, G, scale,
    R: tl.constexpr, RP: tl.constexpr, W: tl.constexpr, KT: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASS: tl.constexpr,
    BY_KEY: tl.constexpr, MASKED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The outputs of R query heads for one more token of a row and key head."""
    g, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = b * G + g
    cols, slots, sinks = tl.arange(0, BD), tl.arange(0, NP), tl.arange(0, SP)
    real, real_slots = cols < D, slots < N
    seen = 1
    if MASKED:
        seen = tl.load(visible + b).to(tl.int32)
    # The newest place, with the token if it is visible.
    before = tl.load(count + row).to(tl.int32)
    newest = before + seen - 1
    if N > 0:  # noqa: SIM102
        if (seen != 0) & (before >= W) & (before % C == 0):
            leaving = tl.arange(0, C)
            position, all_there = before % W + leaving, leaving >= 0
            written = (before - W + leaving >= S)[:, None] & real_slots[None, :]
            key, _ = _load_tile(ring_k, row * W * D, position, D, D, BD, all_there)
            value, _ = _load_tile(ring_v, row * W * D, position, D, D, BD, all_there)
            if BY_KEY:
                log = _controls(key, weight, bias, g, N, NP, D, BD, MASS)
            else:
                log, _ = _load_tile(ring_x, row * W * N, position, N, N, NP, all_there)
            alpha = tl.where(written, tl.exp(log), 0.0)
            sums_k, at = _load_tile(slots_kv, row * N * 2 * D, slots, D, 2 * D, BD, real_slots)
            sums_v, at = _load_tile(slots_kv + D, row * N * 2 * D, slots, D, 2 * D, BD, real_slots)
            z = tl.load(slots_z + row * N + slots, mask=real_slots, other=0.0)
            sums_k += tl.dot(tl.trans(alpha), key.to(tl.float32), input_precision="tf32x3")
            sums_v += tl.dot(tl.trans(alpha), value.to(tl.float32), input_precision="tf32x3")
            # Several threads may hold the same numbers: all must have loaded before one stores.
            tl.debug_barrier()
            tl.store(slots_kv + at, sums_k, mask=real_slots[:, None] & real[None, :])
            tl.store(slots_kv + at + D, sums_v, mask=real_slots[:, None] & real[None, :])
            tl.store(slots_z + row * N + slots, z + tl.sum(alpha, 0), mask=real_slots)
    # The token takes the place of one that has left, which all threads must have loaded.
    tl.debug_barrier()
    if seen != 0:
        key = tl.load(k + b * skb + g * skh + cols, mask=real, other=0.0)
        value = tl.load(v + b * svb + g * svh + cols, mask=real, other=0.0)
        tl.store(ring_k + (row * W + before % W) * D + cols, key, mask=real)
        tl.store(ring_v + (row * W + before % W) * D + cols, value, mask=real)
        tl.store(sink_k + (row * S + before) * D + cols, key, mask=real & (before < S))
        tl.store(sink_v + (row * S + before) * D + cols, value, mask=real & (before < S))
        if not BY_KEY:
            log = tl.load(x + b * sxb + g * sxh + slots, mask=real_slots, other=0.0)
            tl.store(ring_x + (row * W + before % W) * N + slots, log, mask=real_slots)
        tl.store(count + row, (before + 1).to(tl.int64))
    tl.debug_barrier()
    start = tl.maximum(newest // C * C - (W - C), 0)
    heads = tl.arange(0, RP)
    mine = (heads < R)[:, None] & real[None, :]
    query = tl.load(q + b * sqb + (g * R + heads)[:, None] * sqh + cols[None, :], mask=mine, other=0.0)
    scale = scale * LOG2E
    top, total = tl.full([RP], float("-inf"), tl.float32), tl.zeros([RP], tl.float32)
    acc = tl.zeros([RP, BD], tl.float32)
    if (start > 0) & (N > 0):
        z = tl.load(slots_z + row * N + slots, mask=real_slots, other=0.0)
        over = (1.0 / tl.where(z > 0, z, 1.0))[:, None]
        key, _ = _load_tile(slots_kv, row * N * 2 * D, slots, D, 2 * D, BD, real_slots)
        value, _ = _load_tile(slots_kv + D, row * N * 2 * D, slots, D, 2 * D, BD, real_slots)
        scores = tl.dot(query, tl.trans((key * over).to(query.dtype)), input_precision=PREC) * scale
        if MASS:
            scores += tl.log2(tl.where(z > 0, z, 1.0))[None, :]
        scores = tl.where((z > 0)[None, :], scores, float("-inf"))
        top, total, acc = add_keys(scores, (value * over).to(query.dtype), top, total, acc, PREC)
    if S > 0:
        apart = (sinks < S) & (sinks < start)
        key, _ = _load_tile(sink_k, row * S * D, sinks, D, D, BD, apart)
        value, _ = _load_tile(sink_v, row * S * D, sinks, D, D, BD, apart)
        scores = tl.dot(query, tl.trans(key), input_precision=PREC) * scale
        scores = tl.where(apart[None, :], scores, float("-inf"))
        top, total, acc = add_keys(scores, value, top, total, acc, PREC)
    for i in range(0, W, KT):
        held = i + tl.arange(0, KT)
        place = newest - ((newest - held) % W + W) % W
        near = (place >= start) & (held < W)
        near_k, _at_k = _load_tile(ring_k, row * W * D, held, D, D, BD, near)
        near_v, _at_v = _load_tile(ring_v, row * W * D, held, D, D, BD, near)
        of_window = tl.dot(query, tl.trans(near_k), input_precision=PREC) * scale
        of_window = tl.where(near[None, :], of_window, float("-inf"))
        top, total, acc = add_keys(of_window, near_v, top, total, acc, PREC)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + b * sob + (g * R + heads)[:, None] * soh + cols[None, :], acc.to(out.dtype.element_ty), mask=mine)
