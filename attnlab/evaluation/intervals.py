"""95 % intervals: of a share, of a mean, and of a difference between two measurements of the same cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

__all__ = ["Interval", "mean_interval", "paired_interval", "student_quantile", "wilson"]

# The normal distribution's 97.5 % quantile.
Z = 1.959964
# Below so many degrees of freedom Student's quantile is exact, from there on an expansion.
FEW = 30


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
    half = student_quantile(n - 1) * math.sqrt(spread * n / (n - 1)) / total
    return Interval(mean, mean - half, mean + half, n)


def paired_interval(
    values: Sequence[float], reference: Sequence[float], weights: Sequence[float] | None = None
) -> Interval:
    """The interval of the mean difference between two measurements of the same cases."""
    return mean_interval([a - b for a, b in zip(values, reference, strict=True)], weights)


def student_quantile(freedom: int, *, tail: float = 0.025) -> float:
    """What Student's variable exceeds with the probability ``tail``.

    >>> round(student_quantile(4), 4), round(student_quantile(7, tail=1e-5), 2), round(student_quantile(200), 3)
    (2.7764, 10.1, 1.972)
    """
    if freedom < FEW:
        low, high = 0.0, 1.0
        while _beyond(high, freedom) > tail:
            low, high = high, 2 * high
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _beyond(middle, freedom) > tail else (low, middle)
        return high
    # Hill's expansion (Communications of the ACM, 1970).
    z, f = -NormalDist().inv_cdf(tail), freedom
    return (
        z
        + (z**3 + z) / (4 * f)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * f**3)
    )


def _beyond(t: float, freedom: int) -> float:
    """The probability that Student's variable exceeds t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for n in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (n - 1) / n
    inside = math.sin(angle) * total
    return (1 - (2 / math.pi * (angle + inside) if odd else inside)) / 2
