"""How far two readings of the same positions agree: A, its random baseline and xi of KTIW; Kendall's tau.

A batch is ``(rows, k)`` with ``lengths``: row r has values in its first ``lengths[r]`` positions, what follows is
padding and never read. ``pad_rows`` makes one from ragged rows. A visible NaN is an error; an empty row has no
agreement (NaN), so ``.nanmean()`` is the average over the rows that have one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import torch
from torch import Tensor

from attnlab.shapes import Bool, Float, Int, Shaped

__all__ = ["Xi", "agreement", "contextualised", "kendall_tau", "pad_rows", "random_agreement"]

# Pairs of positions compared at once; bounds the memory of kendall_tau whatever the batch.
PAIRS = 1 << 21


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
    out = torch.full((len(u),), torch.nan, dtype=torch.float64, device=u.device)
    # Nothing is greater than NaN, so padding enters no pair and needs no mask of its own.
    u, v = (_as_float(x).masked_fill(~seen, torch.nan) for x in (u, v))
    for rows, n in _chunks(lengths):
        up, vp = (x[rows, :n].unsqueeze(2) > x[rows, :n].unsqueeze(1) for x in (u, v))
        untied = _count(up) * _count(vp)
        out[rows] = (_count(up & vp) - _count(up & vp.mT)) / untied.sqrt()
    return out


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
    """x as a float that can hold NaN and compares as x does."""
    return x if x.is_floating_point() else x.double()


def _chunks(lengths: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Rows of similar length together, no more than PAIRS pairs at once, and the longest length of each."""
    order = lengths.argsort()
    order = order[lengths[order] > 1]
    sizes = lengths[order].tolist()
    end = len(sizes)
    while end:
        n = sizes[end - 1]
        start = max(0, end - max(1, PAIRS // (n * n)))
        yield order[start:end], n
        end = start


def _count(x: Bool[Tensor, "rows k k"]) -> Float[Tensor, " rows"]:
    return x.flatten(1).sum(1, dtype=torch.int32).double()
