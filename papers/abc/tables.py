"""Rows as a page shows them: seeds averaged, one column spread over several, ends of learning curves.

And why two models' trainings were not alike, so that a difference between them decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np

from attnlab.pages.numbers import number

__all__ = [
    "ALONE",
    "FLAT",
    "Rows",
    "ValidationCurves",
    "curve_ends",
    "curves",
    "curves_of",
    "means",
    "run_of",
    "sets_of",
    "spread",
    "still_falling",
    "trained_apart",
    "trained_longer",
    "trainings_of",
    "with_curves",
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
    """Each model's losses on the validation set (of one corpus, where there are several) by seed and update.

    Of a model that was trained in several runs, those of the last.
    """
    curves: dict[str, ValidationCurves] = {}
    run: dict[tuple[str, int], str | None] = {}
    for row in rows:
        if data in (None, row["data"]) and row["nll"] is not None:
            of_model, label = curves.setdefault(row["variant"], {}), row.get("set")
            if run.setdefault((row["variant"], row["seed"]), label) != label:
                run[row["variant"], row["seed"]] = label
                of_model[row["seed"]] = {}
            of_model.setdefault(row["seed"], {})[row["step"]] = row["nll"]
    return curves


# How the label of a training begins that had one model and a planned number of updates, whatever the time.
ALONE = "alone: "


def run_of(label: str) -> str:
    """What trainings share that may be compared: the run, or that each was alone and had its planned updates.

    >>> run_of("alone: BASE") == run_of("alone: ABC_MLP-8-8"), run_of("3a+quarter")
    (True, '3a+quarter')
    """
    return ALONE if label.startswith(ALONE) else label


def trainings_of(result: Mapping[str, Any], kind: str, table: str) -> Rows:
    """The rows of ``kind`` (training, validation) whose seeds a table has: a file's other tables may have others."""
    tables = result.get("tables") or {}
    shown = {row.get("seed") for row in tables.get(table, [])}
    return [row for row in tables.get(kind, []) if row.get("seed") in shown]


def sets_of(rows: Rows, *, data: str | None = None) -> dict[str, dict[int, str]]:
    """The set of models that each was trained with, by seed; of several trainings, the last."""
    sets: dict[str, dict[int, str]] = {}
    for row in rows:
        if data in (None, row["data"]) and "set" in row:
            sets.setdefault(row["variant"], {})[row["seed"]] = run_of(row["set"])
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


def trained_apart(row: Mapping[str, Any], sets: Mapping[str, Mapping[int, str]]) -> str | None:
    """Why a difference may be due to the run: its schedule ends when its time does.

    ``row`` names the ``first`` and the ``second`` model; ``sets`` has the models that each was trained with, by seed.
    """
    first, second = (sets.get(row[which], {}) for which in ("first", "second"))
    if any(first[seed] != second[seed] for seed in first.keys() & second.keys()):
        return f"{row['first']} and {row['second']} were trained in different runs"
    return None


def trained_longer(row: Mapping[str, Any], curves: Mapping[str, ValidationCurves], *, close: bool) -> str | None:
    """Why a difference may be due to the length of training: unequal trainings, and no lead at equal updates.

    A model that was trained longer may win only if it was ahead after equally many updates, too. ``row`` also has the
    ``difference`` of the two; with ``close`` they are to be alike, for which trainings must be.
    """
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


def still_falling(validation: Rows, variant: str, sound: str) -> str | None:
    """Why a model cannot be said to fail: its loss still fell when training ended, and more than a sound model's."""
    ends = {(end["variant"], end["seed"]): end for end in curve_ends(validation)}
    for (name, seed), end in ends.items():
        other = ends.get((sound, seed), {}).get("fell")
        if name == variant and end["fell"] is not None and end["fell"] >= max(FLAT, other or 0.0):
            return f"its loss still fell when training ended, from {end['nll_before']:.2f} to {end['nll']:.2f}"
    return None
