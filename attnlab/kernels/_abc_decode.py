"""One token at a time: fold it into the memory and read it, in place and in one launch."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels._abc_control import EMPTY, HALF_EMPTY, exp, within

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
    cols = tl.arange(0, BD)
    heads = tl.arange(0, RP)
    inside = within(cols, D, D == BD)
    kd = tl.load(k + row * skb + g * skh + cols, mask=inside, other=0.0).to(tl.float32)
    vd = tl.load(v + row * svb + g * svh + cols, mask=inside, other=0.0).to(tl.float32)
    queries = tl.load(
        q + row * sqb + (g * R + heads)[:, None] * sqh + cols, mask=(heads < R)[:, None] & inside, other=0.0
    ).to(tl.float32)  # fmt: skip
    seen = 1
    if MASKED:
        seen = tl.load(visible + b).to(tl.int32)
        # What nobody may see may be anything.
        kd = tl.where(seen != 0, kd, 0.0)
        vd = tl.where(seen != 0, vd, 0.0)
    at = (row * G + g) * N
    memory_k += at * D
    memory_v += at * D
    memory_z += at
    s += row * ssb + g * ssh
    # A softmax for each slot of a tile; they meet at the end, so that no warp waits for another before.
    top = tl.full([RP, BN], float("-inf"), tl.float32)
    total = tl.zeros([RP, BN], tl.float32)
    out = tl.zeros([RP, BN, BD], tl.float32)
    for i in range(0, NP, BN):
        slots = i + tl.arange(0, BN)
        ok = within(slots, N, FULL)
        there = ok[:, None] & inside
        place = slots[:, None] * D + cols
        mk = tl.load(memory_k + place, mask=there, other=0.0)
        mv = tl.load(memory_v + place, mask=there, other=0.0)
        # z may be float64: it lives through every step, and its rounding would add up.
        z = tl.load(memory_z + slots, mask=ok, other=EMPTY)
        x = tl.load(s + slots, mask=ok, other=EMPTY).to(z.dtype)
        if MASKED:
            x = tl.where(seen != 0, x, EMPTY)
        new = tl.maximum(z, x)
        old_part = exp((z - new).to(tl.float32))
        new_part = tl.where(x > HALF_EMPTY, exp((x - new).to(tl.float32)), 0.0)
        # Empty slots have neither part where EMPTY is not the same number in both dtypes.
        whole = tl.maximum(old_part + new_part, 1e-30)
        keep = old_part / whole
        write = new_part / whole
        new = tl.where(new > HALF_EMPTY, new + tl.log(whole).to(z.dtype), EMPTY)
        mk = mk * keep[:, None] + write[:, None] * kd[None, :]
        mv = mv * keep[:, None] + write[:, None] * vd[None, :]
        tl.store(memory_k + place, mk, mask=there)
        tl.store(memory_v + place, mv, mask=there)
        tl.store(memory_z + slots, new, mask=ok)
        scores = tl.sum(queries[:, None, :] * mk[None, :, :], 2) * scale
        scores = tl.where((new > HALF_EMPTY)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, scores)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = exp(scores - base)
        fade = exp(top - base)
        total = total * fade + p
        out = out * fade[:, :, None] + p[:, :, None] * mv[None, :, :]
        top = higher
    highest = tl.max(top, 1)
    part = exp(top - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
    total = tl.sum(total * part, 1)
    out = tl.sum(out * part[:, :, None], 1) / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        o + row * sob + (g * R + heads)[:, None] * soh + cols,
        out.to(o.dtype.element_ty),
        mask=(heads < R)[:, None] & inside,
    )
    if COUNTED:  # noqa: SIM102
        if g == 0:
            tl.store(count + b, tl.load(count + b) + seen)
