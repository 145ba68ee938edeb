"""Small heat maps side by side: one cell per layer and head, one colour scale for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeGuard

from attnlab.pages.charts import figure
from attnlab.pages.colours import diverging, sequential
from attnlab.pages.html import Html, breakable, element
from attnlab.pages.numbers import number

__all__ = ["Grid", "heat_maps"]

Grid = Sequence[Sequence[float | None]]


def heat_maps(
    maps: Mapping[str, Grid],
    *,
    name: str,
    title: str,
    note: str = "",
    rows: str = "layer",
    columns: str = "head",
    row_names: Sequence[str] = (),
    low: float | None = None,
    high: float | None = None,
) -> Html:
    """Small multiples with one colour scale: one cell per layer and head; signed numbers diverge from zero.

    With ``low`` the colours run from it to ``high``, whatever the signs. Rows are numbered unless ``row_names`` are
    given.
    """
    values = [v for grid in maps.values() for row in grid for v in row if _is_finite(v)]
    paint, bottom, top = _scale(values, low, high)
    grids = [
        element(
            "div",
            element("h4", breakable(label)),
            _grid(grid, label, paint, top, rows, columns, row_names),
            class_="heat",
        )
        for label, grid in maps.items()
    ]
    table = {
        "columns": ["name", rows, columns, "value"],
        "rows": [
            [label, i, j, value]
            for label, grid in maps.items()
            for i, row in enumerate(grid)
            for j, value in enumerate(row)
        ],
    }
    key = _colour_key(paint, bottom, top, exceeded=bool(values) and max(values) > top * 1.000001)
    body = element("div", grids, class_="heats")
    return figure(Html(key + body), name=name, title=title, note=note, table=table, kind="heat-maps")


def _scale(values: Sequence[float], low: float | None, high: float | None) -> tuple[Callable[..., str], float, float]:
    """How a value is painted, and the ends of the colour scale."""
    top = high if high is not None else max((abs(v) for v in values), default=1.0) or 1.0
    if low is not None:
        return partial(_from_low, low=low), low, top
    return (diverging, -top, top) if any(v < 0 for v in values) else (sequential, 0.0, top)


def _from_low(value: float, *, low: float, high: float) -> str:
    return sequential(value - low, high=high - low)


def _colour_key(paint: Callable[..., str], bottom: float, top: float, *, exceeded: bool) -> Html:
    """The colour scale with its ends; ``exceeded`` if some values are above it."""
    steps = [bottom + (top - bottom) * (i / 15) for i in range(16)]
    return element(
        "div",
        element("span", number(bottom)),
        element("span", [element("span", style=f"background:{paint(v, high=top)}") for v in steps], class_="ramp"),
        element("span", ("≥ " if exceeded else "") + number(top)),
        class_="key",
    )


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _grid(
    grid: Grid, label: str, paint: Callable[..., str], top: float, rows: str, columns: str, row_names: Sequence[str]
) -> Html:
    names = row_names or [str(i) for i in range(len(grid))]
    size, left, head = 22, max(26, 12 + 7 * max(map(len, names), default=0)), 18
    wide = max((len(row) for row in grid), default=0)
    cells = [
        element(
            "rect",
            element("title", f"{label}, {rows} {names[i]}, {columns} {j}: {number(value)}"),
            x=left + j * size,
            y=head + i * size,
            width=size - 1.5,
            height=size - 1.5,
            rx=2,
            style=f"fill:{paint(value, high=top)}" if _is_finite(value) else "fill:none",
        )
        for i, row in enumerate(grid)
        for j, value in enumerate(row)
    ]
    every = 1 if wide <= 12 else 4
    across = [
        element("text", j, x=left + (j + 0.5) * size, y=head - 6, class_="tick middle") for j in range(0, wide, every)
    ]
    down = [
        element("text", name, x=left - 7, y=head + (i + 0.65) * size, class_="tick end") for i, name in enumerate(names)
    ]
    box = f"0 0 {left + wide * size} {head + len(grid) * size}"
    return element("svg", cells, across, down, viewBox=box, role="img", aria_label=f"{label} by {rows} and {columns}")
