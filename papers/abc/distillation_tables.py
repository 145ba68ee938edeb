"""Tables from the curves of ``abc-distill``: the gap closed after equal times, as it ran or alone on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from papers.abc.tables import Rows

__all__ = ["closed_after", "derived", "with_time_alone"]

# (seconds, share of the gap closed), in the order of the seconds.
Line = list[tuple[float, float]]
PARTS = {"1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "all": 1.0}


def derived(tables: dict[str, Rows]) -> dict[str, Rows]:
    """The tables with times alone on the device, and their means over seeds: where methods stood after equal times."""
    tables = with_time_alone(tables)
    ends = [{**row, "spec": row["spec"].partition(",seed=")[0]} for row in tables.get("ends", [])]
    return {
        **tables,
        "closed_after": closed_after(tables.get("curve", [])),
        "summary_means": _means(tables.get("summary", []), ["subject", "method"]),
        "ends_means": _means(ends, ["subject", "spec"]),
    }


def closed_after(curve: Rows) -> Rows:
    """The share of the gap closed after an eighth, a quarter, half and all of the ``seconds`` that every method had.

    ``clock`` says which seconds: those of the device alone where they are known, or as it ran. Curves are interpolated
    linearly. ``as_good_after`` is when a method first reached the end of the best way of continuing; None where a seed
    never did. Each is the mean over seeds; ``deviation`` is that of the last share.

    >>> rows = [dict(subject="s", method="continued", seconds=t, gap_closed=g) for t, g in ((8.0, 0.4), (16.0, 0.6))]
    >>> [row[part] for row in closed_after(rows) for part in ("clock", "seconds", *PARTS, "as_good_after", "seeds")]
    ['as it ran', 16.0, 0.1, 0.2, 0.4, 0.6, 16.0, 1]
    """
    lines = _lines_by_method(curve)
    alone = {row["subject"] for row in curve if "h200_seconds" in row}
    ends = {place: min(points[-1][0] for points in methods.values()) for place, methods in lines.items()}
    shares = []
    for (subject, seed), methods in lines.items():
        # All seeds of a subject are read at the same times.
        end = min(seconds for (other, _), seconds in ends.items() if other == subject)
        continued = [_between(points, end) for method, points in methods.items() if method.startswith("continued")]
        for method, points in methods.items():
            shares.append(
                {
                    "subject": subject, "method": method, "seed": seed, "seconds": end,
                    "clock": "alone" if subject in alone else "as it ran",
                    **{name: _between(points, end * part) for name, part in PARTS.items()},
                    "as_good_after": _first_at(points, max(continued)) if continued else None,
                }
            )  # fmt: skip
    return _means(shares, ["subject", "method", "clock"], spread_of="all")


def _lines_by_method(curve: Rows) -> dict[tuple[str, int], dict[str, Line]]:
    """{(subject, seed): {method: (seconds, share of the gap closed) from the start}}."""
    lines: dict[tuple[str, int], dict[str, Line]] = {}
    for row in curve:
        methods = lines.setdefault((row["subject"], row.get("seed", 0)), {})
        points = methods.setdefault(row["method"], [(0.0, 0.0)])
        seconds = row["h200_seconds"] if "h200_seconds" in row else row["seconds"]
        points.append((seconds, row["gap_closed"]))
    return lines


def _means(rows: Rows, keys: Sequence[str], *, spread_of: str | None = None) -> Rows:
    """Rows of one setting as one: the mean of each number that all its seeds have, else none."""
    settings: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        settings.setdefault(tuple(row[key] for key in keys), []).append(row)
    averaged = []
    for setting, some in settings.items():
        numbers = [name for name in some[0] if name not in (*keys, "seed")]
        values: dict[str, list[Any]] = {name: [row.get(name) for row in some] for name in numbers}
        shown = {name: fmean(each) if None not in each else None for name, each in values.items()}
        if spread_of is not None:
            shown["deviation"] = stdev(values[spread_of]) if len(some) > 1 else None
        averaged.append({**dict(zip(keys, setting, strict=True)), **shown, "seeds": len(some)})
    return averaged


def _between(points: Line, at: float) -> float:
    for (x, y), (x_next, y_next) in pairwise(points):
        if at <= x_next:
            return y + (y_next - y) * (at - x) / max(x_next - x, 1e-9)
    return points[-1][1]


def _first_at(points: Line, share: float) -> float | None:
    """When the line first reaches the share; none where it does not."""
    for (x, y), (x_next, y_next) in pairwise(points):
        if y < share <= y_next:
            return x + (x_next - x) * (share - y) / (y_next - y)
    return None


def with_time_alone(tables: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """The tables with ``h200_seconds`` in curve and summary, where the speed alone on the device is known.

    >>> rates = [{"subject": "a", "stage": "layers", "milliseconds": 500.0}]
    >>> curve = [{"subject": "a", "method": "m", "stage": "layers", "step": 4}]
    >>> with_time_alone({"rates": rates, "curve": curve, "summary": [{"subject": "a", "method": "m"}]})["summary"]
    [{'subject': 'a', 'method': 'm', 'h200_seconds': 2.0}]
    """
    alone = {(row["subject"], row["stage"]): row["milliseconds"] / 1000 for row in tables.get("rates", [])}
    spent: dict[tuple[str, str, int], dict[str, float]] = {}
    curve = []
    for row in tables.get("curve", []):
        key, rate = _run_of(row), alone.get((row["subject"], row["stage"]))
        if rate is None:
            curve.append(row)
            continue
        spent.setdefault(key, {})[row["stage"]] = row["step"] * rate
        curve.append({**row, "h200_seconds": sum(spent[key].values())})
    summary = [
        {**row, "h200_seconds": sum(spent[key].values())} if (key := _run_of(row)) in spent else row
        for row in tables.get("summary", [])
    ]
    return {**tables, "curve": curve, "summary": summary}


def _run_of(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["subject"], row["method"], row.get("seed", 0)
