"""Which keys are read: until when each of them is, and the list of those that some queries of a segment read."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["NEVER", "first_exact", "last_reads", "list_keys"]

# Later than every place.
NEVER = tl.constexpr(1 << 30)


@triton.jit
def first_exact(p, W: tl.constexpr, B: tl.constexpr):
    """s(p): where the window of a query at place p begins."""
    return tl.maximum(p // B * B - (W - B), 0)


@triton.jit
def _load_scores(score, i, there):
    """Scores at these places; those that are no numbers count as highest."""
    u = tl.load(score + i, mask=there, other=0.0)
    return tl.where(u != u, float("inf"), u)


@triton.jit
def last_reads(
    score,
    # written, (b g, L)
    selected_to, counted_to,
    T, L,
    N: tl.constexpr, M: tl.constexpr, S: tl.constexpr, KT: tl.constexpr, LEARN: tl.constexpr,
):  # fmt: skip
    """y and, to learn, z of a tile of keys: the places of the N-th and (N + M)-th key of a higher score."""
    tiles = tl.cdiv(L, KT)
    row, first = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * KT
    score += row * T
    j = first + tl.arange(0, KT)
    own = _load_scores(score, j, j < L)
    rank = tl.zeros([KT], tl.int32)
    y, z = tl.full([KT], NEVER, tl.int32), tl.full([KT], NEVER, tl.int32)
    lo = 0
    # Where every key of the tile has left, the rest of the row changes nothing.
    while (lo < L) & (tl.min(rank, 0) < N + M):
        i = lo + tl.arange(0, KT)
        other = _load_scores(score, i, i < L)
        ahead = (other[None, :] > own[:, None]) | ((other[None, :] == own[:, None]) & (i[None, :] > j[:, None]))
        ahead = ahead & ((i >= S) & (i < L))[None, :]
        counts = rank[:, None] + tl.cumsum(ahead.to(tl.int32), 1)
        y = tl.minimum(y, tl.min(tl.where(ahead & (counts == N), i[None, :], NEVER), 1))
        if LEARN:
            z = tl.minimum(z, tl.min(tl.where(ahead & (counts == N + M), i[None, :], NEVER), 1))
        rank = tl.max(counts, 1)
        lo += KT
    # Sinks are read by all.
    tl.store(selected_to + row * L + j, tl.where(j < S, NEVER, y), mask=j < L)
    if LEARN:
        tl.store(counted_to + row * L + j, z, mask=j < L)


@triton.jit
def list_keys(
    score, selected_to, counted_to,
    # written: keys (b g, segments, CAP + MORE), counts (b g, segments, 2), middle (b g, segments, V)
    keys, counts, middle,
    T, L, NS,
    W: tl.constexpr, B: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, CAP: tl.constexpr, MORE: tl.constexpr,
    V: tl.constexpr, VP: tl.constexpr, LT: tl.constexpr, LEARN: tl.constexpr,
):  # fmt: skip
    """The keys before their windows that some queries of a segment read; to learn, also those that are only counted.

    Both in order of place. V windows begin in a segment; ``middle`` is for each the score around which keys are
    selected, or minus infinity where all are.
    """
    row, segment = (tl.program_id(0) // NS).to(tl.int64), tl.program_id(0) % NS
    begin = first_exact(segment * Q, W, B)
    end = first_exact(tl.minimum(segment * Q + Q, T) - 1, W, B)
    at = row * NS + segment
    keys += at * (CAP + MORE)
    n_selected, n_counted = 0, 0
    s = begin + tl.arange(0, VP) * B
    least, most = tl.full([VP], float("inf"), tl.float32), tl.full([VP], float("-inf"), tl.float32)
    for lo in range(0, end, LT):
        j = lo + tl.arange(0, LT)
        there = j < end
        y = tl.load(selected_to + row * L + j, mask=there, other=-1)
        # The first window that begins after the key.
        enters = tl.maximum(begin, (j // B + 1) * B)
        selected = there & (enters <= y)
        tl.store(keys + n_selected + tl.cumsum(selected.to(tl.int32), 0) - 1, j, mask=selected)
        n_selected += tl.sum(selected.to(tl.int32), 0)
        if LEARN:
            z = tl.load(counted_to + row * L + j, mask=there & (j >= S), other=-1)
            counted = there & (enters > y) & (enters <= z)
            tl.store(keys + CAP + n_counted + tl.cumsum(counted.to(tl.int32), 0) - 1, j, mask=counted)
            n_counted += tl.sum(counted.to(tl.int32), 0)
            u = tl.load(score + row * T + j, mask=there, other=0.0)
            past = (j[None, :] < s[:, None]) & (j >= S)[None, :] & (s[:, None] <= z[None, :])
            inside = s[:, None] <= y[None, :]
            least = tl.minimum(least, tl.min(tl.where(past & inside, u[None, :], float("inf")), 1))
            most = tl.maximum(most, tl.max(tl.where(past & (inside == 0), u[None, :], float("-inf")), 1))
    tl.store(counts + at * 2, n_selected)
    if LEARN:
        tl.store(counts + at * 2 + 1, n_counted)
        some = most > float("-inf")
        between = tl.where(some, (tl.where(some, least, 0.0) + most) / 2, float("-inf"))
        number = tl.arange(0, VP)
        tl.store(middle + at * V + number, between, mask=number < V)
