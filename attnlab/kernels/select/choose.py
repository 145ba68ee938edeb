"""Which keys are read: until when each of them is, and the list of those that some queries of a segment read."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["first_exact", "first_segment", "last_reads", "list_keys", "thresholds"]


@triton.jit
def first_exact(p, W: tl.constexpr, B: tl.constexpr):
    """s(p): where the window of a query at place p begins."""
    return tl.maximum(p // B * B - (W - B), 0)


@triton.jit
def first_segment(j, W: tl.constexpr, B: tl.constexpr, Q: tl.constexpr):
    """The segment of the first query whose window begins after key j."""
    return (j // B * B + W) // Q


@triton.jit
def thresholds(
    merit, score,
    # written: least (b g, 2, NW), middle (b g, NW)
    least, middle,
    T, NW,
    N: tl.constexpr, M: tl.constexpr, S: tl.constexpr, B: tl.constexpr, MT: tl.constexpr, WHOLE: tl.constexpr,
    LEARN: tl.constexpr,
):  # fmt: skip
    """The N-th highest merit before a window, the (N + M)-th in programs of number 1; 0 where there are fewer.

    ``middle`` is the mean of the scores of the N-th and of the next, or minus infinity where there is none. WHOLE says
    that MT tokens are all.
    """
    row, window, which = (tl.program_id(0) // NW).to(tl.int64), tl.program_id(0) % NW, tl.program_id(1)
    merit += row * T
    end, wanted = window * B, N + which * M
    i = tl.arange(0, MT)
    own = tl.load(merit + i, mask=(i >= S) & (i < end), other=-1)
    low, high = 0, T
    while high - low > 1:
        half = (low + high) // 2
        count = tl.sum((own >= half).to(tl.int32), 0)
        if not WHOLE:
            for lo in range(MT, end, MT):
                more = tl.load(merit + lo + i, mask=(lo + i >= S) & (lo + i < end), other=-1)
                count += tl.sum((more >= half).to(tl.int32), 0)
        enough = count >= wanted
        low, high = tl.where(enough, half, low), tl.where(enough, high, half)
    tl.store(least + (row * 2 + which) * NW + window, low)
    if LEARN:  # noqa: SIM102 (known before the kernel is compiled, and the next is not)
        if which == 0:
            score += row * T
            below, last, after = -1, 0.0, 0.0
            for lo in range(0, end, MT):
                own = tl.load(merit + lo + i, mask=(lo + i >= S) & (lo + i < end), other=-1)
                below = tl.maximum(below, tl.max(tl.where(own < low, own, -1), 0))
                # The lowest of those that are selected.
                last += tl.sum(tl.load(score + lo + i, mask=own == low, other=0.0), 0)
            for lo in range(0, end, MT):
                own = tl.load(merit + lo + i, mask=(lo + i >= S) & (lo + i < end), other=-2)
                after += tl.sum(tl.load(score + lo + i, mask=own == below, other=0.0), 0)
            tl.store(middle + row * NW + window, tl.where(below >= 0, (last + after) / 2, float("-inf")))


@triton.jit
def last_reads(
    merit, least,
    # written, (b g, 2, L)
    reads, lives,
    T, L, NW,
    W: tl.constexpr, B: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, KT: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """The last window before which a key is selected, or counted in programs of number 1, and by how many segments."""
    tiles = tl.cdiv(L, KT)
    row, first, which = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * KT, tl.program_id(1)
    j = first + tl.arange(0, KT)
    own = tl.load(merit + row * T + j, mask=j < L, other=-1)
    least += (row * 2 + which) * NW
    # Thresholds only rise. The search begins with the last window that the key is in.
    enters = j // B + 1
    low, high = enters - 1, tl.full([KT], NW, tl.int32)
    for _ in range(ROUNDS):
        half = (low + high) // 2
        stays = (half > low) & (tl.load(least + half, mask=(half > low) & (half < NW), other=1 << 30) <= own)
        low, high = tl.where(stays, half, low), tl.where(stays, high, tl.maximum(half, low + 1))
    low = tl.where(j < S, tl.where(which == 0, NW - 1, enters - 1), low)
    there = low >= enters
    last = tl.minimum(low * B + W, T) - 1
    life = last // Q - first_segment(j, W, B, Q) + 1
    into = (row * 2 + which) * L + j
    tl.store(reads + into, tl.where(there, low * B, -1), mask=j < L)
    tl.store(lives + into, tl.where(there, life, 0), mask=j < L)


@triton.jit
def list_keys(
    reads,
    # written: keys (b g, segments, CAP + MORE), counts (b g, segments, 2)
    keys, counts,
    T, L, NS,
    W: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, CAP: tl.constexpr, MORE: tl.constexpr, LT: tl.constexpr,
    LEARN: tl.constexpr,
):  # fmt: skip
    """The keys that queries of a segment read before their windows, and those that they only count, in order."""
    row, segment = (tl.program_id(0) // NS).to(tl.int64), tl.program_id(0) % NS
    begin = first_exact(segment * Q, W, B)
    end = first_exact(tl.minimum(segment * Q + Q, T) - 1, W, B)
    at = row * NS + segment
    keys += at * (CAP + MORE)
    n_selected, n_counted = 0, 0
    for lo in range(0, end, LT):
        j = lo + tl.arange(0, LT)
        # The first window that begins after the key.
        enters = tl.maximum(begin, (j // B + 1) * B)
        selected = enters <= tl.load(reads + row * 2 * L + j, mask=j < end, other=-1)
        tl.store(keys + n_selected + tl.cumsum(selected.to(tl.int32), 0) - 1, j, mask=selected)
        n_selected += tl.sum(selected.to(tl.int32), 0)
        if LEARN:
            counted = (enters <= tl.load(reads + (row * 2 + 1) * L + j, mask=j < end, other=-1)) & (selected == 0)
            tl.store(keys + CAP + n_counted + tl.cumsum(counted.to(tl.int32), 0) - 1, j, mask=counted)
            n_counted += tl.sum(counted.to(tl.int32), 0)
    tl.store(counts + at * 2, n_selected)
    tl.store(counts + at * 2 + 1, n_counted)
