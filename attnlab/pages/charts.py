"""Charts as inline SVG that read well without any script: lines with bands, points, bars, and heat maps of heads.

A chart is drawn in a box of 560 units; the style sheet enlarges its text on narrow screens. Beside the picture lies its
data as JSON: the page's script offers it as CSV, and reads it for the values under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attnlab.pages.colours import category, diverging, sequential
from attnlab.pages.html import Html, breakable, data, element
from attnlab.pages.numbers import Scale, number, scale_over, short

__all__ = ["Point", "Series", "bar_chart", "figure", "heat_maps", "line_chart", "scatter_chart"]

WIDTH, HEIGHT = 560, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 540, 34, 278
LABEL_GAP = 14.0
# Half of a marker, and some air.
MARK = 8.0
SHAPES = ("circle", "square", "diamond", "triangle")


@dataclass(frozen=True)
class Series:
    """One line: its points, a band around it where there are several seeds, and the seeds' own faint lines."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    faint: tuple[tuple[Sequence[float], Sequence[float | None]], ...] = ()
    colour: int = 0
    marked: bool = False


@dataclass(frozen=True)
class Point:
    """One point of a scatter chart."""

    name: str
    x: float
    y: float


def line_chart(
    series: Sequence[Series],
    *,
    name: str,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    reference: tuple[str, float] | None = None,
    note: str = "",
) -> Html:
    """Lines over a common axis, bands and seeds behind them, and a dashed line at the reference value."""
    xs = [x for s in series for x in (*s.x, *(x for faint in s.faint for x in faint[0]))]
    ys = [y for s in series for y in (*s.y, *(s.low or ()), *(s.high or ()))]
    ys += [y for s in series for _, faint in s.faint for y in faint]
    ys += [reference[1]] if reference else []
    x_scale = scale_over(xs, LEFT, RIGHT, log=log_x)
    y_scale = scale_over([y for y in ys if y is not None], BOTTOM, TOP, log=log_y, pad=0.04)
    drawn = [_axes(x_scale, y_scale, x_label, "" if y_label == title else y_label)]
    if reference and y_scale.shows(reference[1]):
        drawn.append(_reference(reference, y_scale, left=True))
    drawn += [_band(s, x_scale, y_scale) for s in series if s.low is not None and s.high is not None]
    for s in series:
        paths = [_path(x, y, x_scale, y_scale, "faint") for x, y in s.faint]
        dots = [
            element("circle", cx=_at(x_scale(x)), cy=_at(y_scale(y)), r=3, class_="dot")
            for x, y in zip(s.x, s.y, strict=True)
            if y is not None and x_scale.shows(x) and y_scale.shows(y) and (s.marked or len(s.x) == 1)
        ]
        drawn.append(
            element(
                "g",
                paths,
                _path(s.x, s.y, x_scale, y_scale, "line"),
                dots,
                class_=f"series {category(s.colour)}",
                data_series=s.name,
            )
        )
    table = _long(series, x_label, y_label)
    hover = {
        "x": [x_scale.low, x_scale.high, LEFT, RIGHT, log_x],
        "y": [y_scale.low, y_scale.high, BOTTOM, TOP, log_y],
        "label": x_label,
        "series": [{"name": s.name, "colour": category(s.colour), "x": list(s.x), "y": list(s.y)} for s in series],
    }
    legend = [(s.name, category(s.colour), "line") for s in series]
    return figure(_svg(title, drawn), name=name, title=title, note=note, table=table, legend=legend, hover=hover)


