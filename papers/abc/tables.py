"""Rows as a page shows them, and which differences between models can be decided.

Seeds averaged, one column spread over several, ends of learning curves; BLEU with sentences drawn again (Koehn, 2004),
and its spread over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Any

import numpy as np

from attnlab.pages.numbers import number
from papers.common.claims import Interval, student
from papers.common.translation import bleu_counts, bleu_of

__all__ = [
    "FLAT",
    "Comparison",
    "Rows",
    "ValidationCurves",
    "curve_ends",
    "curves",
    "curves_of",
    "differences",
    "means",
    "paired_bootstrap",
    "pooled_deviation",
    "sets_of",
    "spread",
    "undecided",
    "with_curves",
    "with_seeds",
]

Rows = list[dict[str, Any]]
# {step: loss}
Line = dict[int, float]


def means(rows: Rows, keys: Sequence[str], value: str, *, also: Sequence[str] = ()) -> Rows:
    """One row for each setting: the mean of ``value`` over its seeds, their standard deviation, and how many.

    Columns named in ``also`` are averaged too.

    >>> means([{"model": "a", "seed": 0, "ppl": 3.0}, {"model": "a", "seed": 1, "ppl": 5.0}], ["model"], "ppl")
    [{'model': 'a', 'ppl': 4.0, 'deviation': 1.4142135623730951, 'seeds': 2}]
    """
    by_setting: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        by_setting.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [
        {
            **dict(zip(keys, setting, strict=True)),
            value: fmean(row[value] for row in some),
            **({f"{value}_paper": paper} if (paper := some[0].get(f"{value}_paper")) is not None else {}),
            **{name: fmean(row[name] for row in some) for name in also},
            **{f"{name}_paper": paper for name in also if (paper := some[0].get(f"{name}_paper")) is not None},
            "deviation": stdev(row[value] for row in some) if len(some) > 1 else None,
            "seeds": len(some),
        }
        for setting, some in by_setting.items()
    ]


def spread(rows: Rows, keys: Sequence[str], column: str, value: str) -> Rows:
    """One row for each of ``keys``, with a column for each value of ``column``; several values in a cell are averaged.

    >>> spread([{"n": 8, "model": "a", "s": 1.0}, {"n": 8, "model": "b", "s": 2.0}], ["n"], "model", "s")
    [{'n': 8, 'a': 1.0, 'b': 2.0}]
    """
    by_place: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in means(rows, [*keys, column], value):
        place = tuple(row[key] for key in keys)
        shown = by_place.setdefault(place, dict(zip(keys, place, strict=True)))
        shown[str(row[column])] = row[value]
        if f"{value}_paper" in row:
            shown[f"{row[column]}_paper"] = row[f"{value}_paper"]
    return list(by_place.values())


def curves(rows: Rows, keys: Sequence[str]) -> Rows:
    """One row for each setting: its loss at doublings of the steps, at the end, and by how much it fell before that.

    ``rows`` have a step, a loss and a seed. ``fell_in_last_quarter`` counts from the last loss in the first three
    quarters; a curve that fell by little there is flat.

    >>> losses = [(250, 7.0), (500, 6.0), (750, 5.5), (1000, 5.25)]
    >>> curves([{"model": "a", "seed": 0, "step": step, "loss": loss} for step, loss in losses], ["model"])
    [{'model': 'a', '250': 7.0, '500': 6.0, 'end': 5.25, 'fell_in_last_quarter': 0.25}]
    """
    seeds: dict[tuple[Any, ...], dict[Any, Line]] = {}
    for row in rows:
        place = seeds.setdefault(tuple(row[key] for key in keys), {})
        place.setdefault(row["seed"], {})[row["step"]] = row["loss"]
    marks = _doublings([line for lines in seeds.values() for line in lines.values()])
    summaries = []
    for setting, lines in seeds.items():
        ends = [line[max(line)] for line in lines.values()]
        before = [line[max(s for s in line if s <= 0.75 * max(line))] for line in lines.values() if len(line) > 2]
        summaries.append(
            {
                **dict(zip(keys, setting, strict=True)),
                **{str(mark): fmean(line[mark] for line in lines.values()) for mark in marks},
                "end": fmean(ends),
                "fell_in_last_quarter": fmean(before) - fmean(ends) if len(before) == len(ends) else None,
            }
        )
    return summaries


def _doublings(lines: Sequence[Line]) -> list[int]:
    """The first step that all lines have before their ends, and its doublings that they have too."""
    shared = set.intersection(*(set(line) - {max(line)} for line in lines)) if lines else set[int]()
    first = min((step for step in shared if step), default=1)
    return [step for step in sorted(shared) if step % first == 0 and (step // first).bit_count() <= 1]


# {seed: {update: loss}}
ValidationCurves = dict[int, dict[int, float]]
# A curve is flat if its loss fell by less than this many percent in the last part of the training.
FLAT = 1.0


def curves_of(rows: Rows, *, data: str | None = None) -> dict[str, ValidationCurves]:
    """Each model's losses on the validation set (of one corpus, where there are several) by seed and update."""
    curves: dict[str, ValidationCurves] = {}
    for row in rows:
        if data in (None, row["data"]) and row["nll"] is not None:
            curves.setdefault(row["variant"], {}).setdefault(row["seed"], {})[row["step"]] = row["nll"]
    return curves


