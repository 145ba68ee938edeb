"""One token at a time: fold it into the memory and read it, in place and in one launch."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels._abc_control import EMPTY, HALF_EMPTY

__all__ = ["fold_and_read"]


@triton.jit
def fold_and_read(
    q, k, v, s, visible, memory_k, memory_v, memory_z, count, o,
    sqb, sqh, skb, skh, svb, svh, ssb, ssh, sob, soh, G, N, scale,
    R: tl.constexpr, RP: tl.constexpr, NP: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    MASKED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """K~, V~, z after the token, and the output of the query heads that read them, over tiles of slots."""
    b, g = tl.program_id(0), tl.program_id(1)
    row = b.to(tl.int64)
    cols = tl.arange(0, BD)
    heads = tl.arange(0, RP)
    inside = cols < D
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
    top = tl.full([RP], float("-inf"), tl.float32)
    total = tl.zeros([RP], tl.float32)
    out = tl.zeros([RP, BD], tl.float32)
    for i in tl.static_range(0, NP, BN):
        slots = i + tl.arange(0, BN)
        there = (slots < N)[:, None] & inside
        place = at * D + slots[:, None] * D + cols
        mk = tl.load(memory_k + place, mask=there, other=0.0)
        mv = tl.load(memory_v + place, mask=there, other=0.0)
        # z may be float64: it lives through every step, and its rounding would add up.
        z = tl.load(memory_z + at + slots, mask=slots < N, other=EMPTY)
        x = tl.load(s + row * ssb + g * ssh + slots, mask=slots < N, other=EMPTY).to(z.dtype)
        if MASKED:
            x = tl.where(seen != 0, x, EMPTY)
        new = tl.maximum(z, x)
        old_part = tl.exp((z - new).to(tl.float32))
        new_part = tl.where(x > HALF_EMPTY, tl.exp((x - new).to(tl.float32)), 0.0)
        # Empty slots have neither part where EMPTY is not the same number in both dtypes.
        whole = tl.maximum(old_part + new_part, 1e-30)
        keep = old_part / whole
        write = new_part / whole
        new = tl.where(new > HALF_EMPTY, new + tl.log(whole).to(z.dtype), EMPTY)
        mk = mk * keep[:, None] + write[:, None] * kd[None, :]
        mv = mv * keep[:, None] + write[:, None] * vd[None, :]
        tl.store(memory_k + place, mk, mask=there)
        tl.store(memory_v + place, mv, mask=there)
        tl.store(memory_z + at + slots, new, mask=slots < N)
        if R == 1:
            scores = tl.sum(queries * mk, 1)[None, :] * scale
        else:
            scores = tl.sum(queries[:, None, :] * mk[None, :, :], 2) * scale
        scores = tl.where((new > HALF_EMPTY)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(scores - base[:, None])
        fade = tl.exp(top - base)
        total = total * fade + tl.sum(p, 1)
        if R == 1:
            # One head needs no third axis.
            out = out * fade[:, None] + tl.sum(tl.reshape(p, [BN])[:, None] * mv, 0)[None, :]
        else:
            out = out * fade[:, None] + tl.sum(p[:, :, None] * mv[None, :, :], 1)
        top = higher
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        o + row * sob + (g * R + heads)[:, None] * soh + cols,
        out.to(o.dtype.element_ty),
        mask=(heads < R)[:, None] & inside,
    )
    if COUNTED:  # noqa: SIM102
        if g == 0:
            tl.store(count + b, tl.load(count + b) + seen)
