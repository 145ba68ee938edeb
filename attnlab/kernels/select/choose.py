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
def _append(into, whole, chosen, count):
    """Store what is chosen after ``count`` others; how many there are then."""
    tl.store(into + count + tl.cumsum(chosen.to(tl.int32), 0) - 1, whole, mask=chosen)
    return count + tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def _append_empty(into, count, K: tl.constexpr, KP: tl.constexpr):
    at = tl.arange(0, KP)
    tl.store(into + at, tl.full([KP], EMPTY, tl.int64), mask=(at >= count) & (at < K))


@triton.jit
def best_of_tokens(
    score, before,
    # written: best (b g, chunks, K) or (b g, segments, K + ENTER + 1), lives (b g, 2, L)
    best, lives,
    T, L, NC, NS,
    W: tl.constexpr, B: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    ENTER: tl.constexpr, EP: tl.constexpr, C: tl.constexpr, OF_CHUNKS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The K best keys of a chunk, or of all before a segment: of those before its chunk, and of the chunk's tokens.

    They are in order of place, and those of a chunk end with EMPTY. After those of a segment come the tokens between
    its first and its last window that can be among the K best, and last is how many they all are. A segment also sets
    to zero how many segments list its keys, for ``list_keys``.
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
    above = tl.sum((own > least).to(tl.int32), 0)
    if LISTED:
        above += tl.sum((old > least).to(tl.int32), 0)
    # Of more than K, the last of those with the lowest score.
    first, after = above * 0, tl.where((found > K) & (count != K), T, 1)
    while after - first > 1:
        half = (first + after) >> 1
        count = tl.sum(((own == least) & (place >= half)).to(tl.int32), 0)
        if LISTED:
            count += tl.sum(((old == least) & (old_place >= half)).to(tl.int32), 0)
        first, after = _halved(first, after, count, K - above)
    into = best + tl.program_id(0).to(tl.int64) * (K if OF_CHUNKS else K + ENTER + 1)
    count = above * 0
    if LISTED:
        count = _append(into, listed, _is_best(old, old_place, least, first), count)
    count = _append(into, _whole(own, place), _is_best(own, place, least, first), count)
    if OF_CHUNKS:
        _append_empty(into, count, K, KP)
    else:
        if ENTER > 0:
            place = end + tl.arange(0, EP)
            there = (place >= S) & (place < first_exact(tl.minimum(number * Q + Q, T) - 1, W, B))
            own = _order(tl.load(score + place, mask=there, other=0.0), there)
            count = _append(into, _whole(own, place), (own >= least) & (own != LOWEST), count)
        tl.store(into + K + ENTER, count.to(tl.int64))
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
    count = _append(into, own, (own >= low) & (own != EMPTY), chunk * 0)
    if not WHOLE:
        for lo in range(MT, end, MT):
            more = tl.load(best + lo + i, mask=lo + i < end, other=EMPTY)
            count = _append(into, more, (more >= low) & (more != EMPTY), count)
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
def _list_keys(
    score, best, found, keys, counts, lives, middle, segment, begin, end, T, L,
    W: tl.constexpr, B: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, Q: tl.constexpr, N: tl.constexpr,
    M: tl.constexpr, AP: tl.constexpr, LT: tl.constexpr, BT: tl.constexpr, ROOM: tl.constexpr, LEARN: tl.constexpr,
):  # fmt: skip
    """What ``list_keys`` does, where AP keys are all that can be listed beside sinks."""
    a = tl.arange(0, AP)
    own = tl.load(best + a, mask=a < found, other=EMPTY)
    place = tl.where(own != EMPTY, _place_of(own), T)
    # How many keys are higher, of those before the first window, then of those before each.
    count = tl.zeros([AP], tl.int32)
    for lo in range(0, tl.minimum(found, N + M), LT):
        i = lo + tl.arange(0, LT)
        others = tl.load(best + i, mask=i < found, other=EMPTY)
        count += _higher(own, tl.where(_place_of(others) < begin, others, EMPTY))
    y, z = tl.full([AP], -1, tl.int32), tl.full([AP], -1, tl.int32)
    for s in range(begin, end + 1, B):
        before = place < s
        y = tl.where(before & (count < N), s, y)
        if LEARN:
            z = tl.where(before & (count < N + M), s, z)
            # The lowest of those that are selected, and the next.
            is_next = before & (count == N)
            both = tl.where(is_next | (before & (count == N - 1)), _score(_order_of(own)), 0.0)
            between = tl.where(tl.max(is_next.to(tl.int32), 0) > 0, tl.sum(both, 0) / 2, float("-inf"))
            tl.store(middle + s // B, between)
        if s < end:
            count += _tokens_higher(own, score, s, s + B, S, BT)
    # The first window of the next segment is the last of this one, or the one after it.
    goes_on = segment * Q + Q < T
    if goes_on:
        count += _tokens_higher(own, score, end, first_exact(segment * Q + Q, W, B), S, BT)
    selected, listed = y >= 0, tl.minimum(end, S)
    if S > 0:
        i = tl.arange(0, SP)
        tl.store(keys + i, i, mask=i < listed)
        tl.store(keys + ROOM + i, tl.zeros([SP], tl.int32) + end, mask=i < listed)
        if LEARN:
            # Sinks are never counted.
            tl.store(keys + 2 * ROOM + i, tl.full([SP], -1, tl.int32), mask=i < listed)
        life = segment - first_segment(i, W, B, Q) + 1
        tl.store(lives + i, life, mask=(i < listed) & (segment * Q + Q >= T))
    to = listed + tl.cumsum(selected.to(tl.int32), 0) - 1
    listed += tl.sum(selected.to(tl.int32), 0)
    life = segment - first_segment(place, W, B, Q) + 1
    tl.store(counts, listed)
    tl.store(lives + place, life, mask=selected & ~(goes_on & (count < N)))
    if LEARN:
        counted = (z >= 0) & ~selected
        to = tl.where(selected, to, listed + tl.cumsum(counted.to(tl.int32), 0) - 1)
        selected = selected | counted
        tl.store(counts + 1, listed + tl.sum(counted.to(tl.int32), 0))
        tl.store(lives + L + place, life, mask=(z >= 0) & ~(goes_on & (count < N + M)))
        tl.store(keys + 2 * ROOM + to, z, mask=selected)
    tl.store(keys + to, place, mask=selected)
    tl.store(keys + ROOM + to, y, mask=selected)


@triton.jit
def list_keys(
    score, best,
    # written: keys (b g, segments, 2 + LEARN, ROOM), counts (b g, segments, 2), lives (b g, 2, L), middle (b g, NW)
    keys, counts, lives, middle,
    T, L, NW, NS,
    W: tl.constexpr, B: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, Q: tl.constexpr, N: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr, ENTER: tl.constexpr, AP: tl.constexpr, LT: tl.constexpr, BT: tl.constexpr,
    ROOM: tl.constexpr, LEARN: tl.constexpr,
):  # fmt: skip
    """The keys that queries of a segment read before their windows, then those that they only count, both in order.

    ``counts`` are those read, and all. With each of them comes the last window of the segment before which it is
    selected and, to learn, counted; -1 if none is. ``lives`` is by how many segments a key is listed, known where it is
    for the last time. ``middle`` is the mean of the scores of the N-th and of the next before each window, or minus
    infinity where there is no next.
    """
    row, segment = (tl.program_id(0) // NS).to(tl.int64), tl.program_id(0) % NS
    at = row * NS + segment
    score += row * T
    best += at * (K + ENTER + 1)
    keys += at * (2 + LEARN) * ROOM
    counts += at * 2
    lives += row * 2 * L
    middle += row * NW
    begin = first_exact(segment * Q, W, B)
    end = first_exact(tl.minimum(segment * Q + Q, T) - 1, W, B)
    found = tl.load(best + K + ENTER).to(tl.int32)
    # Mostly few tokens are better than those before, and half the room does.
    if found <= AP // 2:
        _list_keys(score, best, found, keys, counts, lives, middle, segment, begin, end, T, L, W, B, S, SP, Q, N, M,
                   AP // 2, LT, BT, ROOM, LEARN)  # fmt: skip
    else:
        _list_keys(score, best, found, keys, counts, lives, middle, segment, begin, end, T, L, W, B, S, SP, Q, N, M,
                   AP, LT, BT, ROOM, LEARN)  # fmt: skip
