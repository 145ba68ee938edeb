"""Which keys are read: the best before each segment of queries, and the list of those that some of its queries read.

Scores and places are compared as one integer: the order of scores above, the place below. So of equal scores the later
token is higher, and no two are equal. Scores that are no numbers are highest. EMPTY is lower than all.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["best_of_chunks", "best_of_tokens", "first_exact", "first_segment", "list_keys"]

# Of the upper half of such an integer, and of the whole.
LOWEST = tl.constexpr(-(1 << 31))
EMPTY = tl.constexpr(-(1 << 63))


@triton.jit
def first_exact(p, W: tl.constexpr, B: tl.constexpr):
    """s(p): where the window of a query at place p begins."""
    return tl.maximum(p // B * B - (W - B), 0)


@triton.jit
def first_segment(j, W: tl.constexpr, B: tl.constexpr, Q: tl.constexpr):
    """The segment of the first query whose window begins after key j."""
    return (j // B * B + W) // Q


@triton.jit
def _order(score, there):
    """Integers in the order of the scores, which are float32."""
    # Zeros of both signs are equal.
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    order = tl.where(score != score, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(there, order, LOWEST)


@triton.jit
def _score(order):
    """The scores that have this order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _whole(order, place):
    """Order and place as one integer."""
    whole = (order.to(tl.int64) << 32) | place.to(tl.int64)
    return tl.where(order == LOWEST, EMPTY, whole)


@triton.jit
def _order_of(whole):
    return (whole >> 32).to(tl.int32)


