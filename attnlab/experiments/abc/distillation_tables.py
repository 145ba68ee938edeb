"""What the curves of ``abc-distill`` say: the gap closed after equal times, of a shared device or of one alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from attnlab.experiments.abc.summaries import Rows

__all__ = ["closed_after", "derived", "with_time_alone"]

# (seconds, share of the gap closed), in the order of the seconds.
Line = list[tuple[float, float]]
PARTS = {"1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "all": 1.0}


def derived(tables: dict[str, Rows]) -> dict[str, Rows]:
    """The tables with times alone on the device, and where the methods stood after equal times."""
    tables = with_time_alone(tables)
    return {**tables, "closed_after": closed_after(tables.get("curve", []))}


def closed_after(curve: Rows) -> Rows:
    """The share of the gap closed after an eighth, a quarter, half and all of the ``seconds`` that every method had.

    ``clock`` says which: those of the device alone where they are known, or as it ran. Between two points of a curve
    its line counts. ``as_good_after`` is when a method first stood where the best way of continuing stood after all.

    >>> rows = [dict(subject="s", method="continued", seconds=t, gap_closed=g) for t, g in ((8.0, 0.4), (16.0, 0.6))]
    >>> [row[part] for row in closed_after(rows) for part in ("clock", "seconds", *PARTS, "as_good_after")]
    ['as it ran', 16.0, 0.1, 0.2, 0.4, 0.6, 16.0]
    """
    lines: dict[str, dict[str, Line]] = {}
    alone = {row["subject"] for row in curve if "h200_seconds" in row}
    for row in curve:
        points = lines.setdefault(row["subject"], {}).setdefault(row["method"], [(0.0, 0.0)])
        points.append((row["h200_seconds"] if "h200_seconds" in row else row["seconds"], row["gap_closed"]))
    found = []
    for subject, methods in lines.items():
        end = min(points[-1][0] for points in methods.values())
        continued = [_between(points, end) for method, points in methods.items() if method.startswith("continued")]
        for method, points in methods.items():
            shares = {name: _between(points, end * part) for name, part in PARTS.items()}
            clock = "alone" if subject in alone else "as it ran"
            as_good = _first_at(points, max(continued)) if continued else None
            found.append(
                {
                    "subject": subject, "method": method, "clock": clock, "seconds": end, **shares,
                    "as_good_after": as_good,
                }
            )  # fmt: skip
    return found


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
