"""One token at a time: fold it into the memory and read it, in place and in one launch."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels._abc_control import EMPTY, HALF_EMPTY, within

__all__ = ["fold_and_read"]


@triton.jit
def fold_and_read(
    q, k, v, s, visible, memory_k, memory_v, memory_z, count, o,
    sqb, sqh, skb, skh, svb, svh, ssb, ssh, sob, soh, G, N, scale,
    R: tl.constexpr, RP: tl.constexpr, NP: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    FULL: tl.constexpr, MASKED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """K~, V~, z after the token, and the output of the query heads that read them, over tiles of slots."""
    b, g = tl.program_id(0), tl.program_id(1)
    row = b.to(tl.int64)
    at = (row * G + g) * N
    memory_k += at * D
    memory_v += at * D
    memory_z += at
    s += row * ssb + g * ssh
    cols = tl.arange(0, BD)
    heads = tl.arange(0, RP)
    inside = within(cols, D, FULL)
    kd = tl.load(k + row * skb + g * skh + cols, mask=inside, other=0.0).to(tl.float32)
    vd = tl.load(v + row * svb + g * svh + cols, mask=inside, other=0.0).to(tl.float32)
    if R == 1:
        # A single head without an axis of its own: with one of length 1, Triton keeps tiles in two layouts.
        queries = tl.load(q + row * sqb + g * sqh + cols, mask=inside, other=0.0).to(tl.float32)
        top, total = float("-inf"), 0.0
        out = tl.zeros([BD], tl.float32)
    else:
        at_heads = (g * R + heads)[:, None]
        mine = (heads < R)[:, None] & inside
        queries = tl.load(q + row * sqb + at_heads * sqh + cols, mask=mine, other=0.0).to(tl.float32)
        top = tl.full([RP], float("-inf"), tl.float32)
        total = tl.zeros([RP], tl.float32)
        out = tl.zeros([RP, BD], tl.float32)
    seen = 1
    if MASKED:
        seen = tl.load(visible + b).to(tl.int32)
        # What nobody may see may be anything.
        kd = tl.where(seen != 0, kd, 0.0)
        vd = tl.where(seen != 0, vd, 0.0)
    for i in tl.static_range(0, NP, BN):
        slots = i + tl.arange(0, BN)
        there = within(slots, N, FULL)
        wanted = there[:, None] & inside
        place = slots[:, None] * D + cols
        mk = tl.load(memory_k + place, mask=wanted, other=0.0)
        mv = tl.load(memory_v + place, mask=wanted, other=0.0)
        # z may be float64: it lives through every step, and its rounding would add up.
        z = tl.load(memory_z + slots, mask=there, other=EMPTY)
        x = tl.load(s + slots, mask=there, other=EMPTY).to(z.dtype)
        if MASKED:
            x = tl.where(seen != 0, x, EMPTY)
        keep, write, new = _fold(z, x)
        mk = mk * keep[:, None] + write[:, None] * kd[None, :]
        mv = mv * keep[:, None] + write[:, None] * vd[None, :]
        # It is long until they are read again.
        tl.store(memory_k + place, mk, mask=wanted, cache_modifier=".cs")
        tl.store(memory_v + place, mv, mask=wanted, cache_modifier=".cs")
        tl.store(memory_z + slots, new, mask=there)
        if R == 1:
            scores = tl.where(new > HALF_EMPTY, tl.sum(queries[None, :] * mk, 1) * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp(scores - base)
            fade = tl.exp(top - base)
            total = total * fade + tl.sum(p, 0)
            out = out * fade + tl.sum(p[:, None] * mv, 0)
        else:
            scores = tl.sum(queries[:, None, :] * mk[None, :, :], 2) * scale
            scores = tl.where((new > HALF_EMPTY)[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp(scores - base[:, None])
            fade = tl.exp(top - base)
            total = total * fade + tl.sum(p, 1)
            out = out * fade[:, None] + tl.sum(p[:, :, None] * mv[None, :, :], 1)
        top = higher
    whole = tl.where(total > 0, total, 1.0)
    if R == 1:
        tl.store(o + row * sob + g * soh + cols, (out / whole).to(o.dtype.element_ty), mask=inside)
    else:
        out = (out / whole[:, None]).to(o.dtype.element_ty)
        tl.store(o + row * sob + at_heads * soh + cols, out, mask=mine)
    if COUNTED:  # noqa: SIM102
        if g == 0:
            tl.store(count + b, tl.load(count + b) + seen)


@triton.jit
def _fold(z, x):
    """What is kept of each slot, what the token adds to it, and z after it."""
    new = tl.maximum(z, x)
    old_part = tl.exp((z - new).to(tl.float32))
    new_part = tl.where(x > HALF_EMPTY, tl.exp((x - new).to(tl.float32)), 0.0)
    # Empty slots have neither part where EMPTY is not the same number in both dtypes.
    whole = tl.maximum(old_part + new_part, 1e-30)
    over = 1.0 / whole
    new = tl.where(new > HALF_EMPTY, new + tl.log(whole).to(z.dtype), EMPTY)
    return old_part * over, new_part * over, new
