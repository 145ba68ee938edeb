"""How far two readings of the same positions agree: A, its random baseline and xi of KTIW; Kendall's tau.

A batch is ``(rows, k)`` with ``lengths``: row r has values in its first ``lengths[r]`` positions, what follows is
padding and never read. ``pad_rows`` makes one from ragged rows. A visible NaN is an error; an empty row has no
agreement (NaN), so ``.nanmean()`` is the average over the rows that have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.shapes import Bool, Float, Int, Shaped

__all__ = ["Xi", "agreement", "contextualised", "kendall_tau", "pad_rows", "random_agreement"]

# Values ranked at once on a CPU, and pairs compared at once on a GPU; they bound the memory of kendall_tau.
VALUES, PAIRS = 1 << 15, 1 << 26
# Positions compared pair by pair before blocks are merged; a count of pairs in such a block fits eight bits.
BLOCK = 22


def pad_rows(rows: Sequence[Any]) -> tuple[Float[Tensor, "rows k"], Int[Tensor, " rows"]]:
    """Ragged rows (lists, arrays, tensors) as one float64 batch and its lengths.

    >>> pad_rows([[1.0], [2.0, 3.0]])
    (tensor([[1., 0.],
            [2., 3.]], dtype=torch.float64), tensor([1, 2]))
    """
    tensors = [torch.as_tensor(row, dtype=torch.float64) for row in rows]
    lengths = torch.tensor([len(row) for row in tensors], dtype=torch.int64)
    if not tensors:
        return torch.zeros(0, 0, dtype=torch.float64), lengths
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), lengths


def agreement(
    u: Shaped[Tensor, "rows k"],
    v: Shaped[Tensor, "rows k"],
    *,
    lengths: Int[Tensor, " rows"] | None = None,
    percent: int = 5,
) -> Float[Tensor, " rows"]:
    """A(u, v) per row: 1 if fewer than 5 % of L positions have a v above v at u's (first) largest position (Eq. 10).

    It is asymmetric. "Above" is strict, so a uniform v agrees with every u, and so does any row of length 1.

    >>> u, v = torch.tensor([[0.1, 0.9, 0.0]]), torch.tensor([[5.0, 4.0, 0.0]])
    >>> agreement(u, v), agreement(u, torch.ones(1, 3))
    (tensor([0.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    lengths, seen = _checked(u, v, lengths)
    if u.shape[1] == 0:
        return torch.full((len(u),), torch.nan, dtype=torch.float64, device=u.device)
    # A row of minus infinities has its argmax at 0, which is visible; padding is never chosen.
    at = _as_float(u).masked_fill(~seen, -torch.inf).argmax(1, keepdim=True)
    above = ((v > v.gather(1, at)) & seen).sum(1)
    # In whole numbers: 0.05 * 140 is 7.000000000000001, and its ceiling 8.
    agree = (above * 100 < percent * lengths).double()
    return agree.masked_fill(lengths == 0, torch.nan)


def random_agreement(
    u: Shaped[Tensor, "rows k"],
    v: Shaped[Tensor, "rows k"],
    *,
    lengths: Int[Tensor, " rows"] | None = None,
    percent: int = 5,
    shuffles: int = 1,
    seed: int = 0,
) -> Float[Tensor, " rows"]:
    """The random baseline of A: each row's v is shuffled within its length; the mean of ``shuffles`` draws of the seed.

    Without ties its expectation is ceil(0.05 L) / L, a little above 5 %.
    """
    if shuffles < 1:
        raise ValueError(f"shuffles must be at least 1, got {shuffles}")
    lengths, seen = _checked(u, v, lengths)
    # Drawn on the CPU, so that a seed means the same on every device.
    rng = torch.Generator().manual_seed(seed)
    total = torch.zeros(len(u), dtype=torch.float64, device=u.device)
    for _ in range(shuffles):
        order = torch.rand(u.shape, generator=rng, dtype=torch.float64).to(u.device).masked_fill(~seen, 2).argsort(1)
        total += agreement(u, v.gather(1, order), lengths=lengths, percent=percent)
    return total / shuffles


def kendall_tau(
    u: Shaped[Tensor, "rows k"], v: Shaped[Tensor, "rows k"], *, lengths: Int[Tensor, " rows"] | None = None
) -> Float[Tensor, " rows"]:
    """Kendall's tau-b per row, the value of ``scipy.stats.kendalltau``; NaN where u or v is constant or shorter than 2.

    >>> kendall_tau(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 4, 3]]))
    tensor([0.6667], dtype=torch.float64)
    """
    lengths, seen = _checked(u, v, lengths)
    if u.is_cuda:
        return _tau_by_pairs(u, v, lengths)
    out = np.full(len(u), np.nan)
    inside, a, b = (x.detach().numpy() for x in (seen, _as_float(u), _as_float(v)))
    for rows, n in _chunks(lengths, lambda n: VALUES // n):
        out[rows] = _tau(a[rows, :n], b[rows, :n], inside[rows, :n])
    return torch.from_numpy(out)


@dataclass(frozen=True)
class Xi:
    """A contextualised agreement: the performance ``value`` and the ``checkpoint`` that has it, None if none does.

    Never reached, the value is the final performance xi*, printed with the star of the paper's tables.
    """

    value: float
    checkpoint: int | None

    @property
    def starred(self) -> bool:
        """Whether no checkpoint agreed more."""
        return self.checkpoint is None

    def __str__(self) -> str:
        return f"{self.value:.2f}{'*' if self.starred else ''}"


def contextualised(value: float, *, curve: Sequence[float], performance: Sequence[float]) -> Xi:
    """xi(u, v): the performance at the first checkpoint whose A(alpha, alpha_hat) is strictly above A(u, v) (Eq. 11).

    ``curve`` is A(alpha, alpha_hat(tau)) and ``performance`` is p_hat(tau), both in the order of the checkpoints.

    >>> str(contextualised(0.31, curve=[0.07, 0.31, 0.4], performance=[1, 22, 43]))
    '43.00'
    >>> str(contextualised(0.5, curve=[0.07, 0.31, 0.4], performance=[1, 22, 43]))
    '43.00*'
    """
    if len(curve) != len(performance) or len(curve) == 0:
        raise ValueError(
            f"curve and performance need one value per checkpoint, got {len(curve)} and {len(performance)} values"
        )
    if isnan(value) or any(isnan(a) for a in curve):
        raise ValueError("an agreement is NaN; average over the rows that have one with .nanmean()")
    for index, a in enumerate(curve):
        if a > value:
            return Xi(float(performance[index]), index)
    return Xi(float(performance[-1]), None)


def _checked(u: Tensor, v: Tensor, lengths: Tensor | None) -> tuple[Int[Tensor, " rows"], Bool[Tensor, "rows k"]]:
    rows, width = u.shape
    if lengths is None:
        lengths = torch.full((rows,), width, device=u.device)
    lengths = lengths.to(u.device)
    if rows:
        low, high = int(lengths.min()), int(lengths.max())
        if not 0 <= low <= high <= width:
            raise ValueError(f"lengths must lie between 0 and the batch's width {width}, got {low} to {high}")
    seen = torch.arange(width, device=u.device) < lengths[:, None]
    for name, x in (("u", u), ("v", v)):
        bad = (x.isnan() & seen).any(1)
        if bad.any():
            raise ValueError(f"{name} has a NaN in row {int(bad.nonzero()[0])}, which has no rank; leave the row out")
    return lengths, seen


def _as_float(x: Tensor) -> Tensor:
    """x as a float that can hold NaN, compares as x does, and that numpy has: there is no bfloat16 in it."""
    if x.dtype == torch.bfloat16:
        return x.float()
    return x if x.is_floating_point() else x.double()


def _chunks(lengths: Tensor, rows_of: Callable[[int], int]) -> Iterator[tuple[np.ndarray, int]]:
    """Rows of similar length together, ``rows_of(longest)`` of them at once, and the longest length of each."""
    order = lengths.argsort()
    order = order[lengths[order] > 1]
    sizes = lengths[order].tolist()
    end = len(sizes)
    while end:
        n = sizes[end - 1]
        start = max(0, end - max(1, rows_of(n)))
        yield order[start:end].cpu().numpy(), n
        end = start


def _tau(u: np.ndarray, v: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """tau-b of each row; rows without a tie, as most readings are, need one count only."""
    size = inside.sum(1)
    # NaN is sorted behind everything, infinity too.
    u, v = (np.where(inside, x, np.nan) for x in (u, v))
    tied = _repeats(np.sort(u, axis=1)) | _repeats(np.sort(v, axis=1))
    n = u.shape[1]
    first = n * np.arange(len(u))[:, None]
    by_u = np.argsort(u, axis=1)
    by_u += first
    v = v.ravel()[by_u]
    by_v = np.argsort(v, axis=1)
    by_v += first
    rank = np.empty(u.shape, np.int16 if n < 2**14 - 2 else np.int32)
    rank.reshape(-1)[by_v] = np.arange(n, dtype=rank.dtype)
    rank[np.arange(n) >= size[:, None]] = n
    with np.errstate(invalid="ignore", divide="ignore"):
        out = 1 - 2 * _descents(rank) / _pairs(size)
    if tied.any():
        again = u.ravel()[by_u[tied]]
        out[tied] = _tau_with_ties(again, v[tied], np.arange(n) < size[tied, None])
    return out


def _tau_with_ties(u: np.ndarray, v: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """With positions sorted by (u, v), a discordant pair is one whose v descends (Knight, 1966)."""
    n = u.shape[1]
    # Padding has the highest rank in both, so it makes no discordant pair.
    u, v = (np.where(inside, _ranks(x), n) for x in (u, v))
    both = np.sort(u * (n + 1) + v, axis=1)
    size = inside.sum(1)
    hidden = _pairs(n - size)
    u_tied, v_tied, both_tied = (_tied(x) - hidden for x in (u, v, _climb(both)))
    total = _pairs(size)
    with np.errstate(invalid="ignore"):
        return (total - u_tied - v_tied + both_tied - 2 * _descents(both % (n + 1))) / (
            np.sqrt(total - u_tied) * np.sqrt(total - v_tied)
        )


def _repeats(ordered: np.ndarray) -> np.ndarray:
    """Which sorted rows hold a value twice."""
    return (ordered[:, 1:] == ordered[:, :-1]).any(1)


def _descents(x: np.ndarray) -> np.ndarray:
    """The pairs i < j with x_i > x_j of each row of ranks 0 .. n, by merge sort, all rows at once.

    Short blocks are compared pair by pair. Then two sorted halves are merged by sorting 2 x + (1 in the right half):
    how many of the left half stand before one of the right is its place less its number in its own half.
    """
    rows, n = x.shape
    blocks = 1 << max(0, (n - 1) // BLOCK).bit_length()
    half = -(-n // blocks)
    keys = np.full((rows, blocks * half), n, np.int16 if n < 2**14 - 2 else np.int32)
    keys[:, :n] = x
    across = np.ascontiguousarray(keys.reshape(-1, half).T)
    count = np.zeros(across.shape[1], np.int64)
    for i in range(half - 1):
        count += (across[i] > across[i + 1 :]).view(np.uint8).sum(0, dtype=np.uint8)
    descents = count.reshape(rows, -1).sum(1)
    keys = np.sort(keys.reshape(-1, half), axis=1)
    while blocks > 1:
        blocks //= 2
        keys = 2 * keys.reshape(-1, 2 * half)
        keys[:, half:] += 1
        keys.sort(axis=1)
        places = (keys & 1) @ np.arange(2 * half, dtype=np.int32)
        descents += blocks * (half * half + half * (half - 1) // 2) - places.reshape(rows, -1).sum(1, dtype=np.int64)
        keys >>= 1
        half *= 2
    return descents


def _tau_by_pairs(u: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """The same from every pair of positions: more operations, which a GPU does faster than sorting."""
    out = torch.full((len(u),), torch.nan, dtype=torch.float64, device=u.device)
    for chosen, n in _chunks(lengths, lambda n: PAIRS // (n * n)):
        rows = torch.from_numpy(chosen).to(u.device)
        seen = torch.arange(n, device=u.device) < lengths[rows, None]
        both = seen.unsqueeze(1) & seen.unsqueeze(2)
        up, down = (_order(x[rows, :n], both) for x in (u, v))
        # Each pair is counted twice, once in either order.
        untied = [x.abs().sum((1, 2), dtype=torch.int64).double() for x in (up, down)]
        out[rows] = (up * down).sum((1, 2), dtype=torch.int64).double() / (untied[0].sqrt() * untied[1].sqrt())
    return out


def _order(x: Tensor, among: Tensor) -> Tensor:
    """1 where x_i > x_j, -1 where x_i < x_j, 0 where they are equal or not ``among`` the pairs."""
    left, right = x.unsqueeze(2), x.unsqueeze(1)
    return ((left > right).to(torch.int8) - (left < right).to(torch.int8)) * among


def _ranks(x: np.ndarray) -> np.ndarray:
    """Dense ranks from 0 within each row."""
    order = np.argsort(x, axis=1)
    out = np.empty(x.shape, np.int64)
    np.put_along_axis(out, order, _climb(np.take_along_axis(x, order, 1)), 1)
    return out


def _climb(ordered: np.ndarray) -> np.ndarray:
    """Dense ranks of rows that are sorted."""
    rank = np.zeros(ordered.shape, np.int64)
    np.cumsum(ordered[:, 1:] != ordered[:, :-1], axis=1, out=rank[:, 1:])
    return rank


def _tied(rank: np.ndarray) -> np.ndarray:
    """The pairs of equal rank in each row."""
    rows, width = len(rank), int(rank.max()) + 1
    flat = (rank + width * np.arange(rows)[:, None]).ravel()
    return _pairs(np.bincount(flat, minlength=rows * width)).reshape(rows, width).sum(1)


def _pairs(n: np.ndarray) -> np.ndarray:
    return n * (n - 1) // 2
