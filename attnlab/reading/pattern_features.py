"""What a pattern is by definition, measured: how dark columns and diagonals stay, and how squares stand out."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from attnlab.shapes import Bool, Float

__all__ = ["blank_above", "feature_count", "pattern_features"]

QUANTILES = (0.25, 0.5, 0.75)
# Columns that are kept, by their darkness; diagonals on either side of the main one; rows that make a column count.
COLUMNS, DIAGONALS, ROWS = 12, 10, 16
CUT_STEP = 2


@torch.no_grad()
def pattern_features(x: Float[Tensor, "n size size"]) -> Float[Tensor, "n f"]:
    """Quantiles along columns and along diagonals over the pairs that may be seen, and the contrast of two squares.

    A column that is dark in most rows has a dark median, whatever a few rows do; a row's mean would mix the two.
    """
    size = x.shape[-1]
    causal = blank_above(x)
    lower = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    seen = lower | ~causal[:, None, None]
    y = x.masked_fill(~seen, torch.nan)
    levels = torch.tensor(QUANTILES, dtype=x.dtype, device=x.device)
    # (quantile, n, column)
    columns = torch.nanquantile(y, levels, dim=1).masked_fill(seen.sum(1) < ROWS, 0)
    darkest = columns.sort(-1, descending=True).values[..., :COLUMNS]
    diagonals = torch.nanquantile(_diagonals(y), levels, dim=2).nan_to_num(0)
    whole = y.flatten(1)
    shade = torch.stack([torch.nanmean(whole, 1), torch.nanmedian(whole, 1).values, causal.to(x.dtype)], 1)
    ground = (x - columns[0][:, None]).clamp(min=0)
    squares = [_contrast(t, seen) for t in (x, ground)]
    parts = [columns[..., 0].T, darkest.transpose(0, 1).flatten(1), diagonals.transpose(0, 1).flatten(1), shade]
    return torch.cat([*parts, *squares], 1)


def blank_above(x: Float[Tensor, "n size size"]) -> Bool[Tensor, " n"]:
    """Which pictures show nothing ahead of the diagonal, as causal models' do (repeated tokens make steps in it)."""
    return x.triu(x.shape[-1] // 8).amax((-1, -2)) == 0


def feature_count(size: int) -> int:
    """How many numbers ``pattern_features`` makes of a picture."""
    q = len(QUANTILES)
    return q + q * COLUMNS + q * (2 * DIAGONALS + 1) + 3 + 2 * len(_cuts(size))


def _diagonals(y: Tensor) -> Tensor:
    """(n, diagonal, place), NaN beyond the picture."""
    size = y.shape[-1]
    place = torch.arange(size, device=y.device)
    at = place + torch.arange(-DIAGONALS, DIAGONALS + 1, device=y.device)[:, None]
    inside = (at >= 0) & (at < size)
    rows = place.expand_as(at)
    return y[:, rows, at.clamp(0, size - 1)].masked_fill(~inside, torch.nan)


def _contrast(x: Tensor, seen: Tensor) -> Tensor:
    """(a - b) / (a + b) for every cut: the mean in the two squares that it makes, and outside, near pairs left out."""
    inside, outside = (masks.to(x) for masks in _squares(x.shape[-1]))
    flat, shown = (x * seen).flatten(1), seen.flatten(1).to(x.dtype)
    a, b = (flat @ m.T / (shown @ m.T).clamp(min=1) for m in (inside, outside))
    return (a - b) / (a + b).clamp(min=1e-6)


def _cuts(size: int) -> list[int]:
    return list(range(size // 6, size - size // 6 + 1, CUT_STEP))


@cache
def _squares(size: int) -> tuple[Tensor, Tensor]:
    i = torch.arange(size)
    far = (i[:, None] - i).abs() > size // 12
    same = torch.stack([(i[:, None] >= cut) == (i >= cut) for cut in _cuts(size)])
    return (same & far).flatten(1).float(), (~same & far).flatten(1).float()
