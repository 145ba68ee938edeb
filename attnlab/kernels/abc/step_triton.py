"""Decoding: one token is folded into the memory, which is then read, in place and in one launch."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.abc.control import EMPTY, HALF_EMPTY, within

__all__ = ["fold_and_read", "fold_and_read_group"]


@triton.jit
def fold_and_read(
    # the token: query, key, value, control logits, whether it is visible
    q, k, v, s, visible,
    # the memory and the number of its tokens, updated in place
    memory_k, memory_v, memory_z, count,
    # written
    o,
    # strides
    sqb, sqh, skb, skh, svb, svh, ssb, ssh, sob, soh,
    # sizes
    G, N, scale,
    # tiles
    NP: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    # the call
    UNPADDED: tl.constexpr, MASKED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """K~, V~, z after the token, and the output of the one query head that reads them, a tile of BN slots at a time.

    A program is one warp. Each of the BN places of a tile keeps a running softmax of its own, and these are merged at
    the end, so that threads need not wait for each other. The next tile is loaded before this one is stored. UNPADDED
    says that neither slots nor columns are padded.
    """
    g, b = tl.program_id(0), tl.program_id(1)
    row = b.to(tl.int64)
    at = (row * G + g) * N
    memory_k, memory_v, memory_z = memory_k + at * D, memory_v + at * D, memory_z + at
    s += row * ssb + g * ssh
    cols = tl.arange(0, BD)
    inside = within(cols, D, UNPADDED)
    mk, mv, z, x = _load_tile(memory_k, memory_v, memory_z, s, 0, N, D, cols, inside, BN, UNPADDED)
    kd, vd, seen = _load_token(k + row * skb + g * skh, v + row * svb + g * svh, visible, b, cols, inside, MASKED)
    query = tl.load(q + row * sqb + g * sqh + cols, mask=inside, other=0.0).to(tl.float32) * scale
    top = tl.full([BN], float("-inf"), tl.float32)
    total = tl.zeros([BN], tl.float32)
    out = tl.zeros([BN, BD], tl.float32)
    for i in tl.range(0, NP, BN, num_stages=1):
        later = tl.minimum(i + BN, NP - BN)
        next_k, next_v, next_z, next_x = _load_tile(
            memory_k, memory_v, memory_z, s, later, N, D, cols, inside, BN, UNPADDED
        )
        mk, mv, new = _fold(mk, mv, z, x, kd, vd, seen, MASKED)
        _store_tile(memory_k, memory_v, memory_z, i, mk, mv, new, N, D, cols, inside, BN, UNPADDED)
        scores = tl.where(new > HALF_EMPTY, tl.sum(query[None, :] * mk, 1), float("-inf"))
        higher = tl.maximum(top, scores)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(scores - base)
        fade = tl.exp(top - base)
        total = total * fade + p
        out = out * fade[:, None] + p[:, None] * mv
        top = higher
        mk, mv, z, x = next_k, next_v, next_z, next_x
    best = tl.max(top, 0)
    fade = tl.exp(top - tl.where(best == float("-inf"), 0.0, best))
    whole = tl.sum(total * fade, 0)
    out = tl.sum(out * fade[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(o + row * sob + g * soh + cols, out.to(o.dtype.element_ty), mask=inside)
    if COUNTED:
        _add_to_count(count + b, g, seen)


@triton.jit
def fold_and_read_group(
    # the token: query, key, value, control logits, whether it is visible
    q, k, v, s, visible,
    # the memory and the number of its tokens, updated in place
    memory_k, memory_v, memory_z, count,
    # written
    o,
    # strides
    sqb, sqh, skb, skh, svb, svh, ssb, ssh, sob, soh,
    # sizes
    G, N, scale,
    # tiles
    R: tl.constexpr, RP: tl.constexpr, NP: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    # the call
    UNPADDED: tl.constexpr, MASKED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """The same for R query heads that read one memory."""
    g, b = tl.program_id(0), tl.program_id(1)
    row = b.to(tl.int64)
    at = (row * G + g) * N
    memory_k, memory_v, memory_z = memory_k + at * D, memory_v + at * D, memory_z + at
    s += row * ssb + g * ssh
    cols = tl.arange(0, BD)
    heads = tl.arange(0, RP)
    inside = within(cols, D, UNPADDED)
    kd, vd, seen = _load_token(k + row * skb + g * skh, v + row * svb + g * svh, visible, b, cols, inside, MASKED)
    at_heads = (g * R + heads)[:, None]
    mine = (heads < R)[:, None] & inside
    queries = tl.load(q + row * sqb + at_heads * sqh + cols, mask=mine, other=0.0).to(tl.float32) * scale
    top = tl.full([RP], float("-inf"), tl.float32)
    total = tl.zeros([RP], tl.float32)
    out = tl.zeros([RP, BD], tl.float32)
    for i in tl.static_range(0, NP, BN):
        mk, mv, z, x = _load_tile(memory_k, memory_v, memory_z, s, i, N, D, cols, inside, BN, UNPADDED)
        mk, mv, new = _fold(mk, mv, z, x, kd, vd, seen, MASKED)
        # Several threads may hold the same numbers: all must have loaded before one stores.
        tl.debug_barrier()
        _store_tile(memory_k, memory_v, memory_z, i, mk, mv, new, N, D, cols, inside, BN, UNPADDED)
        scores = tl.sum(queries[:, None, :] * mk[None, :, :], 2)
        scores = tl.where((new > HALF_EMPTY)[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(scores - base[:, None])
        fade = tl.exp(top - base)
        total = total * fade + tl.sum(p, 1)
        out = out * fade[:, None] + tl.sum(p[:, :, None] * mv[None, :, :], 1)
        top = higher
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(o + row * sob + at_heads * soh + cols, out.to(o.dtype.element_ty), mask=mine)
    if COUNTED:
        _add_to_count(count + b, g, seen)


@triton.jit
def _add_to_count(count, g, seen):
    """Add a visible token to the count; only the first program of a sequence does."""
    if g == 0:
        tl.store(count, tl.load(count) + seen)


@triton.jit
def _load_tile(
    memory_k, memory_v, memory_z, s, i, N, D: tl.constexpr, cols, inside, BN: tl.constexpr, UNPADDED: tl.constexpr
):
    """K~, V~ and z of BN slots from the i-th on, and their logits."""
    slots = i + tl.arange(0, BN)
    real_slots = within(slots, N, UNPADDED)
    place = slots[:, None] * D + cols
    mk = tl.load(memory_k + place, mask=real_slots[:, None] & inside, other=0.0)
    mv = tl.load(memory_v + place, mask=real_slots[:, None] & inside, other=0.0)
    # z may be float64: it is updated at every step, and the rounding of float32 would add up.
    z = tl.load(memory_z + slots, mask=real_slots, other=EMPTY)
    return mk, mv, z, tl.load(s + slots, mask=real_slots, other=EMPTY).to(z.dtype)


@triton.jit
def _store_tile(
    memory_k, memory_v, memory_z, i, mk, mv, z, N, D: tl.constexpr, cols, inside,
    BN: tl.constexpr, UNPADDED: tl.constexpr,
):  # fmt: skip
    """Store K~, V~ and z of BN slots from the i-th on."""
    slots = i + tl.arange(0, BN)
    real_slots = within(slots, N, UNPADDED)
    place = slots[:, None] * D + cols
    # Not kept in the cache: they are read again only at the next step.
    tl.store(memory_k + place, mk, mask=real_slots[:, None] & inside, cache_modifier=".cs")
    tl.store(memory_v + place, mv, mask=real_slots[:, None] & inside, cache_modifier=".cs")
    tl.store(memory_z + slots, z, mask=real_slots)


@triton.jit
def _load_token(k, v, visible, b, cols, inside, MASKED: tl.constexpr):
    """A token's key and value, and whether it is visible."""
    kd = tl.load(k + cols, mask=inside, other=0.0).to(tl.float32)
    vd = tl.load(v + cols, mask=inside, other=0.0).to(tl.float32)
    seen = 1
    if MASKED:
        seen = tl.load(visible + b).to(tl.int32)
        # A hidden key or value may be NaN.
        kd = tl.where(seen != 0, kd, 0.0)
        vd = tl.where(seen != 0, vd, 0.0)
    return kd, vd, seen


@triton.jit
def _fold(mk, mv, z, x, kd, vd, seen, MASKED: tl.constexpr):
    """K~, V~ and z after the token."""
    if MASKED:
        x = tl.where(seen != 0, x, EMPTY)
    new = tl.maximum(z, x)
    old_part = tl.exp((z - new).to(tl.float32))
    new_part = tl.where(x > HALF_EMPTY, tl.exp((x - new).to(tl.float32)), 0.0)
    # Empty slots may have neither part, since EMPTY is not the same number in float32 and float64.
    whole = tl.maximum(old_part + new_part, 1e-30)
    over = 1.0 / whole
    new = tl.where(new > HALF_EMPTY, new + tl.log(whole).to(z.dtype), EMPTY)
    keep, write = (old_part * over)[:, None], (new_part * over)[:, None]
    return mk * keep + write * kd[None, :], mv * keep + write * vd[None, :], new