@triton.jit
def _place_of(whole):
    return (whole & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _load_tokens(score, place, there):
    return _whole(_order(tl.load(score + place, mask=there, other=0.0), there), place)


@triton.jit
def _halved(low, high, count, wanted):
    """The bounds of a bisection after ``count`` numbers were found that are at least half way."""
    half = (low + high) >> 1
    return tl.where(count >= wanted, half, low), tl.where(count >= wanted, high, half)


@triton.jit
def _is_best(order, place, least, least_place):
    return (order > least) | ((order == least) & (place >= least_place) & (order != LOWEST))


@triton.jit
def _append(into, whole, chosen, count, K: tl.constexpr):
    """Store what is chosen after ``count`` others; how many there are then."""
    at = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(into + at, whole, mask=chosen & (at < K))
    return count + tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def _append_empty(into, count, K: tl.constexpr, KP: tl.constexpr):
    at = tl.arange(0, KP)
    tl.store(into + at, tl.full([KP], EMPTY, tl.int64), mask=(at >= count) & (at < K))


@triton.jit
def best_of_tokens(
    score, before,
    # written: best (b g, chunks or segments, K), lives (b g, 2, L)
    best, lives,
    T, L, NC, NS,
    W: tl.constexpr, B: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    C: tl.constexpr, OF_CHUNKS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The K best keys of a chunk, or of all before a segment: of those before its chunk, and of the chunk's tokens.

    In order of place, then EMPTY. A segment also sets to zero how many segments list its keys, for ``list_keys``.
    """
    row, number = (tl.program_id(0) // NS).to(tl.int64), tl.program_id(0) % NS
    score += row * T
    end = number * C + C if OF_CHUNKS else first_exact(number * Q, W, B)
    chunk = number if OF_CHUNKS else end // C
    place = chunk * C + tl.arange(0, C)
    there = (place >= S) & (place < end)
    own = _order(tl.load(score + place, mask=there, other=0.0), there)
    top, found = tl.max(own, 0), tl.sum((own != LOWEST).to(tl.int32), 0)
    if LISTED:
        i = tl.arange(0, KP)
        # Before the first chunk there is nothing.
        listed = tl.load(before + (row * NC + chunk - 1) * K + i, mask=(i < K) & (chunk > 0), other=EMPTY)
        old, old_place = _order_of(listed), _place_of(listed)
        top, found = tl.maximum(top, tl.max(old, 0)), found + tl.sum((old != LOWEST).to(tl.int32), 0)
    # Where there are no more than K, all are best.
    low = tl.full([], LOWEST, tl.int64)
    high, count = tl.where(found > K, top.to(tl.int64), low) + 1, found * 0
    while (high - low > 1) & (count != K):
        half = ((low + high) >> 1).to(tl.int32)
        count = tl.sum((own >= half).to(tl.int32), 0)
        if LISTED:
            count += tl.sum((old >= half).to(tl.int32), 0)
        low, high = _halved(low, high, count, K)
    least = low.to(tl.int32)
    above, equal = tl.sum((own > least).to(tl.int32), 0), tl.sum((own == least).to(tl.int32), 0)
    if LISTED:
        above += tl.sum((old > least).to(tl.int32), 0)
        equal += tl.sum((old == least).to(tl.int32), 0)
    # Of those with the lowest score, the last.
    first, after = above * 0, tl.where((above + equal > K) & (found > K), T, 1)
    while after - first > 1:
        half = (first + after) >> 1
        count = tl.sum(((own == least) & (place >= half)).to(tl.int32), 0)
        if LISTED:
            count += tl.sum(((old == least) & (old_place >= half)).to(tl.int32), 0)
        first, after = _halved(first, after, count, K - above)
    into = best + tl.program_id(0).to(tl.int64) * K
    count = above * 0
    if LISTED:
        count = _append(into, listed, _is_best(old, old_place, least, first), count, K)
    count = _append(into, _whole(own, place), _is_best(own, place, least, first), count, K)
    _append_empty(into, count, K, KP)
    if not OF_CHUNKS:
        j = number * Q + tl.arange(0, Q)
        tl.store(lives + row * 2 * L + j, tl.zeros([Q], tl.int32), mask=j < L)
        tl.store(lives + (row * 2 + 1) * L + j, tl.zeros([Q], tl.int32), mask=j < L)


@triton.jit
def best_of_chunks(
    best,
    # written: before (b g, chunks, K)
    before,
    NC,
    K: tl.constexpr, KP: tl.constexpr, MT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The K best keys of all chunks up to one, of the K best of each. WHOLE says that MT are all."""
    row, chunk = (tl.program_id(0) // NC).to(tl.int64), tl.program_id(0) % NC
    best += row * NC * K
    end, i = (chunk + 1) * K, tl.arange(0, MT)
    own = tl.load(best + i, mask=i < end, other=EMPTY)
    # All 64 bits at once, since it is done for a few programs only.
    low, count = tl.full([], EMPTY, tl.int64), chunk * 0
    top, found = tl.max(own, 0), tl.sum((own != EMPTY).to(tl.int32), 0)
    if not WHOLE:
        for lo in range(MT, end, MT):
            more = tl.load(best + lo + i, mask=lo + i < end, other=EMPTY)
            top, found = tl.maximum(top, tl.max(more, 0)), found + tl.sum((more != EMPTY).to(tl.int32), 0)
    # Half the sum of two numbers of 64 bits, without their sum.
    high = tl.where(found > K, top, low) + 1
    while (high > low + 1) & (count != K):
        half = (low >> 1) + (high >> 1) + (low & high & 1)
        count = tl.sum((own >= half).to(tl.int32), 0)
        if not WHOLE:
            for lo in range(MT, end, MT):
                more = tl.load(best + lo + i, mask=lo + i < end, other=EMPTY)
                count += tl.sum((more >= half).to(tl.int32), 0)
        low, high = tl.where(count >= K, half, low), tl.where(count >= K, high, half)
    into = before + tl.program_id(0).to(tl.int64) * K
    count = _append(into, own, (own >= low) & (own != EMPTY), chunk * 0, K)
    if not WHOLE:
        for lo in range(MT, end, MT):
            more = tl.load(best + lo + i, mask=lo + i < end, other=EMPTY)
            count = _append(into, more, (more >= low) & (more != EMPTY), count, K)
    _append_empty(into, count, K, KP)


@triton.jit
def _higher(whole, others):
    """How many of some others are higher than each."""
    # The others are rows, so that every thread counts for itself.
    return tl.sum((others[:, None] > whole[None, :]).to(tl.int32), 0)


@triton.jit
def _tokens_higher(whole, score, begin, end, S: tl.constexpr, LT: tl.constexpr):
    """How many tokens of a range are higher than each."""
    count = tl.zeros(whole.shape, tl.int32)
    for lo in range(begin, end, LT):
        place = lo + tl.arange(0, LT)
        count += _higher(whole, _load_tokens(score, place, (place >= S) & (place < end)))
    return count


@triton.jit
def list_keys(
    score, best,
    # written: keys (b g, segments, 2 + LEARN, ROOM), counts (b g, segments, 2), lives (b g, 2, L), middle (b g, NW)
    keys, counts, lives, middle,
    T, L, NW, NS,
    W: tl.constexpr, B: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr, AP: tl.constexpr, LT: tl.constexpr, BT: tl.constexpr, ROOM: tl.constexpr, LEARN: tl.constexpr,
):  # fmt: skip
    """The keys that queries of a segment read before their windows, then those that they only count, both in order.

    ``counts`` are those read, and all. With each of them the last window of the segment before which it is selected and, to learn, counted; -1 if none is.
    ``lives`` is by how many segments a key is listed, known where it is for the last time. ``middle`` is the mean of
    the scores of the N-th and of the next before each window, or minus infinity where there is no next.
    """
    row, segment = (tl.program_id(0) // NS).to(tl.int64), tl.program_id(0) % NS
    at = row * NS + segment
    score += row * T
    best += at * K
    begin = first_exact(segment * Q, W, B)
    end = first_exact(tl.minimum(segment * Q + Q, T) - 1, W, B)
    # Sinks, the best before the first window, and the tokens between that and the last: no others can be listed.
    a = tl.arange(0, AP)
    is_sink, place = (a < S) & (a < end), begin + a - (S + K)
    own = tl.load(best + a - S, mask=(a >= S) & (a < S + K), other=EMPTY)
    there = (place >= tl.maximum(begin, S)) & (place < end)
    own = tl.where(there, _load_tokens(score, place, there), own)
    place = tl.where(is_sink, a, tl.where(own != EMPTY, _place_of(own), T))
    count = tl.zeros([AP], tl.int32)
    for lo in range(0, K, LT):
        i = lo + tl.arange(0, LT)
        count += _higher(own, tl.load(best + i, mask=i < K, other=EMPTY))
    # Sinks are never counted.
    free = own != EMPTY
    y, z = tl.where(is_sink, end, -1), tl.full([AP], -1, tl.int32)
    for s in range(begin, end + 1, B):
        before = free & (place < s)
        y = tl.where(before & (count < N), s, y)
        if LEARN:
            z = tl.where(before & (count < N + M), s, z)
            u = _score(_order_of(own))
            is_last, is_next = before & (count == N - 1), before & (count == N)
            between = (tl.sum(tl.where(is_last, u, 0.0), 0) + tl.sum(tl.where(is_next, u, 0.0), 0)) / 2
            found = tl.max(is_next.to(tl.int32), 0) > 0
            tl.store(middle + row * NW + s // B, tl.where(found, between, float("-inf")))
        if s < end:
            count += _tokens_higher(own, score, s, s + B, S, BT)
    # The first window of the next segment is the last of this one, or the one after it.
    goes_on = segment * Q + Q < T
    if goes_on:
        count += _tokens_higher(own, score, end, first_exact(segment * Q + Q, W, B), S, BT)
    selected = y >= 0
    listed = tl.sum(selected.to(tl.int32), 0)
    into = keys + at * (2 + LEARN) * ROOM
    to = tl.cumsum(selected.to(tl.int32), 0) - 1
    life = segment - first_segment(place, W, B, Q) + 1
    tl.store(lives + row * 2 * L + place, life, mask=selected & ~(goes_on & (is_sink | (count < N))))
    tl.store(counts + at * 2, listed)
    if LEARN:
        counted = (z >= 0) & ~selected
        to = tl.where(selected, to, listed + tl.cumsum(counted.to(tl.int32), 0) - 1)
        selected = selected | counted
        tl.store(into + 2 * ROOM + to, z, mask=selected)
        tl.store(counts + at * 2 + 1, listed + tl.sum(counted.to(tl.int32), 0))
        tl.store(lives + (row * 2 + 1) * L + place, life, mask=(z >= 0) & ~(goes_on & (count < N + M)))
    tl.store(into + to, place, mask=selected)
    tl.store(into + ROOM + to, y, mask=selected)
