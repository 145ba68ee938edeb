"""Intervals for a claim: over seeds by Student's t, over items by a paired bootstrap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import variance

import numpy as np

__all__ = ["Interval", "paired_bootstrap", "pooled_deviation", "seed_interval", "student"]


@dataclass(frozen=True)
class Interval:
    """An estimate and the range that holds the truth with the given confidence."""

    estimate: float
    low: float
    high: float


def seed_interval(values: Sequence[float], *, level: float = 0.95) -> Interval:
    """Mean over seeds with Student's t interval: mean -/+ t s / sqrt(n).

    >>> interval = seed_interval([1.0, 2.0, 3.0])
    >>> interval.estimate, round(interval.low, 3), round(interval.high, 3)
    (2.0, -0.484, 4.484)
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"an interval over seeds needs at least 2 of them, got {n}")
    _check_level(level)
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    reach = student(level, n - 1) * deviation / math.sqrt(n)
    return Interval(mean, mean - reach, mean + reach)


def paired_bootstrap(
    a: Sequence[float] | np.ndarray,
    b: Sequence[float] | np.ndarray,
    *,
    statistic: Callable[[np.ndarray, np.ndarray], float] | None = None,
    resamples: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """The difference between two systems on the same items, and the percentiles of it when items are drawn again.

    ``a[i]`` and ``b[i]`` are the two systems' scores on item i and stay together (Koehn, 2004). Without a ``statistic``
    the difference is mean(a) - mean(b); with one it is ``statistic(a, b)`` of each draw, as corpus BLEU needs.
    """
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.shape[:1] != second.shape[:1] or first.ndim == 0 or len(first) == 0:
        raise ValueError(f"paired scores must come in equal numbers, got {first.shape} and {second.shape}")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    _check_level(level)
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
    return Interval(float(whole), float(low), float(high))


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


def student(level: float, degrees: int) -> float:
    """The t with P(|T| < t) = level, by bisection on the closed form for whole degrees of freedom."""
    low, high = 0.0, 1.0
    while _within(high, degrees) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < level else (low, middle)
    return (low + high) / 2


def _within(t: float, degrees: int) -> float:
    """P(|T| < t) (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(theta), math.sin(theta)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (k + 1) / (k + 2)
    return (theta + sine * total) * 2 / math.pi if odd else sine * total


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
