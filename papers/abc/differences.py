"""Differences between models in BLEU, with sentences drawn again (Koehn, 2004), and their spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import NamedTuple

import numpy as np

from attnlab.evaluation.intervals import student_quantile
from papers.abc.tables import Rows
from papers.common.translation import bleu_counts, bleu_of

__all__ = ["Comparison", "Estimate", "differences", "paired_bootstrap", "pooled_deviation", "with_seeds"]


class Estimate(NamedTuple):
    """An estimate and the range that holds the truth with the given confidence."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """A claim's pairs of models: the first of each is better, or ``within`` so much BLEU of the second.

    ``table`` is where they stand, with the seeds that they are compared on.
    """

    pairs: tuple[tuple[str, str], ...]
    table: str
    within: float | None = None
    search: str = "beam"


def differences(
    hypotheses: Mapping[tuple[str, int, str], Sequence[str]],
    comparisons: Mapping[str, Comparison],
    references: Mapping[str, Sequence[str]],
    *,
    resamples: int = 1000,
) -> Rows:
    """Each pair's difference in BLEU, the mean over seeds, and its 95 % interval when sentences are drawn again.

    The interval is Koehn's (2004). ``hypotheses`` are by variant, seed and search, ``references`` by search. ``each``
    has the seeds' own differences.
    """
    counts: dict[tuple[str, int, str], np.ndarray] = {}

    def counted(key: str, seeds: Sequence[int], search: str) -> np.ndarray:
        """(sentences, seeds, counts)."""
        for place in ((key, seed, search) for seed in seeds):
            if place not in counts:
                counts[place] = bleu_counts(hypotheses[place], references[search][: len(hypotheses[place])])
        return np.stack([counts[key, seed, search] for seed in seeds], axis=1)

    rows = []
    for claim, comparison in comparisons.items():
        for pair in comparison.pairs:
            of_first, of_second = (
                {seed for key, seed, search in hypotheses if (key, search) == (name, comparison.search)}
                for name in pair
            )
            shared = sorted(of_first & of_second)
            if not shared:
                continue
            first, second = (counted(key, shared, comparison.search) for key in pair)
            interval = paired_bootstrap(first, second, statistic=_gap, resamples=resamples)
            rows.append(
                {
                    "claim": claim, "first": pair[0], "second": pair[1], "difference": interval.estimate,
                    "each": _gaps(first, second),
                    "low": interval.low, "high": interval.high, "seeds": len(shared), "sentences": len(first),
                }
            )  # fmt: skip
    return rows


def _gaps(a: np.ndarray, b: np.ndarray) -> list[float]:
    """Each seed's difference in BLEU."""
    summed = a.sum(0), b.sum(0)
    return [bleu_of(x) - bleu_of(y) for x, y in zip(*summed, strict=True)]


def _gap(a: np.ndarray, b: np.ndarray) -> float:
    return fmean(_gaps(a, b))


def with_seeds(rows: Rows) -> Rows:
    """The rows with intervals in which trainings differ by chance too, and the ``least`` and ``most`` of the seeds.

    The deviation s of a difference between seeds is pooled over the rows, since three values estimate it poorly, or the
    pair's own where that is larger, since seeds of some models differ more. With n seeds the interval is
    sqrt(a^2 + b^2) wide, a by the sentences and b = t s / sqrt(n). Pairs that share a model make the degrees of freedom
    fewer than they are counted. ``deviation`` is s; without a second seed anywhere it is unknown and nothing is added.
    """
    keys = ("data", "first", "second", "sentences")
    pairs = {tuple(row.get(key) for key in keys): row["each"] for row in rows if len(row["each"]) > 1}
    pooled, degrees = pooled_deviation(pairs.values())
    widened = []
    for row in rows:
        n, mean = len(row["each"]), row["difference"]
        s = max(pooled, stdev(row["each"]) if n > 1 else 0.0) if pooled is not None else None
        reach = student_quantile(degrees) * s / n**0.5 if s is not None else 0.0
        low, high = (mean + side * np.hypot(row[end] - mean, reach) for side, end in ((-1, "low"), (1, "high")))
        bounds = {"low": float(low), "high": float(high), "least": min(row["each"]), "most": max(row["each"])}
        widened.append({**{k: v for k, v in row.items() if k != "each"}, **bounds, "deviation": s})
    return widened


def paired_bootstrap(
    a: Sequence[float] | np.ndarray,
    b: Sequence[float] | np.ndarray,
    *,
    statistic: Callable[[np.ndarray, np.ndarray], float] | None = None,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """The difference between two systems on the same items, and the percentiles of it when items are drawn again.

    ``a[i]`` and ``b[i]`` are the two systems' scores on item i and stay together (Koehn, 2004). Without a ``statistic``
    the difference is mean(a) - mean(b); with one it is ``statistic(a, b)`` of each draw, as corpus BLEU needs.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.shape[:1] != second.shape[:1] or first.ndim == 0 or len(first) == 0:
        raise ValueError(f"paired scores must come in equal numbers, got {first.shape} and {second.shape}")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    rng = np.random.default_rng(seed)
    n = len(first)
    drawn = np.empty(resamples)
    # One draw at a time: all indices at once would be resamples x items.
    for i in range(resamples):
        picks = rng.integers(n, size=n)
        drawn[i] = (
            (first[picks] - second[picks]).mean() if statistic is None else statistic(first[picks], second[picks])
        )
    tail = (1 - level) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    whole = (first - second).mean() if statistic is None else statistic(first, second)
    return Estimate(float(whole), float(low), float(high))


def pooled_deviation(groups: Iterable[Sequence[float]]) -> tuple[float | None, int]:
    """How much values of a group differ, one deviation for all groups, and its degrees of freedom; None without any.

    >>> pooled_deviation([[1.0, 3.0], [5.0, 5.0, 5.0], [7.0]])
    (0.816496580927726, 3)
    """
    several = [group for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in several)
    if not degrees:
        return None, 0
    return math.sqrt(sum((len(group) - 1) * variance(group) for group in several) / degrees), degrees
