"""How well a reading finds the sources: precision at k and area under the curve, and what is made of many cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.reading.correlation import average_ranks, bootstrap_interval
from attnlab.shapes import Bool, Float

__all__ = ["METRICS", "area_under_curve", "choose_heads", "compare", "kendall", "precision_at", "spread"]

METRICS = ("precision", "auc")


def precision_at(scores: Tensor, true: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """The share of sources among the ``count`` highest candidates of each row; equal scores count by their chance.

    ``scores`` is (..., k); ``true`` and ``candidates`` are flags of the same shape, ``count`` one number a row.

    >>> scores, true = torch.tensor([[3.0, 1.0, 1.0, 0.0]]), torch.tensor([[True, True, False, False]])
    >>> precision_at(scores, true, torch.ones_like(true), torch.tensor([2]))
    tensor([0.7500])
    """
    x = scores.float().masked_fill(~candidates, -torch.inf)
    least = x.sort(-1, descending=True).values.gather(-1, count[..., None] - 1)
    above, level = (x > least), (x == least) & candidates
    taken = (above & true).sum(-1)
    rest = (count - above.sum(-1)) * (level & true).sum(-1) / level.sum(-1).clamp(min=1)
    return (taken + rest) / count


def area_under_curve(scores: Tensor, true: Tensor, candidates: Tensor) -> Tensor:
    """The probability that a source is above another candidate, half for equal scores; NaN without another candidate.

    >>> scores, true = torch.tensor([[3.0, 1.0, 1.0, 0.0]]), torch.tensor([[True, True, False, False]])
    >>> area_under_curve(scores, true, torch.ones_like(true))
    tensor([0.8750])
    """
    shape, k = scores.shape[:-1], scores.shape[-1]
    rows, seen, sources = (t.reshape(-1, k) for t in (scores.double(), candidates, true & candidates))
    ranks = average_ranks(rows, seen)
    positive = sources.sum(-1)
    pairs = positive * (seen.sum(-1) - positive)
    below = (ranks * sources).sum(-1) - positive * (positive - 1) / 2
    return torch.where(pairs > 0, below / pairs, torch.nan).float().reshape(shape)


def spread(scores: Float[Tensor, "b layers heads k"], true: Bool[Tensor, "b k"]) -> dict[str, Float[Tensor, " b"]]:
    """How the numbers of a row lie, as means over heads: over how many keys, and what share is at three places.

    keys: (sum of sizes)^2 / (sum of squares), k for k equal numbers; first: at the first token, where attention rests
    that has nothing to look for; sources: at the sources; head: at the sources in the head with the most there.
    """
    size = scores.abs()
    total = size.sum(-1).clamp(min=torch.finfo(size.dtype).tiny)
    on_sources = (size * true[:, None, None]).sum(-1) / total
    return {
        "keys": (total.square() / size.square().sum(-1).clamp(min=torch.finfo(size.dtype).tiny)).mean((1, 2)),
        "first": (size[..., 0] / total).mean((1, 2)),
        "sources": on_sources.mean((1, 2)),
        "head": on_sources.flatten(1).amax(1),
    }


def choose_heads(values: Float[Tensor, "cases layers heads"]) -> tuple[Float[Tensor, " cases"], list[str]]:
    """Each case's value at the head that is best on the other half of the cases, and the head of each half.

    Even cases choose for odd ones, and the reverse. Of equal heads the first is taken.
    """
    flat, heads = values.flatten(1), values.shape[2]
    halves = torch.arange(len(flat)) % 2
    best = [int(torch.nanmean(flat[halves == 1 - half], 0).nan_to_num(-1).argmax()) for half in (0, 1)]
    names = [f"{head // heads}.{head % heads}" for head in best]
    return flat[torch.arange(len(flat)), torch.tensor(best)[halves]], names


def compare(values: Tensor, reference: Tensor, *, resamples: int, seed: int) -> dict[str, Any]:
    """The mean, and the mean difference to a reference on the same cases, each with its bootstrap interval."""
    mean, low, high = bootstrap_interval(values.tolist(), resamples=resamples, seed=seed)
    more, least, most = bootstrap_interval((values - reference).tolist(), resamples=resamples, seed=seed)
    return {"mean": mean, "interval": [low, high], "difference": more, "difference_interval": [least, most]}


def kendall(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Kendall's tau of two rankings of the same names: 1 for one order, -1 for the reverse; ties count nothing.

    >>> kendall({"a": 3.0, "b": 2.0, "c": 1.0}, {"a": 0.3, "b": 0.1, "c": 0.2})
    0.3333333333333333
    """
    names: Sequence[str] = sorted(first)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    signs = [_sign(first[a] - first[b]) * _sign(second[a] - second[b]) for a, b in pairs]
    return sum(signs) / len(pairs)


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)
