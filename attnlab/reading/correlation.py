"""Rank and linear correlation over masked rows, and bootstrap intervals of their means."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnlab.shapes import Bool, Float

__all__ = ["average_ranks", "bootstrap_interval", "row_correlations"]


def row_correlations(
    x: Float[Tensor, "*rows k"], y: Float[Tensor, "*rows k"], seen: Bool[Tensor, "*rows k"]
) -> tuple[float, float]:
    """(Spearman, Pearson) over the visible entries of each row, averaged over rows; NaN if no row has both varying.

    Rows of fewer than three entries, or constant in x or y, have no correlation and are left out.

    >>> x, y = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 2.0, 9.0]])
    >>> round(row_correlations(x, y, torch.ones(1, 3, dtype=torch.bool))[0], 6)
    1.0
    """
    x, y, seen = (t.reshape(-1, t.shape[-1]) for t in (x.double(), y.double(), seen))
    return _mean_correlation(average_ranks(x, seen), average_ranks(y, seen), seen), _mean_correlation(x, y, seen)


def average_ranks(x: Float[Tensor, "r k"], seen: Bool[Tensor, "r k"]) -> Float[Tensor, "r k"]:
    """Ranks 0, 1, ... of the visible entries of each row; equal ones share the mean of their ranks."""
    rows, k = x.shape
    order = x.masked_fill(~seen, torch.inf).sort(dim=-1)
    fresh = torch.ones(rows, k, dtype=torch.bool, device=x.device)
    fresh[:, 1:] = order.values[:, 1:] != order.values[:, :-1]
    # Runs of equal values are numbered through all rows.
    run = fresh.flatten().cumsum(0) - 1
    place = torch.arange(k, device=x.device, dtype=torch.float64).repeat(rows)
    total = torch.zeros(rows * k, dtype=torch.float64, device=x.device).index_add(0, run, place)
    size = torch.zeros(rows * k, dtype=torch.float64, device=x.device).index_add(0, run, torch.ones_like(place))
    ranks = (total / size.clamp(min=1))[run].view(rows, k)
    return torch.empty_like(ranks).scatter(-1, order.indices, ranks)


def bootstrap_interval(
    values: Sequence[float],
    *,
    weights: Sequence[float] | None = None,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[float | None, float | None, float | None]:
    """(mean, low, high) of the mean, resampling the values; None for all where no value is known.

    With positive ``weights`` the mean is weighted, and each value is resampled with its weight.

    >>> bootstrap_interval([0.5, 0.5, 0.5])
    (0.5, 0.5, 0.5)
    """
    weights = [1.0] * len(values) if weights is None else weights
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if not math.isnan(v)]
    known, weight = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).T
    if not len(known):
        return None, None, None
    chosen = torch.randint(len(known), (resamples, len(known)), generator=torch.Generator().manual_seed(seed))
    total = known * weight
    means = total[chosen].sum(-1) / weight[chosen].sum(-1)
    low, high = torch.quantile(means, torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)).tolist()
    return (total.sum() / weight.sum()).item(), low, high


def _mean_correlation(x: Tensor, y: Tensor, seen: Tensor) -> float:
    count = seen.sum(-1)
    x, y = (torch.where(seen, t, 0) for t in (x, y))
    x, y = (torch.where(seen, t - (t.sum(-1) / count.clamp(min=1))[:, None], 0) for t in (x, y))
    spread = torch.linalg.vector_norm(x, dim=-1) * torch.linalg.vector_norm(y, dim=-1)
    known = (count > 2) & (spread > 0)
    if not bool(known.any()):
        return math.nan
    return ((x * y).sum(-1)[known] / spread[known]).clamp(-1, 1).mean().item()
