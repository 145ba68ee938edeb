"""What the curves of ``abc-distill`` say: the gap closed after equal times, of a shared device or of one alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from attnlab.experiments.abc.summaries import Rows

__all__ = ["at_equal_time", "closed_after", "derived", "with_time_alone"]

PARTS = {"1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "all": 1.0}


def derived(tables: dict[str, Rows]) -> dict[str, Rows]:
    """The tables with times alone on the device, and where the methods stood when the first of them ended."""
    tables = with_time_alone(tables)
    curve = tables.get("curve", [])
    return {**tables, "equal_time": at_equal_time(curve), "closed_after": closed_after(curve)}


def closed_after(curve: Rows) -> Rows:
    """The share of the gap closed after an eighth, a quarter, half and all of the ``seconds`` that every method had.

    ``clock`` says which: those of the device alone where they are known, or as it ran. Between two points of a curve
    its line counts.

    >>> rows = [dict(subject="s", method="m", seconds=t, gap_closed=g) for t, g in ((8.0, 0.4), (16.0, 0.6))]
    >>> [row[part] for row in closed_after(rows) for part in ("clock", "seconds", *PARTS)]
    ['as it ran', 16.0, 0.1, 0.2, 0.4, 0.6]
    """
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {}
    alone = {row["subject"] for row in curve if "h200_seconds" in row}
    for row in curve:
        points = lines.setdefault(row["subject"], {}).setdefault(row["method"], [(0.0, 0.0)])
        points.append((row["h200_seconds"] if "h200_seconds" in row else row["seconds"], row["gap_closed"]))
    found = []
    for subject, methods in lines.items():
        end = min(points[-1][0] for points in methods.values())
        for method, points in methods.items():
            shares = {name: _between(points, end * part) for name, part in PARTS.items()}
            clock = "alone" if subject in alone else "as it ran"
            found.append({"subject": subject, "method": method, "clock": clock, "seconds": end, **shares})
    return found


def _between(points: list[tuple[float, float]], at: float) -> float:
    for (x, y), (x_next, y_next) in pairwise(points):
        if at <= x_next:
            return y + (y_next - y) * (at - x) / max(x_next - x, 1e-9)
    return points[-1][1]


def at_equal_time(curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each subject, what its methods had closed by the time that the shortest of them ended.

    >>> rows = [("a", 1.0, 0.1), ("a", 3.0, 0.3), ("b", 2.0, 0.5)]
    >>> [r["gap_closed"] for r in at_equal_time([dict(subject="s", method=m, seconds=t, gap_closed=g, loss=0.0)
    ...                                          for m, t, g in rows])]
    [0.1, 0.5]
    """
    ends: dict[str, dict[str, float]] = {}
    for row in curve:
        longest = ends.setdefault(row["subject"], {})
        longest[row["method"]] = max(longest.get(row["method"], 0.0), row["seconds"])
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in curve:
        if row["seconds"] <= min(ends[row["subject"]].values()):
            chosen = {name: row[name] for name in ("subject", "method", "seconds", "loss", "gap_closed")}
            found[row["subject"], row["method"]] = chosen
    return list(found.values())


def with_time_alone(tables: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """The tables with ``h200_seconds`` in curve and summary, where the speed alone on the device is known.

    >>> rates = [{"subject": "a", "stage": "layers", "milliseconds": 500.0}]
    >>> curve = [{"subject": "a", "method": "m", "stage": "layers", "step": 4}]
    >>> with_time_alone({"rates": rates, "curve": curve, "summary": [{"subject": "a", "method": "m"}]})["summary"]
    [{'subject': 'a', 'method': 'm', 'h200_seconds': 2.0}]
    """
    alone = {(row["subject"], row["stage"]): row["milliseconds"] / 1000 for row in tables.get("rates", [])}
    spent: dict[tuple[str, str], dict[str, float]] = {}
    curve = []
    for row in tables.get("curve", []):
        key, rate = (row["subject"], row["method"]), alone.get((row["subject"], row["stage"]))
        if rate is None:
            curve.append(row)
            continue
        spent.setdefault(key, {})[row["stage"]] = row["step"] * rate
        curve.append({**row, "h200_seconds": sum(spent[key].values())})
    summary = [
        {**row, "h200_seconds": sum(spent[key].values())} if (key := (row["subject"], row["method"])) in spent else row
        for row in tables.get("summary", [])
    ]
    return {**tables, "curve": curve, "summary": summary}