def scatter_chart(
    points: Sequence[Point],
    *,
    name: str,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    reference: tuple[str, float] | None = None,
    note: str = "",
) -> Html:
    """Named points, told apart by colour and shape; a logarithmic axis leaves out what is not above zero."""
    x_axis, y_axis = Scale(1, 10, 0, 1, log_x), Scale(1, 10, 0, 1, log_y)
    points = [p for p in points if x_axis.shows(p.x) and y_axis.shows(p.y)]
    reference = reference if reference and y_axis.shows(reference[1]) else None
    values = [p.y for p in points] + ([reference[1]] if reference else [])
    x_scale = scale_over([p.x for p in points], LEFT, RIGHT, log=log_x, zero=not log_x, pad=0.06)
    y_scale = scale_over(values, BOTTOM, TOP, log=log_y, zero=not log_y, pad=0.08)
    drawn = [_axes(x_scale, y_scale, x_label, y_label)]
    placed = [(x_scale(p.x), y_scale(p.y)) for p in points]
    taken = [(x - MARK, x + MARK, y) for x, y in placed]
    if reference:
        wide, level = 6.3 * len(reference[0]), y_scale(reference[1])
        # At either end of its line, above or below: where no marker lies.
        ends = {False: (RIGHT - wide, float(RIGHT)), True: (LEFT + 6.0, LEFT + 6.0 + wide)}
        places = [(left, below) for below in (False, True) for left in (False, True)]
        boxes = {(left, below): (*ends[left], level + (10 if below else -10)) for left, below in places}
        free = [place for place in places if not any(_meet(boxes[place], mark) for mark in taken)]
        left, below = (free or places)[0]
        drawn.append(_reference(reference, y_scale, left=left, below=below))
        taken.append(boxes[left, below])
    labels = _beside(placed, [6.3 * len(p.name) for p in points], taken)
    for i, (p, (x, y), (left, height)) in enumerate(zip(points, placed, labels, strict=True)):
        told = f"{p.name}: {x_label} {number(p.x)}, {y_label} {number(p.y)}"
        side = "point-label end" if left else "point-label"
        text = element("text", p.name, x=_at(x - 9 if left else x + 9), y=_at(height + 4), class_=side)
        mark = _marker(_shape(i), x, y, 5.5, told)
        drawn.append(element("g", mark, text, class_=f"series {category(i)}", data_series=p.name))
    table = {"columns": ["name", x_label, y_label], "rows": [[p.name, p.x, p.y] for p in points]}
    legend = [(p.name, category(i), _shape(i)) for i, p in enumerate(points)]
    return figure(_svg(title, drawn), name=name, title=title, note=note, table=table, legend=legend, kind="scatter")


def bar_chart(bars: Sequence[tuple[str, float]], *, name: str, title: str, x_label: str, note: str = "") -> Html:
    """Horizontal bars from zero with their names above and their values at the end."""
    step = 40
    bottom = TOP + step * len(bars)
    scale = scale_over([v for _, v in bars], 8, RIGHT - 52, zero=True)
    drawn: list[Html] = []
    for i, (label, value) in enumerate(bars):
        y = TOP + i * step
        start, end = sorted((scale(0), scale(value)))
        drawn.append(
            element(
                "g",
                element("text", label, x=8, y=y + 8, class_="tick"),
                element("rect", x=_at(start), y=y + 14, width=_at(max(end - start, 1)), height=13, rx=2, class_="bar"),
                element("text", number(value), x=_at(end + 6), y=y + 25, class_="tick strong"),
                class_=f"series {category(0)}",
            )
        )
    table = {"columns": ["name", x_label], "rows": [list(bar) for bar in bars]}
    svg = _svg(title, [element("text", x_label, x=8, y=16, class_="label"), drawn], height=bottom + 8)
    return figure(svg, name=name, title=title, note=note, table=table)


def heat_maps(
    maps: dict[str, Sequence[Sequence[float | None]]],
    *,
    name: str,
    title: str,
    note: str = "",
    rows: str = "layer",
    columns: str = "head",
    high: float | None = None,
) -> Html:
    """Small multiples with one colour scale: one cell per layer and head; signed numbers diverge from zero."""
    values = [v for grid in maps.values() for row in grid for v in row if v is not None and math.isfinite(v)]
    signed = any(v < 0 for v in values)
    top = high if high is not None else max((abs(v) for v in values), default=1.0) or 1.0
    paint = diverging if signed else sequential
    grids = [
        element("div", element("h4", breakable(label)), _grid(grid, label, paint, top, rows, columns), class_="heat")
        for label, grid in maps.items()
    ]
    steps = [top * (i / 15 * 2 - 1 if signed else i / 15) for i in range(16)]
    cells = [element("span", style=f"background:{paint(v, high=top)}") for v in steps]
    beyond = "≥ " if values and max(values) > top * 1.000001 else ""
    key = element(
        "div",
        element("span", number(-top if signed else 0)),
        element("span", cells, class_="ramp"),
        element("span", beyond + number(top)),
        class_="key",
    )
    table = {
        "columns": ["name", rows, columns, "value"],
        "rows": [
            [label, i, j, value]
            for label, grid in maps.items()
            for i, row in enumerate(grid)
            for j, value in enumerate(row)
        ],
    }
    body = element("div", grids, class_="heats")
    return figure(Html(key + body), name=name, title=title, note=note, table=table, kind="heat-maps")


