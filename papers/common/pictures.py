"""Standalone SVG files for documents, which have no style sheet: panels of lines, and matrices with their words.

``charts.py`` draws the same for a page, with the page's colours and its script.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.pages.html import Html, element
from attnlab.pages.numbers import Scale, scale_over, short
from attnlab.progress import each
from attnlab.provenance import write_atomic

__all__ = ["COLOURS", "Drawing", "Line", "Matrix", "Panel", "Tables", "draw_results", "line_panels", "matrices"]

Tables = Mapping[str, Sequence[Mapping[str, Any]]]
# The name of a results file, the table it must hold, and the function that draws it.
Drawing = tuple[str, str, Callable[[Tables], str]]

COLOURS = ("#c44e52", "#4c72b0", "#55a868", "#8172b2", "#937860", "#64b5cd", "#8c8c8c", "#ccb974")
STYLE = Html(
    "text{font:11px sans-serif;fill:#555}.title{font-weight:bold}.tick{font-size:10px}path{fill:none}.axis{stroke:#999}"
)

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 300, 190, 40, 24, 34
KEY_LINE = 15
# The usual width of a letter.
LETTER = 6.2


@dataclass(frozen=True)
class Line:
    """Points of one colour, one of them a dot; ``name`` puts it in the key, ``thin`` is for one of many seeds."""

    x: Sequence[float]
    y: Sequence[float]
    colour: str
    name: str = ""
    thin: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes; ``low`` and ``high`` fix the vertical one."""

    title: str
    lines: Sequence[Line]
    x_label: str = "step"
    y_label: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Matrix:
    """Numbers as shades of one colour, with the words of rows and columns."""

    title: str
    values: Sequence[Sequence[float]]
    rows: Sequence[str]
    columns: Sequence[str]


def draw_results(pictures: Mapping[str, Drawing], results: Path, out: Path) -> list[Path]:
    """Write the pictures, {file: drawing}, of what the folder ``results`` holds into the folder ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (result, needed, draw) in each(list(pictures.items()), lambda picture: picture[0]):
        path = results / f"{result}.json"
        tables = json.loads(path.read_text(encoding="utf-8"))["tables"] if path.exists() else {}
        if tables.get(needed):
            written.append(write_atomic(out / name, draw(tables)))
    return written


def line_panels(panels: Sequence[Panel], *, across: int = 2) -> str:
    """The panels side by side, ``across`` in a row, each with the key of its named lines."""
    across = min(across, len(panels))
    tall = HEIGHT + 10 + KEY_LINE * max(len([line for line in panel.lines if line.name]) for panel in panels)
    drawn = [
        element("g", _panel(panel), transform=f"translate({i % across * WIDTH},{i // across * tall})")
        for i, panel in enumerate(panels)
    ]
    return _svg(across * WIDTH, -(-len(panels) // across) * tall, drawn)


def matrices(drawings: Sequence[Matrix], *, cell: int = 22) -> str:
    """The matrices in a row, each shaded from its own least to its own greatest value."""
    drawn, x, tall = [], 0.0, 0.0
    for m in drawings:
        left = 10 + LETTER * max(map(len, m.rows), default=0)
        top = 26 + LETTER * max(map(len, m.columns), default=0)
        drawn.append(element("g", _matrix(m, left, top, cell), transform=f"translate({x:.0f},0)"))
        # A title may be wider than its matrix.
        x += left + max(len(m.columns) * cell, 6.6 * len(m.title)) + 16
        tall = max(tall, top + len(m.rows) * cell + 6)
    return _svg(math.ceil(x), math.ceil(tall), drawn)


def _matrix(m: Matrix, left: float, top: float, cell: int) -> list[Html]:
    flat = [v for row in m.values for v in row]
    low, high = min(flat, default=0.0), max(flat, default=1.0)
    parts = [element("text", m.title, x=f"{left:.0f}", y=14, class_="title")]
    for j, word in enumerate(m.columns):
        at = left + (j + 0.65) * cell
        parts.append(element("text", word, transform=f"translate({at:.1f},{top - 4:.1f}) rotate(-90)"))
    for i, (word, row) in enumerate(zip(m.rows, m.values, strict=True)):
        y = top + i * cell
        parts.append(_end(word, left - 5, y + 0.65 * cell))
        for j, value in enumerate(row):
            share = 0.5 if high == low else (value - low) / (high - low)
            parts.append(
                element(
                    "rect",
                    element("title", f"{value:.3g}"),
                    x=f"{left + j * cell:.1f}",
                    y=f"{y:.1f}",
                    width=cell - 1,
                    height=cell - 1,
                    fill=COLOURS[1],
                    fill_opacity=f"{0.05 + 0.95 * share:.3f}",
                )
            )
    return parts


def _panel(panel: Panel) -> list[Html]:
    right, floor = WIDTH - 12, HEIGHT - BOTTOM
    xs, ys = ([v for line in panel.lines for v in getattr(line, name)] for name in ("x", "y"))
    across, fitted = scale_over(xs, LEFT, right), scale_over(ys, floor, TOP)
    low = fitted.low if panel.low is None else panel.low
    up = Scale(low, fitted.high if panel.high is None else panel.high, floor, TOP)
    parts = [
        element("text", panel.title, x=LEFT, y=14, class_="title"),
        element("path", d=f"M{LEFT} {TOP}V{floor}H{right}", class_="axis"),
        *(_end(short(tick), LEFT - 4, up(tick) + 4, "tick") for tick in up.ticks(4)),
        *(_middle(short(tick), across(tick), floor + 13, "tick") for tick in across.ticks(4)),
        _middle(panel.x_label, (LEFT + right) / 2, floor + 26),
        element(
            "text",
            panel.y_label,
            transform=f"translate(10,{(TOP + floor) / 2:.0f}) rotate(-90)",
            text_anchor="middle",
        ),
    ]
    for line in panel.lines:
        parts += _drawn(line, across, up)
    for i, line in enumerate(line for line in panel.lines if line.name):
        y = HEIGHT + 10 + KEY_LINE * i
        parts.append(element("path", d=f"M{LEFT} {y - 4}h16", stroke=line.colour, stroke_width=2))
        parts.append(element("text", line.name, x=LEFT + 22, y=y))
    return parts


def _drawn(line: Line, across: Scale, up: Scale) -> list[Html]:
    """A line cut to the height of its panel; a dot where it has one point."""
    inside = [(x, min(max(y, up.low), up.high)) for x, y in zip(line.x, line.y, strict=True)]
    if len(inside) == 1:
        (x, y) = inside[0]
        return [element("circle", cx=f"{across(x):.1f}", cy=f"{up(y):.1f}", r=4, fill=line.colour)]
    points = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in inside)
    look = {"stroke_width": 1, "stroke_opacity": 0.6} if line.thin else {"stroke_width": 2}
    return [element("path", d=f"M{points}", stroke=line.colour, **look)]


def _end(text: str, x: float, y: float, kind: str | None = None) -> Html:
    return element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor="end", class_=kind)


def _middle(text: str, x: float, y: float, kind: str | None = None) -> Html:
    return element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor="middle", class_=kind)


def _svg(width: int, height: int, content: object) -> str:
    size = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    return element("svg", element("style", STYLE), content, xmlns="http://www.w3.org/2000/svg", **size) + "\n"
