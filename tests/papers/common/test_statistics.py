"""Intervals against known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from papers.abc.differences import paired_bootstrap
from papers.common.claims import seed_bounds


@pytest.mark.parametrize(("n", "t"), [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (21, 2.086), (31, 2.042)])
def test_seed_bounds_are_student_s(n: int, t: float) -> None:
    values = [float(i) for i in range(n)]
    bounds = seed_bounds(values)
    assert bounds is not None
    half = t * np.std(values, ddof=1) / math.sqrt(n)
    assert bounds == pytest.approx(((n - 1) / 2 - half, (n - 1) / 2 + half), rel=2e-4, abs=1e-3)


def test_a_single_run_has_no_bounds_and_equal_seeds_have_narrow_ones() -> None:
    assert seed_bounds([1.0]) is None
    assert seed_bounds([4.0, 4.0]) == (4.0, 4.0)


def test_paired_bootstrap_matches_the_normal_approximation() -> None:
    rng = np.random.default_rng(3)
    b = rng.normal(size=997) * 50
    difference = rng.normal(0.5, 1.0, size=997)
    interval = paired_bootstrap(b + difference, b, resamples=4000)
    half = 1.96 * difference.std() / math.sqrt(997)
    assert interval.estimate == pytest.approx(difference.mean())
    assert interval.high - interval.low == pytest.approx(2 * half, rel=0.06)
    # Pairing is the point: unpaired, the items' own spread of 50 would hide a difference of 0.5.
    assert interval.low > 0.4


def test_paired_bootstrap_is_seeded_and_takes_a_corpus_statistic() -> None:
    a, b = np.arange(1.0, 12.0), np.arange(11.0, 0.0, -1.0)
    assert paired_bootstrap(a, b, resamples=100) == paired_bootstrap(a, b, resamples=100)
    assert paired_bootstrap(a, b, resamples=100) != paired_bootstrap(a, b, resamples=100, seed=1)
    ratio = paired_bootstrap(2 * b, b, statistic=lambda x, y: float(x.sum() / y.sum()), resamples=100)
    assert (ratio.estimate, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    constant = paired_bootstrap([3.0] * 7, [1.0] * 7, resamples=10)
    assert (constant.low, constant.high) == (2.0, 2.0)


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0, 2.0]), ([], [])])
def test_paired_bootstrap_needs_pairs(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="equal numbers"):
        paired_bootstrap(a, b)
