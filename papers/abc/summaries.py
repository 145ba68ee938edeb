"""Rows of a results file as a page shows them: seeds averaged, and one column of a table spread over several."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

__all__ = ["Rows", "curves", "means", "spread"]

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
            "deviation": stdev(row[value] for row in some) if len(some) > 1 else None,
            "seeds": len(some),
        }
        for setting, some in by_setting.items()
    ]


def spread(rows: Rows, keys: Sequence[str], column: str, value: str) -> Rows:
    """One row for each of ``keys``; ``value`` stands under what ``column`` says, averaged where there are several.

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

    ``rows`` have a step, a loss and a seed. ``fell_in_last_quarter`` counts from the last look in the first three
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
