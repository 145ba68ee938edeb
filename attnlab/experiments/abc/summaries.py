"""Rows of a results file as a page shows them: seeds averaged, and one column of a table spread over several."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

__all__ = ["Rows", "means", "spread"]

Rows = list[dict[str, Any]]


def means(rows: Rows, keys: Sequence[str], value: str) -> Rows:
    """One row for each setting: the mean of ``value`` over its seeds, their standard deviation, and how many.

    >>> means([{"model": "a", "seed": 0, "ppl": 3.0}, {"model": "a", "seed": 1, "ppl": 5.0}], ["model"], "ppl")
    [{'model': 'a', 'ppl': 4.0, 'deviation': 1.4142135623730951, 'seeds': 2}]
    """
    found: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [
        {
            **dict(zip(keys, setting, strict=True)),
            value: fmean(row[value] for row in some),
            **({f"{value}_paper": paper} if (paper := some[0].get(f"{value}_paper")) is not None else {}),
            "deviation": stdev(row[value] for row in some) if len(some) > 1 else None,
            "seeds": len(some),
        }
        for setting, some in found.items()
    ]


def spread(rows: Rows, keys: Sequence[str], column: str, value: str) -> Rows:
    """One row for each of ``keys``; ``value`` stands under what ``column`` says, averaged where there are several.

    >>> spread([{"n": 8, "model": "a", "s": 1.0}, {"n": 8, "model": "b", "s": 2.0}], ["n"], "model", "s")
    [{'n': 8, 'a': 1.0, 'b': 2.0}]
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in means(rows, [*keys, column], value):
        place = tuple(row[key] for key in keys)
        shown = found.setdefault(place, dict(zip(keys, place, strict=True)))
        shown[str(row[column])] = row[value]
        if f"{value}_paper" in row:
            shown[f"{row[column]}_paper"] = row[f"{value}_paper"]
    return list(found.values())
