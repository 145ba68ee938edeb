"""The memory: what each unit of tokens writes, and the prefix over units."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels._abc_control import EMPTY, HALF_EMPTY, exp, load_logits, locate

__all__ = ["scan_back", "scan_states", "write_states"]


@triton.jit(do_not_specialize=["T", "NT", "G", "N"])
def write_states(
    k, v, s, visible, states, zs, table, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sm, T, NT, G, N, D, L,
    C: tl.constexpr, NP: tl.constexpr, BD: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, WHOLE: tl.constexpr, ONCE: tl.constexpr,
    VARLEN: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(K~, V~, z) of each unit alone: averages of its keys and values, and the logarithm of their weight."""
    unit, g, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, _, start, length = locate(unit, table, T, NT, L, VARLEN)
    first = start.to(tl.int64)
    k += b.to(tl.int64) * skb + g * skh + first * skt
    v += b.to(tl.int64) * svb + g * svh + first * svt
    s += b.to(tl.int64) * ssb + g * ssh + first * sst
    n = NP if FULL else N
    slots = tl.arange(0, NP)
    cols = tile * BD + tl.arange(0, BD)
    real = tl.arange(0, BD) < (BD if WHOLE else D - tile * BD)
    m = tl.full([NP], HALF_EMPTY, tl.float32)
    total = tl.zeros([NP], tl.float32)
    sum_k = tl.zeros([NP, BD], tl.float32)
    sum_v = tl.zeros([NP, BD], tl.float32)
    for i in range(0, C if ONCE else length, C):
        rows = i + tl.arange(0, C)
        ok = tl.arange(0, C) < C if EVEN else rows < length
        if MASKED:
            ok = ok & (tl.load(visible + b * sm + start + rows, mask=ok, other=0) != 0)
        x = load_logits(s, sst, rows, ok, slots, n)
        kd = tl.load(k + rows[:, None] * skt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
        vd = tl.load(v + rows[:, None] * svt + cols, mask=ok[:, None] & real, other=0.0).to(CT)
        top = tl.maximum(m, tl.max(x, 0))
        e = exp(x - top[None, :]).to(CT)
        sums = tl.sum(e.to(tl.float32), 0)
        e = tl.trans(e)
        if ONCE:
            total = sums
            sum_k = tl.dot(e, kd, input_precision=PREC)
            sum_v = tl.dot(e, vd, input_precision=PREC)
        else:
            keep = exp(m - top)
            total = total * keep + sums
            sum_k = tl.dot(e, kd, sum_k * keep[:, None], input_precision=PREC)
            sum_v = tl.dot(e, vd, sum_v * keep[:, None], input_precision=PREC)
        m = top
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    at = (unit.to(tl.int64) * G + g) * n
    out = states + at * 2 * D + slots[:, None] * D + cols
    wanted = (slots < n)[:, None] & real
    tl.store(out, (sum_k * inverse[:, None]).to(states.dtype.element_ty), mask=wanted)
    tl.store(out + n * D, (sum_v * inverse[:, None]).to(states.dtype.element_ty), mask=wanted)
    if tile == 0:
        tl.store(zs + at + slots, tl.where(total > 0, m + tl.log(total), EMPTY), mask=slots < n)


@triton.jit(do_not_specialize=["NT", "G", "N"])
def scan_states(
    states, zs, prefix, first_k, first_v, first_z, last_k, last_v, last_z, bounds, NT, G, N, D,
    BN: tl.constexpr, BD: tl.constexpr,
    VARLEN: tl.constexpr, STARTED: tl.constexpr,
):  # fmt: skip
    """Each unit's own state becomes the state before it, in place; ``prefix`` takes z, and the end goes to ``last``."""
    row, tile, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq, g = row // G, row % G
    if VARLEN:
        begin = tl.load(bounds + seq)
        end = tl.load(bounds + seq + 1)
    else:
        begin = seq * NT
        end = begin + NT
    slots = tile * BN + tl.arange(0, BN)
    cols = tl.arange(0, BD)
    ok = slots < N
    wanted = ok[:, None] & (cols < D)
    here = slots[:, None] * D + cols
    row = row.to(tl.int64)
    z = tl.full([BN], EMPTY, tl.float32)
    x = tl.zeros([BN, BD], tl.float32)
    if STARTED:
        z = tl.load(first_z + row * N + slots, mask=ok, other=EMPTY)
        if which == 0:
            x = tl.load(first_k + row * N * D + here, mask=wanted, other=0.0)
        else:
            x = tl.load(first_v + row * N * D + here, mask=wanted, other=0.0)
    at = ((row * 0 + begin) * G + g) * N
    step = row * 0 + G * N
    places = states + at * 2 * D + which * N * D + here
    own_zs = zs + at + slots
    left = end - begin
    # Eight units ahead in registers: the sum goes through them faster than memory answers.
    x0, z0 = _fetch(places, own_zs, 0, step, D, left, wanted, ok)
    x1, z1 = _fetch(places, own_zs, 1, step, D, left, wanted, ok)
    x2, z2 = _fetch(places, own_zs, 2, step, D, left, wanted, ok)
    x3, z3 = _fetch(places, own_zs, 3, step, D, left, wanted, ok)
    x4, z4 = _fetch(places, own_zs, 4, step, D, left, wanted, ok)
    x5, z5 = _fetch(places, own_zs, 5, step, D, left, wanted, ok)
    x6, z6 = _fetch(places, own_zs, 6, step, D, left, wanted, ok)
    x7, z7 = _fetch(places, own_zs, 7, step, D, left, wanted, ok)
    for i in range(left):
        next_x, next_z = _fetch(places, own_zs, i + 8, step, D, left, wanted, ok)
        tl.store(places + i * step * 2 * D, x.to(states.dtype.element_ty), mask=wanted)
        if which == 0:
            tl.store(prefix + at + i * step + slots, z, mask=ok)
        top = tl.maximum(z, z0)
        old = exp(z - top)
        new = exp(z0 - top)
        total = old + new
        part = 1.0 / total
        x = x * (old * part)[:, None] + x0.to(tl.float32) * (new * part)[:, None]
        z = tl.where(top > HALF_EMPTY, top + tl.log(total), EMPTY)
        x0, x1, x2, x3, x4, x5, x6, x7 = x1, x2, x3, x4, x5, x6, x7, next_x
        z0, z1, z2, z3, z4, z5, z6, z7 = z1, z2, z3, z4, z5, z6, z7, next_z
    if which == 0:
        tl.store(last_k + row * N * D + here, x, mask=wanted)
        tl.store(last_z + row * N + slots, z, mask=ok)
    else:
        tl.store(last_v + row * N * D + here, x, mask=wanted)


@triton.jit(do_not_specialize=["NT", "H", "R", "N"])
def scan_back(
    sums, cs, prefix, last_z, seeds, seed_c, to, to_c, bounds, NT, H, R, N, D,
    BN: tl.constexpr, BD: tl.constexpr,
    VARLEN: tl.constexpr, DECAY: tl.constexpr, SEEDED: tl.constexpr,
):  # fmt: skip
    """Each unit's own gradient sums become those of all units after it, relative to z at its end, in place.

    Without ``DECAY`` (all queries read one state) only their total is wanted.
    """
    row, tile, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq, h = row // H, row % H
    if VARLEN:
        begin = tl.load(bounds + seq)
        end = tl.load(bounds + seq + 1)
    else:
        begin = seq * NT
        end = begin + NT
    slots = tile * BN + tl.arange(0, BN)
    cols = tl.arange(0, BD)
    ok = slots < N
    wanted = ok[:, None] & (cols < D)
    here = slots[:, None] * D + cols
    row = row.to(tl.int64)
    x = tl.zeros([BN, BD], tl.float32)
    c = tl.zeros([BN], tl.float32)
    mine = row * 2 + which
    if SEEDED:
        c = tl.load(seed_c + mine * N + slots, mask=ok, other=0.0)
        x = tl.load(seeds + mine * N * D + here, mask=wanted, other=0.0)
    z_next = tl.load(last_z + (seq * (H // R) + h // R).to(tl.int64) * N + slots, mask=ok, other=EMPTY)
    left = end - begin
    # The last unit's place; steps go down from there.
    final = row * 0 + end - 1
    at = ((final * H + h) * 2 + which) * N
    step = row * 0 + 2 * H * N
    places = sums + at * D + here
    parts = cs + at + slots
    priors = prefix + (final * (H // R) + h // R) * N + slots
    x0, c0, z0 = _fetch_back(places, parts, priors, 0, step, D, (H // R) * N, left, wanted, ok, DECAY)
    x1, c1, z1 = _fetch_back(places, parts, priors, 1, step, D, (H // R) * N, left, wanted, ok, DECAY)
    x2, c2, z2 = _fetch_back(places, parts, priors, 2, step, D, (H // R) * N, left, wanted, ok, DECAY)
    x3, c3, z3 = _fetch_back(places, parts, priors, 3, step, D, (H // R) * N, left, wanted, ok, DECAY)
    x4, c4, z4 = _fetch_back(places, parts, priors, 4, step, D, (H // R) * N, left, wanted, ok, DECAY)
    x5, c5, z5 = _fetch_back(places, parts, priors, 5, step, D, (H // R) * N, left, wanted, ok, DECAY)
    for i in range(left):
        x6, c6, z6 = _fetch_back(places, parts, priors, i + 6, step, D, (H // R) * N, left, wanted, ok, DECAY)
        if DECAY:
            tl.store(places - i * step * D, x.to(sums.dtype.element_ty), mask=wanted)
            tl.store(parts - i * step, c, mask=ok)
            keep = tl.where(z0 > HALF_EMPTY, exp(z0 - z_next), 0.0)
            z_next = z0
            x = x0.to(tl.float32) + x * keep[:, None]
            c = c0 + c * keep
        else:
            x += x0.to(tl.float32)
            c += c0
        x0, x1, x2, x3, x4, x5 = x1, x2, x3, x4, x5, x6
        c0, c1, c2, c3, c4, c5 = c1, c2, c3, c4, c5, c6
        z0, z1, z2, z3, z4, z5 = z1, z2, z3, z4, z5, z6
    tl.store(to + mine * N * D + here, x, mask=wanted)
    tl.store(to_c + mine * N + slots, c, mask=ok)


@triton.jit
def _fetch(places, zs, i, step, D, left, wanted, ok):
    """The state and z of unit i, if there is one."""
    there = tl.full(ok.shape, 0, tl.int32) + i < left
    return (
        tl.load(places + i * step * 2 * D, mask=wanted & there[:, None], other=0.0),
        tl.load(zs + i * step, mask=ok & there, other=EMPTY),
    )


@triton.jit
def _fetch_back(places, parts, priors, i, step, D, z_step, left, wanted, ok, DECAY: tl.constexpr):
    """The sums and z of the unit i before the last, if there is one."""
    there = tl.full(ok.shape, 0, tl.int32) + i < left
    x = tl.load(places - i * step * D, mask=wanted & there[:, None], other=0.0)
    c = tl.load(parts - i * step, mask=ok & there, other=0.0)
    z = c
    if DECAY:
        z = tl.load(priors - i * z_step, mask=ok & there, other=EMPTY)
    return x, c, z