def figure(
    picture: Html,
    *,
    name: str,
    title: str,
    note: str = "",
    table: dict[str, Any] | None = None,
    legend: Iterable[tuple[str, str, str]] = (),
    hover: dict[str, Any] | None = None,
    kind: str = "lines",
) -> Html:
    """A picture with its title, what can be downloaded of it, its legend and a note on how to read it."""
    pictures = ("SVG", "PNG") if "<svg" in picture else ()
    buttons = [
        element("button", label, type="button", data_download=label.lower(), aria_label=f"Download {title} as {label}")
        for label in (("CSV", *pictures) if table else pictures)
    ]
    entries = [
        element("li", _key(shape), element("span", label), class_=colour, data_series=label)
        for label, colour, shape in legend
    ]
    return element(
        "figure",
        element("figcaption", element("h3", title), element("span", buttons, class_="downloads")),
        element("div", picture, class_="plot"),
        element("ul", entries, class_="legend") if entries else None,
        element("p", note, class_="note") if note else None,
        data(_finite({"table": table, "hover": hover})) if table or hover else None,
        class_=f"card chart {kind}",
        data_name=name,
    )


def _grid(grid: Sequence[Sequence[float | None]], label: str, paint: Any, top: float, rows: str, columns: str) -> Html:
    size, left, head = 22, 26, 18
    wide = max((len(row) for row in grid), default=0)
    cells = [
        element(
            "rect",
            element("title", f"{label}, {rows} {i}, {columns} {j}: {number(value)}"),
            x=left + j * size,
            y=head + i * size,
            width=size - 1.5,
            height=size - 1.5,
            rx=2,
            style=f"fill:{paint(value, high=top)}" if value is not None and math.isfinite(value) else "fill:none",
        )
        for i, row in enumerate(grid)
        for j, value in enumerate(row)
    ]
    every = 1 if wide <= 12 else 4
    across = [
        element("text", j, x=left + (j + 0.5) * size, y=head - 6, class_="tick middle") for j in range(0, wide, every)
    ]
    down = [element("text", i, x=left - 7, y=head + (i + 0.65) * size, class_="tick end") for i in range(len(grid))]
    box = f"0 0 {left + wide * size} {head + len(grid) * size}"
    return element("svg", cells, across, down, viewBox=box, role="img", aria_label=f"{label} by {rows} and {columns}")


def _svg(title: str, drawn: object, *, height: int = HEIGHT) -> Html:
    return element("svg", drawn, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=title)


def _axes(x: Scale, y: Scale, x_label: str, y_label: str) -> Html:
    drawn = [element("text", y_label, x=8, y=18, class_="label")]
    for tick in y.ticks():
        at = _at(y(tick))
        drawn.append(element("line", x1=LEFT, x2=RIGHT, y1=at, y2=at, class_="grid"))
        drawn.append(element("text", short(tick), x=LEFT - 8, y=_at(y(tick) + 4), class_="tick end"))
    for tick in x.ticks():
        drawn.append(element("line", x1=_at(x(tick)), x2=_at(x(tick)), y1=BOTTOM, y2=BOTTOM + 5, class_="axis"))
        drawn.append(element("text", short(tick), x=_at(x(tick)), y=BOTTOM + 21, class_="tick middle"))
    drawn.append(element("line", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM, class_="axis"))
    drawn.append(element("text", x_label, x=RIGHT, y=BOTTOM + 44, class_="label end"))
    return element("g", drawn)


def _reference(reference: tuple[str, float], y: Scale, *, left: bool = False, below: bool = False) -> Html:
    at = _at(y(reference[1]))
    line = element("line", x1=LEFT, x2=RIGHT, y1=at, y2=at, class_="reference")
    place, side = (LEFT + 6, "tick") if left else (RIGHT, "tick end")
    height = y(reference[1]) + (14 if below else -6)
    return element("g", line, element("text", reference[0], x=place, y=_at(height), class_=side))


