"""One softmax over the keys of a segment's list and those of the window."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from attnlab.kernels.hybrid.read import LOG2E, add_keys, load_keys
from attnlab.kernels.select.choose import first_exact

__all__ = ["load_listed", "near_scores", "read", "selected_by"]


@triton.jit
def load_listed(keys, lo, count, ROOM: tl.constexpr, LT: tl.constexpr):
    """Some keys of a list and the last windows before which they are selected; -1 beyond the list."""
    at = lo + tl.arange(0, LT)
    there = at < count
    return tl.load(keys + at, mask=there, other=-1), tl.load(keys + ROOM + at, mask=there, other=-1)


@triton.jit
def selected_by(j, y, s):
    """Whether queries whose windows begin at s read keys j, of which y are the last windows."""
    return (j[None, :] < s[:, None]) & (s[:, None] <= y[None, :])


@triton.jit
def near_scores(q, key, p, s, place, scale, PREC: tl.constexpr):
    """Scores of keys at these places for queries at the places p, whose windows begin at s."""
    scores = tl.dot(q, tl.trans(key), input_precision=PREC) * scale
    return tl.where((place[None, :] >= s[:, None]) & (place[None, :] <= p[:, None]), scores, float("-inf"))


@triton.jit
def read(
    q, k, v, keys, counts,
    # written
    out, lse, top,
    sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sob, soh, sot, T, G, NQ, NS, scale,
    R: tl.constexpr, W: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, QB: tl.constexpr, ROOM: tl.constexpr,
    LT: tl.constexpr, KT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    LEARN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The outputs of QB of one head's queries; base-2 logarithms of their sums and, to learn, largest scores."""
    row, first = (tl.program_id(0) // NQ).to(tl.int64), tl.program_id(0) % NQ * QB
    b, g = row // G, row % G
    h = g * R + tl.program_id(1)
    k += b * skb + g * skh
    v += b * svb + g * svh
    at = row * NS + first // Q
    p = first + tl.arange(0, QB)
    s = first_exact(p, W, B)
    scale = scale * LOG2E
    query = load_keys(q + b * sqb + h * sqh, sqt, p, T, D, BD)
    largest, total = tl.full([QB], float("-inf"), tl.float32), tl.zeros([QB], tl.float32)
    acc = tl.zeros([QB, BE], tl.float32)
    begin, end = first_exact(first, W, B), tl.minimum(first + QB, T)
    for lo in range(begin, end, KT):
        place = lo + tl.arange(0, KT)
        scores = near_scores(query, load_keys(k, skt, place, T, D, BD), p, s, place, scale, PREC)
        largest, total, acc = add_keys(scores, load_keys(v, svt, place, T, E, BE), largest, total, acc, PREC)
    keys += at * (2 + LEARN) * ROOM
    count = tl.load(counts + at * 2)
    for lo in range(0, count, LT):
        j, y = load_listed(keys, lo, count, ROOM, LT)
        far = tl.dot(query, tl.trans(load_keys(k, skt, j, T, D, BD)), input_precision=PREC) * scale
        far = tl.where(selected_by(j, y, s), far, float("-inf"))
        largest, total, acc = add_keys(far, load_keys(v, svt, j, T, E, BE), largest, total, acc, PREC)
    # Every query reads its own key, so no sum is zero but that of a query that does not exist.
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    cols = tl.arange(0, BE)
    mask = (p < T)[:, None] & (cols < E)[None, :]
    into = out + b * sob + h * soh + p[:, None].to(tl.int64) * sot + cols[None, :]
    tl.store(into, acc.to(out.dtype.element_ty), mask=mask)
    of_row = (row * R + tl.program_id(1)) * T + p
    tl.store(lse + of_row, largest + tl.log2(tl.where(total == 0, 1.0, total)), mask=p < T)
    if LEARN:
        tl.store(top + of_row, largest, mask=p < T)
