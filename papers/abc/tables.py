"""Which differences between translators can be told: BLEU with sentences drawn again, and its spread over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

from attnlab.pages.numbers import number
from papers.abc.summaries import Rows
from papers.abc.validation_curves import ValidationCurves
from papers.common.claims import paired_bootstrap, pooled_deviation, student
from papers.common.translation import bleu_counts, bleu_of

__all__ = ["Comparison", "differences", "undecided", "with_seeds"]

# Trainings of lengths that differ by more than this share are not compared.
UNEQUAL = 0.05


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
    said: Mapping[tuple[str, int, str], Sequence[str]],
    comparisons: Mapping[str, Comparison],
    references: Mapping[str, Sequence[str]],
    *,
    resamples: int = 1000,
) -> Rows:
    """Each pair's difference in BLEU, the mean over seeds, and its 95 % interval when sentences are drawn again.

    That is Koehn's (2004). ``said`` holds translations by variant, seed and search, ``references`` what they should be
    by search. ``each`` are the seeds' own differences.
    """
    counts: dict[tuple[str, int, str], np.ndarray] = {}

    def counted(key: str, seeds: Sequence[int], how: str) -> np.ndarray:
        """(sentences, seeds, counts)."""
        for place in ((key, seed, how) for seed in seeds):
            if place not in counts:
                counts[place] = bleu_counts(said[place], references[how][: len(said[place])])
        return np.stack([counts[key, seed, how] for seed in seeds], axis=1)

    found = []
    for claim, comparison in comparisons.items():
        for pair in comparison.pairs:
            seeds = [{seed for key, seed, how in said if (key, how) == (name, comparison.search)} for name in pair]
            shared = sorted(seeds[0] & seeds[1])
            if not shared:
                continue
            first, second = (counted(key, shared, comparison.search) for key in pair)
            interval = paired_bootstrap(first, second, statistic=_gap, resamples=resamples)
            found.append(
                {
                    "claim": claim, "first": pair[0], "second": pair[1], "difference": interval.estimate,
                    "each": _gaps(first, second),
                    "low": interval.low, "high": interval.high, "seeds": len(shared), "sentences": len(first),
                }
            )  # fmt: skip
    return found


def _gaps(a: np.ndarray, b: np.ndarray) -> list[float]:
    """Each seed's difference in BLEU."""
    summed = a.sum(0), b.sum(0)
    return [bleu_of(x) - bleu_of(y) for x, y in zip(*summed, strict=True)]


def _gap(a: np.ndarray, b: np.ndarray) -> float:
    return fmean(_gaps(a, b))


def with_seeds(rows: Rows) -> Rows:
    """The rows with intervals in which trainings differ by chance too, and the ``least`` and ``most`` of the seeds.

    The deviation s of a difference between seeds is pooled over the rows, since three values alone hardly tell it, or
    the pair's own where that is larger, since seeds of some models differ more. With n seeds the interval is
    sqrt(a^2 + b^2) wide, a by the sentences and b = t s / sqrt(n). Pairs that share a model make the degrees of freedom
    fewer than they are counted. ``deviation`` is s; without a second seed anywhere it is unknown and nothing is added.
    """
    keys = ("data", "first", "second", "sentences")
    pairs = {tuple(row.get(key) for key in keys): row["each"] for row in rows if len(row["each"]) > 1}
    pooled, degrees = pooled_deviation(pairs.values())
    found = []
    for row in rows:
        n, mean = len(row["each"]), row["difference"]
        s = max(pooled, stdev(row["each"]) if n > 1 else 0.0) if pooled is not None else None
        reach = student(0.95, degrees) * s / n**0.5 if s is not None else 0.0
        low, high = (mean + side * np.hypot(row[end] - mean, reach) for side, end in ((-1, "low"), (1, "high")))
        told = {"low": float(low), "high": float(high), "least": min(row["each"]), "most": max(row["each"])}
        found.append({**{k: v for k, v in row.items() if k != "each"}, **told, "deviation": s})
    return found


def undecided(
    rows: Rows,
    comparisons: Mapping[str, Comparison],
    *,
    curves: Mapping[str, ValidationCurves] | None = None,
    sets: Mapping[str, Mapping[int, str]] | None = None,
) -> dict[str, str]:
    """The claims that are not decided, and why: an interval on both sides, or trainings that were not alike.

    ``curves`` are each model's losses on the validation set by seed and update: a winner that was trained longer, but
    was ahead after equally many of them, does not owe it to the rest. ``sets`` says what each model was trained beside:
    the schedule of a run ends where its time does, so that two runs differ in more than their models. Where one pair
    speaks against a claim, the claim is decided.
    """
    reasons = {}
    for claim, comparison in comparisons.items():
        mine = [row for row in rows if row["claim"] == claim]
        unlike = [_apart(row, sets or {}) or _longer(row, curves or {}, comparison.within is not None) for row in mine]
        reason = _why_undecided(mine, comparison, unlike)
        if reason is not None:
            reasons[claim] = reason
    return reasons


def _why_undecided(rows: Rows, comparison: Comparison, unlike: Sequence[str | None]) -> str | None:
    """Why a claim is not decided by its pairs; ``unlike`` says of each how the trainings differed."""
    verdicts = [_verdict(row, comparison.within) for row in rows]
    if any(verdict is False and why is None for verdict, why in zip(verdicts, unlike, strict=True)):
        return None
    if any(unlike):
        return "; ".join(dict.fromkeys(why for why in unlike if why is not None))
    undecided_rows = [row for row, verdict in zip(rows, verdicts, strict=True) if verdict is None]
    if not undecided_rows:
        return None
    intervals = (f"{r['first']} less {r['second']}: {r['low']:.1f} to {r['high']:.1f}" for r in undecided_rows)
    return f"BLEU with other sentences and seeds: {'; '.join(intervals)}"


def _apart(row: Mapping[str, Any], sets: Mapping[str, Mapping[int, str]]) -> str | None:
    first, second = (sets.get(row[which], {}) for which in ("first", "second"))
    if any(first[seed] != second[seed] for seed in first.keys() & second.keys()):
        return f"{row['first']} and {row['second']} were trained in different runs"
    return None


def _longer(row: Mapping[str, Any], curves: Mapping[str, ValidationCurves], close: bool) -> str | None:
    """Why the difference is not one of the models alone: unequal trainings, and no lead at equal updates."""
    first, second = (curves.get(row[which], {}) for which in ("first", "second"))
    for seed in sorted(first.keys() & second.keys()):
        most = max(first[seed]), max(second[seed])
        if max(most) <= (1 + UNEQUAL) * min(most):
            continue
        winner, loser = (first[seed], second[seed])[:: 1 if row["difference"] > 0 else -1]
        shared = max(winner.keys() & loser.keys(), default=None)
        if close or (max(winner) > max(loser) and (shared is None or winner[shared] >= loser[shared])):
            return f"{row['first']} had {number(most[0])} updates and {row['second']} {number(most[1])}"
    return None


def _verdict(row: Mapping[str, Any], within: float | None) -> bool | None:
    """Whether the interval is on the claim's side (true), on the other (false) or on both (none)."""
    low, high = row["low"], row["high"]
    if within is not None:
        if low >= -within and high <= within:
            return True
        return False if low > within or high < -within else None
    if low > 0:
        return True
    return False if high < 0 else None
