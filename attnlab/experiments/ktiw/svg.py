"""Small standalone SVG pictures for documents: panels of lines, and matrices with their words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["COLOURS", "Line", "Matrix", "Panel", "line_panels", "matrices"]

COLOURS = ("#c44e52", "#4c72b0", "#55a868", "#8172b2", "#937860", "#64b5cd", "#8c8c8c", "#ccb974")
STYLE = (
    "<style>text{font:11px sans-serif;fill:#555}.title{font-weight:bold}.tick{font-size:10px}"
    "path{fill:none}.axis{stroke:#999}</style>"
)
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 300, 190, 40, 24, 34


@dataclass(frozen=True)
class Line:
    """Points of one colour; ``name`` puts it in the key, ``thin`` is for one of many seeds."""

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


def line_panels(panels: Sequence[Panel], *, across: int = 2) -> str:
    """The panels side by side, ``across`` in a row, each with the key of its named lines."""
    across = min(across, len(panels))
    key = 10 + 15 * max(len([line for line in panel.lines if line.name]) for panel in panels)
    tall = HEIGHT + key
    drawn = []
    for i, panel in enumerate(panels):
        drawn.append(f'<g transform="translate({i % across * WIDTH},{i // across * tall})">{_panel(panel)}</g>')
    return _svg(across * WIDTH, -(-len(panels) // across) * tall, "".join(drawn))


def matrices(given: Sequence[Matrix], *, cell: int = 22) -> str:
    """The matrices in a row, each shaded from its own least to its own greatest value."""
    drawn, x, tall = [], 0.0, 0.0
    for m in given:
        left = 10 + 6.2 * max(map(len, m.rows), default=0)
        top = 26 + 6.2 * max(map(len, m.columns), default=0)
        flat = [v for row in m.values for v in row]
        low, high = min(flat, default=0.0), max(flat, default=1.0)
        parts = [f'<text class="title" x="{left:.0f}" y="14">{escape(m.title)}</text>']
        for j, word in enumerate(m.columns):
            at = left + (j + 0.65) * cell
            parts.append(f'<text transform="translate({at:.1f},{top - 4:.1f}) rotate(-90)">{escape(word)}</text>')
        for i, (word, row) in enumerate(zip(m.rows, m.values, strict=True)):
            y = top + i * cell
            parts.append(f'<text x="{left - 5:.1f}" y="{y + 0.65 * cell:.1f}" text-anchor="end">{escape(word)}</text>')
            for j, value in enumerate(row):
                share = 0.5 if high == low else (value - low) / (high - low)
                told = f"<title>{value:.3g}</title>"
                parts.append(
                    f'<rect x="{left + j * cell:.1f}" y="{y:.1f}" width="{cell - 1}" height="{cell - 1}" '
                    f'fill="#4c72b0" fill-opacity="{0.05 + 0.95 * share:.3f}">{told}</rect>'
                )
        drawn.append(f'<g transform="translate({x:.0f},0)">{"".join(parts)}</g>')
        # A title may be wider than its matrix.
        x += left + max(len(m.columns) * cell, 6.6 * len(m.title)) + 16
        tall = max(tall, top + len(m.rows) * cell + 6)
    return _svg(math.ceil(x), math.ceil(tall), "".join(drawn))


def _panel(panel: Panel) -> str:
    xs = [x for line in panel.lines for x in line.x]
    ys = [y for line in panel.lines for y in line.y]
    low = panel.low if panel.low is not None else min(ys, default=0.0)
    high = panel.high if panel.high is not None else max(ys, default=1.0)
    first, last = min(xs, default=0.0), max(xs, default=1.0)
    right, floor = WIDTH - 12, HEIGHT - BOTTOM

    def place(x: float, y: float) -> str:
        across = (x - first) / (last - first or 1)
        up = (min(max(y, low), high) - low) / (high - low or 1)
        return f"{LEFT + across * (right - LEFT):.1f} {floor - up * (floor - TOP):.1f}"

    parts = [
        f'<text class="title" x="{LEFT}" y="14">{escape(panel.title)}</text>',
        f'<path class="axis" d="M{LEFT} {TOP}V{floor}H{right}"/>',
        f'<text class="tick" x="{LEFT - 4}" y="{TOP + 8}" text-anchor="end">{high:.3g}</text>',
        f'<text class="tick" x="{LEFT - 4}" y="{floor}" text-anchor="end">{low:.3g}</text>',
        f'<text class="tick" x="{LEFT}" y="{floor + 13}">{first:.0f}</text>',
        f'<text class="tick" x="{right}" y="{floor + 13}" text-anchor="end">{last:.0f}</text>',
        f'<text x="{(LEFT + right) / 2:.0f}" y="{floor + 26}" text-anchor="middle">{escape(panel.x_label)}</text>',
        f'<text transform="translate(12,{(TOP + floor) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(panel.y_label)}</text>",
    ]
    for line in panel.lines:
        points = "L".join(place(x, y) for x, y in zip(line.x, line.y, strict=True))
        look = 'stroke-width="1" stroke-opacity="0.6"' if line.thin else 'stroke-width="2"'
        parts.append(f'<path d="M{points}" stroke="{line.colour}" {look}/>')
    for i, line in enumerate(line for line in panel.lines if line.name):
        y = HEIGHT + 10 + 15 * i
        parts.append(f'<path d="M{LEFT} {y - 4}h16" stroke="{line.colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 22}" y="{y}">{escape(line.name)}</text>')
    return "".join(parts)


def _svg(width: float, height: float, content: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"{STYLE}{content}</svg>\n"
    )
