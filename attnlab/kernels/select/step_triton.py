"""The kernel of ``select_step``: one program for each row and key/value head."""

# mypy: ignore-errors

import triton
import triton.language as tl

FLOOR = tl.constexpr(-1e30)


@triton.jit
def take_and_read(
    q, k, v, x, visible, weight, recency, kept_k, kept_v, kept_score, kept_place, count, out,
    sqb, sqh, skb, skh, svb, svh, sxb, sob, soh, G, M, root, tokens, scale,
    R: tl.constexpr, RP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, T: tl.constexpr, TR: tl.constexpr,
    S: tl.constexpr, N: tl.constexpr, W: tl.constexpr, B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, MT: tl.constexpr, MASKED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Score the new token, drop what has left the window and is not selected, put the token in a free place, read."""
    g, b = tl.program_id(0), tl.program_id(1)
    row = b * G + g
    p = tl.load(count + row)
    seen = p >= 0
    if MASKED:
        seen = tl.load(visible + b) != 0
    products = tl.zeros([MT], dtype=tl.float32)
    for lo in range(0, M, MT):
        at = lo + tl.arange(0, MT)
        xs = tl.load(x + b * sxb + at, mask=at < M, other=0.0).to(tl.float32)
        ws = tl.load(weight + g * M + at, mask=at < M, other=0.0).to(tl.float32)
        products += xs * ws
    u = tl.sum(products) * root + tl.load(recency + g).to(tl.float32) * p.to(tl.float32) / tokens

    # Which keys stay: of those before the window the N highest scores, the later of equal ones first.
    i = tl.arange(0, CP)
    score = tl.load(kept_score + row * C + i, mask=i < C, other=0.0)
    place = tl.load(kept_place + row * C + i, mask=i < C, other=-1)
    # Scores that are no numbers count as highest.
    score = tl.where(score != score, float("inf"), score)
    newest = tl.where(seen, p, p - 1)
    # The quotient is rounded towards zero: before the first token that is the same.
    bound = tl.maximum(newest // B * B - (W - B), 0)
    old = (place >= S) & (place < bound)
    alive = place >= 0
    if tl.sum(old.to(tl.int32)) > N:
        higher = tl.zeros([CP], dtype=tl.int32)
        for lo in range(0, CP, T):
            j = lo + tl.arange(0, T)
            other = tl.load(kept_score + row * C + j, mask=j < C, other=0.0)
            where = tl.load(kept_place + row * C + j, mask=j < C, other=-1)
            other = tl.where(other != other, float("inf"), other)
            ahead = (other[None, :] > score[:, None]) | (
                (other[None, :] == score[:, None]) & (where[None, :] > place[:, None])
            )
            ahead = ahead & ((where >= S) & (where < bound))[None, :]
            higher += tl.sum(ahead.to(tl.int32), 1)
        alive = alive & ((old == 0) | (higher < N))
    free = tl.min(tl.where(alive | (i >= C), CP, i))
    kept = tl.where(alive, place, -1)
    # All have read before any writes.
    tl.debug_barrier()
    tl.store(kept_place + row * C + i, tl.where(seen & (i == free), p.to(tl.int32), kept), mask=i < C)
    tl.store(kept_score + row * C + free, u, mask=seen)

    d, e, r = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, RP)
    new_k = tl.load(k + b * skb + g * skh + d, mask=d < D, other=0.0)
    # NaN in x reaches the output.
    new_k += tl.where(u != u, u, 0.0).to(new_k.dtype)
    new_v = tl.load(v + b * svb + g * svh + e, mask=e < E, other=0.0)
    tl.store(kept_k + (row * C + free) * D + d, new_k, mask=(d < D) & seen)
    tl.store(kept_v + (row * C + free) * E + e, new_v, mask=(e < E) & seen)
    tl.debug_barrier()

    at_q = q + b * sqb + (g * R + r)[:, None] * sqh + d[None, :]
    rows = tl.load(at_q, mask=(r < R)[:, None] & (d < D)[None, :], other=0.0)
    largest = tl.full([RP], FLOOR, dtype=tl.float32)
    total = tl.zeros([RP], dtype=tl.float32)
    acc = tl.zeros([RP, BE], dtype=tl.float32)
    for lo in range(0, CP, TR):
        j = lo + tl.arange(0, TR)
        held = j < C
        # All are asked for at once: none waits to know which are shown.
        shown = tl.load(kept_place + row * C + j, mask=held, other=-1) >= 0
        keys = tl.load(
            kept_k + (row * C + j)[:, None] * D + d[None, :], mask=held[:, None] & (d < D)[None, :], other=0.0
        )
        values = tl.load(
            kept_v + (row * C + j)[:, None] * E + e[None, :], mask=held[:, None] & (e < E)[None, :], other=0.0
        )
        # What is not shown may be no number.
        values = tl.where(shown[:, None], values, 0.0)
        s = tl.dot(rows, tl.trans(keys), input_precision=PREC) * scale
        s = tl.where(shown[None, :], s, FLOOR)
        above = tl.maximum(largest, tl.max(s, 1))
        weights = tl.where(shown[None, :], tl.exp(s - above[:, None]), 0.0)
        fade = tl.exp(largest - above)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PREC)
        largest = above
    # NaN in a score makes the maximum NaN or not, by the device: the sum is NaN on each.
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    at_out = out + b * sob + (g * R + r)[:, None] * soh + e[None, :]
    tl.store(at_out, result.to(out.dtype.element_ty), mask=(r < R)[:, None] & (e < E)[None, :])
    tl.store(count + row, p + seen.to(p.dtype))
