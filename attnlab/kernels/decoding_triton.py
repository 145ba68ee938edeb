"""The kernels of ``decoding``: one token through a memory of constant size, sums of features and values, or slots."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.abc.control import HALF_EMPTY, within

__all__ = ["ELU", "RELU", "WAVES", "add_and_read", "read_only"]

# Feature maps: elu(scale t) + 1; relu(W t + b); scale [sin(W t), cos(W t)] of t divided by its length.
ELU = tl.constexpr(0)
RELU = tl.constexpr(1)
WAVES = tl.constexpr(2)


@triton.jit
def add_and_read(
    # the token
    q, k, v,
    # the feature map
    weight, bias,
    # the gate: logarithm of the state's factor, and the token's factor; whether the token is visible
    stays, enters, visible,
    # updated in place
    state,
    # written
    o,
    # strides, swg of the feature map's heads
    sqb, sqh, skb, skh, svb, svh, sob, soh, swg,
    # sizes: key heads, rows of W (or columns of q, without W); the map's factor; the least denominator
    G, F, scale, least,
    # tiles: query heads of a key head, rows of W, columns of keys and of values; each with padding or as a tile
    R: tl.constexpr, RP: tl.constexpr, FP: tl.constexpr, BF: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, UNPADDED: tl.constexpr,
    # the call
    MAP: tl.constexpr, WRITES: tl.constexpr, MASKED: tl.constexpr, GATED: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """S = keep S + enter phi(k) [v, 1]^T and out = phi(q) S, the last column of which divides the others.

    Without WRITES the state is only read. BOUNDED divides by at least ``least``.
    """
    # Where the state and the queries lie.
    b, g = tl.program_id(0), tl.program_id(1)
    row = b.to(tl.int64)
    width: tl.constexpr = E + 1
    state += (row * G + g) * (F * (2 if MAP == WAVES else 1)) * width
    q += row * sqb + g * R * sqh
    dims = tl.arange(0, BD)
    cols = tl.arange(0, BE)
    heads = tl.arange(0, RP)
    inside = within(dims, D, UNPADDED)
    mine = within(cols, E, UNPADDED)
    # The value, the gate and the mask.
    keep, enter, seen = 1.0, 1.0, 1
    if MAP != ELU:
        weight += g * swg
    if WRITES:
        k += row * skb + g * skh
        vd = tl.load(v + row * svb + g * svh + cols, mask=mine, other=0.0).to(tl.float32)
        if GATED:
            keep = tl.exp(tl.load(stays + row * G + g).to(tl.float32))
            enter = tl.load(enters + row * G + g).to(tl.float32)
        if MASKED:
            seen = tl.load(visible + b).to(tl.int32)
            # A hidden value may be NaN.
            vd = tl.where(seen != 0, vd, 0.0)
            keep = tl.where(seen != 0, keep, 1.0)
            enter = tl.where(seen != 0, enter, 0.0)
    else:
        vd = tl.zeros([BE], tl.float32)
    if R == 1:
        # A single head has no axis of its own: with an axis of length 1, Triton keeps tiles in two layouts.
        out = tl.zeros([BE], tl.float32)
        total = 0.0
    else:
        out = tl.zeros([RP, BE], tl.float32)
        total = tl.zeros([RP], tl.float32)
    # Keys and queries, where the feature map needs whole rows of them.
    if MAP == ELU:
        kd, queries = 0.0, 0.0
    else:
        kd = tl.zeros([BD], tl.float32)
        if WRITES:
            kd = tl.load(k + dims, mask=inside, other=0.0).to(tl.float32)
            if MASKED:
                kd = tl.where(seen != 0, kd, 0.0)
        if R == 1:
            queries = tl.load(q + dims, mask=inside, other=0.0).to(tl.float32)
        else:
            queries = tl.load(
                q + heads[:, None] * sqh + dims, mask=(heads < R)[:, None] & inside[None, :], other=0.0
            ).to(tl.float32)
        if MAP == WAVES:
            kd = _unit(kd, 0)
            queries = _unit(queries, 0 if R == 1 else 1)
    # A tile of features at a time: their values, then the state's rows updated and read.
    for i in range(0, FP, BF):
        rows = i + tl.arange(0, BF)
        real_rows = within(rows, F, UNPADDED)
        if MAP == ELU:
            fk = tl.zeros([BF], tl.float32)
            if WRITES:
                fk = tl.load(k + rows, mask=real_rows, other=0.0).to(tl.float32)
                if MASKED:
                    fk = tl.where(seen != 0, fk, 0.0)
            fk = _elu(fk, scale)
            if R == 1:
                fq = _elu(tl.load(q + rows, mask=real_rows, other=0.0).to(tl.float32), scale)
            else:
                fq = _elu(
                    tl.load(
                        q + heads[:, None] * sqh + rows, mask=(heads < R)[:, None] & real_rows[None, :], other=0.0
                    ).to(tl.float32),
                    scale,
                )
        else:
            w = tl.load(
                weight + rows[:, None] * D + dims, mask=real_rows[:, None] & inside[None, :], other=0.0
            ).to(tl.float32)  # fmt: skip
            fk = tl.sum(w * kd[None, :], 1)
            fq = tl.sum(w * queries[None, :], 1) if R == 1 else tl.sum(queries[:, None, :] * w[None, :, :], 2)
        if MAP == RELU:
            c = tl.load(bias + g * F + rows, mask=real_rows, other=0.0).to(tl.float32)
            fk = tl.maximum(fk + c, 0.0)
            fq = tl.maximum(fq + c, 0.0) if R == 1 else tl.maximum(fq + c[None, :], 0.0)
        if MAP == WAVES:
            out, total = _update_and_read_rows(
                state + rows * width, real_rows, cols, mine, tl.sin(fk) * (scale * enter), tl.sin(fq) * scale, vd, keep,
                out, total, E, R, WRITES,
            )  # fmt: skip
            out, total = _update_and_read_rows(
                state + (F + rows) * width, real_rows, cols, mine, tl.cos(fk) * (scale * enter), tl.cos(fq) * scale, vd,
                keep, out, total, E, R, WRITES,
            )  # fmt: skip
        else:
            out, total = _update_and_read_rows(
                state + rows * width, real_rows, cols, mine, fk * enter, fq, vd, keep, out, total, E, R, WRITES
            )
    # The output divided by its last column.
    if BOUNDED:
        over = 1.0 / tl.maximum(total, least)
    else:
        over = tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
    o += row * sob + g * R * soh
    if R == 1:
        tl.store(o + cols, (out * over).to(o.dtype.element_ty), mask=mine)
    else:
        out = (out * over[:, None]).to(o.dtype.element_ty)
        tl.store(o + heads[:, None] * soh + cols, out, mask=(heads < R)[:, None] & mine[None, :])


@triton.jit
def _unit(t, axis: tl.constexpr):
    """The vector divided by its length."""
    length = tl.sqrt(tl.sum(t * t, axis, keep_dims=True))
    return t / tl.maximum(length, 1e-12)


@triton.jit
def _elu(t, scale):
    """elu(scale t) + 1."""
    t = t * scale
    return tl.where(t > 0, t + 1, tl.exp(tl.minimum(t, 0.0)))


@triton.jit
def _update_and_read_rows(
    at, real_rows, cols, mine, fk, fq, vd, keep, out, total, E: tl.constexpr, R: tl.constexpr, WRITES: tl.constexpr
):  # fmt: skip
    """Some rows of the state: the token is added to them, and they are added to what the queries read."""
    wanted = real_rows[:, None] & mine[None, :]
    place = at[:, None] + cols
    s = tl.load(place, mask=wanted, other=0.0)
    z = tl.load(at + E, mask=real_rows, other=0.0)
    if WRITES:
        s = s * keep + fk[:, None] * vd[None, :]
        z = z * keep + fk
        # Not kept in the cache: they are read again only at the next step.
        tl.store(place, s, mask=wanted, cache_modifier=".cs")
        tl.store(at + E, z, mask=real_rows)
        s = tl.where(wanted, s, 0.0)
        z = tl.where(real_rows, z, 0.0)
    if R == 1:
        out += tl.sum(fq[:, None] * s, 0)
        total += tl.sum(fq * z, 0)
    else:
        out += tl.sum(fq[:, :, None] * s[None, :, :], 1)
        total += tl.sum(fq * z[None, :], 1)
    return out, total


@triton.jit
def read_only(
    # the query and the memory
    q, memory_k, memory_v, memory_z,
    # written
    o,
    # strides
    sqb, sqh, sob, soh,
    # sizes
    G, N, scale,
    # tiles: query heads of a key head, slots, columns of keys and of values, with padding
    R: tl.constexpr, NP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    UNPADDED: tl.constexpr,
):  # fmt: skip
    """V~^T softmax(scale K~ q) over the slots that are not empty, for the query heads that read one memory."""
    b, g = tl.program_id(0), tl.program_id(1)
    row = b.to(tl.int64)
    at = (row * G + g) * N
    slots = tl.arange(0, NP)
    dims = tl.arange(0, BD)
    cols = tl.arange(0, BE)
    real_rows = within(slots, N, UNPADDED)
    inside = within(dims, D, UNPADDED)
    mine = within(cols, E, UNPADDED)
    mk = tl.load(memory_k + (at + slots)[:, None] * D + dims, mask=real_rows[:, None] & inside[None, :], other=0.0)
    mv = tl.load(memory_v + (at + slots)[:, None] * E + cols, mask=real_rows[:, None] & mine[None, :], other=0.0)
    z = tl.load(memory_z + at + slots, mask=real_rows, other=2 * HALF_EMPTY)
    for r in tl.static_range(0, R):
        head = g * R + r
        query = tl.load(q + row * sqb + head * sqh + dims, mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(z > HALF_EMPTY, tl.sum(mk * query[None, :], 1) * scale, float("-inf"))
        top = tl.max(scores, 0)
        p = tl.exp(scores - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(p, 0)
        out = tl.sum(p[:, None] * mv, 0) / tl.where(total > 0, total, 1.0)
        tl.store(o + row * sob + head * soh + cols, out.to(o.dtype.element_ty), mask=mine)
