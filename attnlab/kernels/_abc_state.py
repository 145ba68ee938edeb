"""The memory: what each unit of tokens writes, and the prefix over units."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels._abc_control import EMPTY, HALF_EMPTY, load_logits, locate

__all__ = ["scan_back", "scan_states", "write_states"]


@triton.jit(do_not_specialize=["T", "NT", "G", "N"])
def write_states(
    k, v, s, visible, states, zs, table, skb, skh, skt, svb, svh, svt, ssb, ssh, sst, sm, T, NT, G, N, L,
    C: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
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
    m = tl.full([NP], HALF_EMPTY, tl.float32)
    total = tl.zeros([NP], tl.float32)
    sum_k = tl.zeros([NP, BD], tl.float32)
    sum_v = tl.zeros([NP, BD], tl.float32)
    for i in range(0, length, C):
        rows = i + tl.arange(0, C)
        ok = tl.arange(0, C) < C if EVEN else rows < length
        if MASKED:
            ok = ok & (tl.load(visible + b * sm + start + rows, mask=ok, other=0) != 0)
        x = load_logits(s, sst, rows, ok, slots, n)
        wanted = ok[:, None] & (cols < D)
        kd = tl.load(k + rows[:, None] * skt + cols, mask=wanted, other=0.0).to(CT)
        vd = tl.load(v + rows[:, None] * svt + cols, mask=wanted, other=0.0).to(CT)
        top = tl.maximum(m, tl.max(x, 0))
        keep = tl.exp(m - top)
        e = tl.exp(x - top[None, :]).to(CT)
        total = total * keep + tl.sum(e.to(tl.float32), 0)
        e = tl.trans(e)
        sum_k = tl.dot(e, kd, sum_k * keep[:, None], input_precision=PREC)
        sum_v = tl.dot(e, vd, sum_v * keep[:, None], input_precision=PREC)
        m = top
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    at = (unit.to(tl.int64) * G + g) * n
    out = states + at * 2 * D + slots[:, None] * D + cols
    wanted = (slots < n)[:, None] & (cols < D)
    tl.store(out, (sum_k * inverse[:, None]).to(states.dtype.element_ty), mask=wanted)
    tl.store(out + n * D, (sum_v * inverse[:, None]).to(states.dtype.element_ty), mask=wanted)
    if tile == 0:
        tl.store(zs + at + slots, tl.where(total > 0, m + tl.log(total), EMPTY), mask=slots < n)


@triton.jit(do_not_specialize=["NT", "G", "N"])
def scan_states(
    states, zs, prefix, first_k, first_v, first_z, last_k, last_v, last_z, bounds, NT, G, N,
    D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    VARLEN: tl.constexpr, STARTED: tl.constexpr, STAGES: tl.constexpr,
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
    for unit in tl.range(begin, end, num_stages=STAGES):
        at = ((row * 0 + unit) * G + g) * N
        place = states + at * 2 * D + which * N * D + here
        own_z = tl.load(zs + at + slots, mask=ok, other=EMPTY)
        own = tl.load(place, mask=wanted, other=0.0).to(tl.float32)
        tl.store(place, x.to(states.dtype.element_ty), mask=wanted)
        if which == 0:
            tl.store(prefix + at + slots, z, mask=ok)
        top = tl.maximum(z, own_z)
        old = tl.exp(z - top)
        new = tl.exp(own_z - top)
        total = old + new
        x = x * (old / total)[:, None] + own * (new / total)[:, None]
        z = tl.where(top > HALF_EMPTY, top + tl.log(total), EMPTY)
    if which == 0:
        tl.store(last_k + row * N * D + here, x, mask=wanted)
        tl.store(last_z + row * N + slots, z, mask=ok)
    else:
        tl.store(last_v + row * N * D + here, x, mask=wanted)


@triton.jit(do_not_specialize=["NT", "H", "R", "N"])
def scan_back(
    sums, cs, prefix, last_z, seeds, seed_c, to, to_c, bounds, NT, H, R, N,
    D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    VARLEN: tl.constexpr, DECAY: tl.constexpr, SEEDED: tl.constexpr, STAGES: tl.constexpr,
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
    for i in tl.range(0, end - begin, num_stages=STAGES):
        unit = row * 0 + (end - 1 - i)
        at = ((unit * H + h) * 2 + which) * N
        own = tl.load(sums + at * D + here, mask=wanted, other=0.0).to(tl.float32)
        own_c = tl.load(cs + at + slots, mask=ok, other=0.0)
        if DECAY:
            z = tl.load(prefix + (unit * (H // R) + h // R) * N + slots, mask=ok, other=EMPTY)
            tl.store(sums + at * D + here, x.to(sums.dtype.element_ty), mask=wanted)
            tl.store(cs + at + slots, c, mask=ok)
            keep = tl.where(z > HALF_EMPTY, tl.exp(z - z_next), 0.0)
            z_next = z
            x = own + x * keep[:, None]
            c = own_c + c * keep
        else:
            x += own
            c += own_c
    tl.store(to + mine * N * D + here, x, mask=wanted)
    tl.store(to_c + mine * N + slots, c, mask=ok)
