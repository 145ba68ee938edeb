"""95 % intervals: of a share, of a mean, and of a difference between two measurements of the same cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Interval", "mean_interval", "paired_interval", "wilson"]

# The normal distribution's 97.5 % quantile.
Z = 1.959964


class Interval(NamedTuple):
    """A value, and the interval around it; the ends are None where one number cannot say how far it is from truth."""

    value: float
    low: float | None
    high: float | None
    n: int


def wilson(successes: float, n: int) -> Interval:
    """The interval of a share after Wilson (1927); scores between 0 and 1 count as parts of a success.

    >>> value, low, high, n = wilson(16, 16)
    >>> value, round(low, 3), round(high, 3)
    (1.0, 0.806, 1.0)
    """
    share = successes / n
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half), n)


def mean_interval(values: Sequence[float], weights: Sequence[float] | None = None) -> Interval:
    """The interval of a weighted mean, by Student's distribution over the values.

    >>> value, low, high, n = mean_interval([1.0, 2.0, 3.0])
    >>> value, round(low, 2), round(high, 2)
    (2.0, -0.48, 4.48)
    """
    n = len(values)
    weights = [1.0] * n if weights is None else weights
    total = math.fsum(weights)
    mean = math.fsum(w * v for w, v in zip(weights, values, strict=True)) / total
    if n < 2:
        return Interval(mean, None, None, n)
    # The ratio estimator's variance: for equal weights, that of a mean.
    spread = math.fsum((w * (v - mean)) ** 2 for w, v in zip(weights, values, strict=True))
    half = _student(n - 1) * math.sqrt(spread * n / (n - 1)) / total
    return Interval(mean, mean - half, mean + half, n)


def paired_interval(
    values: Sequence[float], reference: Sequence[float], weights: Sequence[float] | None = None
) -> Interval:
    """The interval of the mean difference between two measurements of the same cases."""
    return mean_interval([a - b for a, b in zip(values, reference, strict=True)], weights)


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution, by Hill's expansion (Communications of the ACM, 1970)."""
    exact = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764}
    if freedom in exact:
        return exact[freedom]
    z, f = Z, freedom
    return (
        z
        + (z**3 + z) / (4 * f)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * f**3)
    )