def _band(s: Series, x: Scale, y: Scale) -> Html:
    assert s.low is not None
    assert s.high is not None
    shown = [place for place in zip(s.x, s.low, s.high, strict=True) if x.shows(place[0]) and y.shows(place[1])]
    there = [f"{_at(x(a))},{_at(y(high))}" for a, _, high in shown]
    back = [f"{_at(x(a))},{_at(y(low))}" for a, low, _ in shown]
    points = " ".join(there + back[::-1])
    return element("polygon", points=points, class_=f"band {category(s.colour)}", data_series=s.name)


def _path(xs: Sequence[float], ys: Sequence[float | None], x: Scale, y: Scale, kind: str) -> Html:
    """A line that is broken where a value is missing, since NaN is a finding and no straight line."""
    parts, pen = [], "M"
    for a, b in zip(xs, ys, strict=True):
        if b is None or not x.shows(a) or not y.shows(b):
            pen = "M"
            continue
        parts.append(f"{pen}{_at(x(a))} {_at(y(b))}")
        pen = "L"
    return element("path", d="".join(parts), class_=kind)


def _marker(shape: str, x: float, y: float, r: float, told: str = "") -> Html:
    outline = {
        "circle": f"M{_at(x - r)} {_at(y)}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
        "square": f"M{_at(x - r)} {_at(y - r)}h{2 * r}v{2 * r}h{-2 * r}z",
        "diamond": f"M{_at(x)} {_at(y - 1.3 * r)}l{1.3 * r} {1.3 * r}l{-1.3 * r} {1.3 * r}l{-1.3 * r} {-1.3 * r}z",
        "triangle": f"M{_at(x)} {_at(y - 1.2 * r)}l{1.2 * r} {2.1 * r}h{-2.4 * r}z",
    }[shape]
    return element("path", element("title", told) if told else None, d=outline, class_="mark")


def _shape(index: int) -> str:
    return SHAPES[index % len(SHAPES)]


def _key(shape: str) -> Html:
    drawn = element("path", d="M1 8H15", class_="line") if shape == "line" else _marker(shape, 8, 8, 5)
    return element("svg", drawn, viewBox="0 0 16 16", aria_hidden="true")


Box = tuple[float, float, float]


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[1] and other[0] < one[1] and abs(one[2] - other[2]) < LABEL_GAP


def _beside(
    points: Sequence[tuple[float, float]], widths: Sequence[float], taken: Sequence[Box]
) -> list[tuple[bool, float]]:
    """For each point whether its label stands to its left, and how high; none lies on another or on what is taken."""
    boxes = list(taken)
    found = [(False, 0.0)] * len(points)
    for i in sorted(range(len(points)), key=lambda i: points[i][1]):
        (x, y), wide = points[i], widths[i]
        left_first = x > (LEFT + RIGHT) * 0.55
        sides = {True: (x - 9 - wide, x - 9), False: (x + 9, x + 9 + wide)}
        tried = [(side, _nearest((*sides[side], y), boxes)) for side in (left_first, not left_first)]
        inside = [(side, box) for side, box in tried if box[0] >= LEFT and box[1] <= WIDTH] or tried[:1]
        side, box = min(inside, key=lambda choice: abs(choice[1][2] - points[i][1]))
        found[i] = (side, box[2])
        boxes.append(box)
    return found


def _nearest(box: Box, taken: Sequence[Box]) -> Box:
    """The box, moved up or down by as little as makes it meet none of the others."""
    left, right, y = box
    heights = (y + LABEL_GAP / 2 * step for step in sorted(range(-12, 13), key=abs))
    free = (at for at in heights if TOP <= at <= BOTTOM and not any(_meet((left, right, at), one) for one in taken))
    return left, right, next(free, y)


def _long(series: Sequence[Series], x_label: str, y_label: str) -> dict[str, Any]:
    banded = any(s.low is not None for s in series)
    rows: list[list[Any]] = []
    for s in series:
        for i, (x, y) in enumerate(zip(s.x, s.y, strict=True)):
            rows.append(
                [s.name, x, y, *((s.low[i], s.high[i]) if s.low and s.high else (None, None) if banded else ())]
            )
    return {"columns": ["series", x_label, y_label, *(("low", "high") if banded else ())], "rows": rows}


def _finite(content: Any) -> Any:
    """JSON has no NaN: what is not finite becomes null."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _at(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