def sets_of(rows: Rows, *, data: str | None = None) -> dict[str, dict[int, str]]:
    """The set of models that each was trained with, by seed; of several trainings, the last."""
    sets: dict[str, dict[int, str]] = {}
    for row in rows:
        if data in (None, row["data"]) and "set" in row:
            sets.setdefault(row["variant"], {})[row["seed"]] = row["set"]
    return sets


def curve_ends(rows: Rows) -> Rows:
    """How flat the curves were at the end: each model's last loss on the validation set, and what it was before.

    ``fell`` is the difference in percent over the last sixth of the training, between evaluations by interpolation.
    """
    ends = []
    for data, variant, seed in dict.fromkeys((row["data"], row["variant"], row["seed"]) for row in rows):
        curve = curves_of([r for r in rows if r["variant"] == variant and r["seed"] == seed], data=data).get(
            variant, {}
        )
        steps = sorted(curve.get(seed, {}))
        losses = [curve[seed][step] for step in steps]
        # A curve of one point has no end.
        before = float(np.interp(steps[-1] * 5 / 6, steps, losses)) if len(steps) > 1 else None
        ends.append(
            {
                "data": data,
                "variant": variant,
                "seed": seed,
                "step": steps[-1] if steps else None,
                "nll": losses[-1] if steps else None,
                "nll_before": before,
                "fell": 100 * (1 - losses[-1] / before) if before is not None else None,
                "lowest": min(losses, default=None),
            }
        )
    return ends


def with_curves(rows: Rows, validation: Rows, *, data: str) -> Rows:
    """The rows (one for each ``variant``) with how long their models were trained and whether their curves are flat."""
    rows_with_curves = []
    for row in rows:
        mine = [x for x in curve_ends(validation) if (x["data"], x["variant"]) == (data, row["variant"]) and x["step"]]
        falls = [x["fell"] for x in mine if x["fell"] is not None]
        curve = {"updates": min(x["step"] for x in mine), "nll": _mean_of([x["nll"] for x in mine])} if mine else {}
        if falls:
            curve |= {"fell": _mean_of(falls), "flat": max(falls) < FLAT}
        rows_with_curves.append({**row, **curve})
    return rows_with_curves


def _mean_of(values: Sequence[float | None]) -> float | None:
    some = [v for v in values if v is not None]
    return sum(some) / len(some) if some else None


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
        reach = student(0.95, degrees) * s / n**0.5 if s is not None else 0.0
        low, high = (mean + side * np.hypot(row[end] - mean, reach) for side, end in ((-1, "low"), (1, "high")))
        bounds = {"low": float(low), "high": float(high), "least": min(row["each"]), "most": max(row["each"])}
        widened.append({**{k: v for k, v in row.items() if k != "each"}, **bounds, "deviation": s})
    return widened


def undecided(
    rows: Rows,
    comparisons: Mapping[str, Comparison],
    *,
    curves: Mapping[str, ValidationCurves] | None = None,
    sets: Mapping[str, Mapping[int, str]] | None = None,
) -> dict[str, str]:
    """The claims that are not decided, and why: an interval on both sides, or trainings that were not alike.

    ``curves`` are each model's losses on the validation set by seed and update. A model that was trained longer may win
    only if it was ahead after equally many updates, too. ``sets`` are the models that were trained together: the
    schedule of a run ends when its time does, so that two runs differ in more than their models. One pair that
    contradicts a claim decides it.
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
    """Why a claim is not decided by its pairs; ``unlike`` has for each pair how the trainings differed, or None."""
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
    """Why a difference may be due to the length of training: unequal trainings, and no lead at equal updates."""
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
