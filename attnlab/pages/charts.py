"""Charts as inline SVG that read well without any script: lines with bands, points and bars.

A chart is drawn in a box of 560 units; the style sheet enlarges its text on narrow screens. The page also holds the
chart's data as JSON: its script offers them as CSV, and shows the values under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attnlab.pages.colours import CATEGORIES, category
from attnlab.pages.html import Html, data, element
from attnlab.pages.label_placement import (
    BOTTOM,
    LABEL_OFFSET,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    marker_boxes,
    place_labels,
    place_reference,
    text_width,
)
from attnlab.pages.numbers import Scale, number, scale_over, short, with_interval

__all__ = ["Axes", "Point", "Series", "bar_chart", "figure", "interval_chart", "line_chart", "scatter_chart"]

HEIGHT = 330
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
    # Draw low and high as the ends of a line at each point: bands of many series would hide each other.
    whiskers: bool = False


@dataclass(frozen=True)
class Point:
    """One point of a scatter chart."""

    name: str
    x: float
    y: float


@dataclass(frozen=True)
class Axes:
    """Which axes are logarithmic, and a horizontal line to compare with: (its name, its value)."""

    log_x: bool = False
    log_y: bool = False
    reference: tuple[str, float] | None = None


LINEAR = Axes()


def line_chart(
    series: Sequence[Series], *, name: str, title: str, x_label: str, y_label: str, axes: Axes = LINEAR, note: str = ""
) -> Html:
    """Lines over a common axis, bands and seeds behind them, and a dashed line at the reference value."""
    reference = axes.reference
    x_scale, y_scale = _line_scales(series, axes)
    drawn = [_axes(x_scale, y_scale, x_label, "" if y_label == title else y_label)]
    if reference and y_scale.shows(reference[1]):
        drawn.append(_reference(reference, y_scale, left=True))
    drawn += [
        _whiskers(s, x_scale, y_scale) if s.whiskers else _band(s, x_scale, y_scale)
        for s in series
        if s.low is not None and s.high is not None
    ]
    drawn += [_line(s, x_scale, y_scale) for s in series]
    hover = {
        "x": [x_scale.low, x_scale.high, LEFT, RIGHT, axes.log_x],
        "y": [y_scale.low, y_scale.high, BOTTOM, TOP, axes.log_y],
        "label": x_label,
        "series": [{"name": s.name, "colour": category(s.colour), "x": list(s.x), "y": list(s.y)} for s in series],
    }
    return figure(
        _svg(title, drawn),
        name=name,
        title=title,
        note=note,
        table=_series_table(series, x_label, y_label),
        legend=[(s.name, _line_class(s), "line") for s in series],
        hover=hover,
    )


def scatter_chart(
    points: Sequence[Point], *, name: str, title: str, x_label: str, y_label: str, axes: Axes = LINEAR, note: str = ""
) -> Html:
    """Named points, told apart by colour and shape; a logarithmic axis leaves out what is not above zero."""
    log_x, log_y = axes.log_x, axes.log_y
    x_axis, y_axis = Scale(1, 10, 0, 1, log_x), Scale(1, 10, 0, 1, log_y)
    points = [p for p in points if x_axis.shows(p.x) and y_axis.shows(p.y)]
    reference = axes.reference if axes.reference and y_axis.shows(axes.reference[1]) else None
    values = [p.y for p in points] + ([reference[1]] if reference else [])
    x_scale = scale_over([p.x for p in points], LEFT, RIGHT, log=log_x, zero=not log_x, pad=0.06)
    y_scale = scale_over(values, BOTTOM, TOP, log=log_y, zero=not log_y, pad=0.08)
    drawn = [_axes(x_scale, y_scale, x_label, y_label)]
    places = [(x_scale(p.x), y_scale(p.y)) for p in points]
    taken = marker_boxes(places)
    if reference:
        left, below, box = place_reference(reference[0], y_scale(reference[1]), taken)
        drawn.append(_reference(reference, y_scale, left=left, below=below))
        taken.append(box)
    labels = place_labels(places, [text_width(p.name) for p in points], taken)
    for i, (p, place, label) in enumerate(zip(points, places, labels, strict=True)):
        described = f"{p.name}: {x_label} {number(p.x)}, {y_label} {number(p.y)}"
        drawn.append(_labelled_marker(i, p.name, place, label, described))
    return figure(
        _svg(title, drawn),
        name=name,
        title=title,
        note=note,
        table={"columns": ["name", x_label, y_label], "rows": [[p.name, p.x, p.y] for p in points]},
        legend=[(p.name, category(i), _shape(i)) for i, p in enumerate(points)],
        kind="scatter",
    )


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


def interval_chart(
    rows: Sequence[tuple[str, float, float | None, float | None]],
    *,
    name: str,
    title: str,
    x_label: str,
    note: str = "",
) -> Html:
    """Values (name, value, low, high) as points on a line from low to high, each beside a dashed mark at zero."""
    step, ends = 42, [end for _, value, low, high in rows for end in (value, low, high) if end is not None]
    scale = scale_over([0.0, *ends], 14, RIGHT - 8, pad=0.04)
    bottom = TOP + step * len(rows)
    drawn: list[Html] = []
    for i, (label, value, low, high) in enumerate(rows):
        y = TOP + i * step + 22
        zero = element("line", x1=_at(scale(0)), x2=_at(scale(0)), y1=y - 9, y2=y + 9, class_="reference")
        words = element("text", f"{label}: {with_interval(value, low, high, sign=True)}", x=8, y=y - 14, class_="tick")
        around = None
        if low is not None and high is not None:
            around = element("path", d=f"M{_at(scale(low))} {y}H{_at(scale(high))}", class_="line")
        mark = _marker("circle", scale(value), y, 5)
        drawn.append(element("g", words, zero, around, mark, class_=f"series {category(0)}"))
    table = {"columns": ["name", x_label, "low", "high"], "rows": [list(row) for row in rows]}
    svg = _svg(title, [element("text", x_label, x=8, y=16, class_="label"), drawn], height=bottom + 8)
    return figure(svg, name=name, title=title, note=note, table=table)


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
    """A picture with its title, buttons for its downloads, its legend and a note on how to read it."""
    pictures = ("SVG", "PNG") if "<svg" in picture else ()
    buttons = [
        element("button", label, type="button", data_download=label.lower(), aria_label=f"Download {title} as {label}")
        for label in (("CSV", *pictures) if table else pictures)
    ]
    entries = [
        element(
            "li",
            element("button", _key(shape), element("span", label), type="button", aria_pressed="true"),
            class_=colour,
            data_series=label,
        )
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


def _line_scales(series: Sequence[Series], axes: Axes) -> tuple[Scale, Scale]:
    """Axes that hold every point, the bands, the seeds' own lines and the reference."""
    xs: list[float] = []
    ys: list[float | None] = [axes.reference[1]] if axes.reference else []
    for s in series:
        xs += s.x
        ys += [*s.y, *(s.low or ()), *(s.high or ())]
        for faint_x, faint_y in s.faint:
            xs += faint_x
            ys += faint_y
    finite = [y for y in ys if y is not None]
    return scale_over(xs, LEFT, RIGHT, log=axes.log_x), scale_over(finite, BOTTOM, TOP, log=axes.log_y, pad=0.04)


def _line(s: Series, x: Scale, y: Scale) -> Html:
    """One series: its seeds' faint lines, its own line, and a dot at each point where they are few."""
    dots = [
        element("circle", cx=_at(x(a)), cy=_at(y(b)), r=3, class_="dot")
        for a, b in zip(s.x, s.y, strict=True)
        if b is not None and x.shows(a) and y.shows(b)
    ]
    return element(
        "g",
        [_path(xs, ys, x, y, "faint") for xs, ys in s.faint],
        _path(s.x, s.y, x, y, "line"),
        dots if s.marked or len(s.x) == 1 else [],
        class_=f"series {_line_class(s)}",
        data_series=s.name,
    )


def _line_class(s: Series) -> str:
    """The colour of a line; where the colours have run out, lines are dashed."""
    return category(s.colour) + (" dashed" if s.colour >= CATEGORIES else "")


def _band(s: Series, x: Scale, y: Scale) -> Html:
    assert s.low is not None
    assert s.high is not None
    shown = [place for place in zip(s.x, s.low, s.high, strict=True) if x.shows(place[0]) and y.shows(place[1])]
    upper = [f"{_at(x(a))},{_at(y(high))}" for a, _, high in shown]
    lower = [f"{_at(x(a))},{_at(y(low))}" for a, low, _ in shown]
    points = " ".join(upper + lower[::-1])
    return element("polygon", points=points, class_=f"band {category(s.colour)}", data_series=s.name)


def _whiskers(s: Series, x: Scale, y: Scale) -> Html:
    assert s.low is not None
    assert s.high is not None
    shown = [place for place in zip(s.x, s.low, s.high, strict=True) if x.shows(place[0]) and y.shows(place[1])]
    ends = "".join(f"M{_at(x(a))} {_at(y(low))}V{_at(y(high))}" for a, low, high in shown)
    return element("path", d=ends, class_=f"faint whisker {category(s.colour)}", data_series=s.name)


def _path(xs: Sequence[float], ys: Sequence[float | None], x: Scale, y: Scale, kind: str) -> Html:
    """A line with a gap where a value is missing or not finite."""
    parts, pen = [], "M"
    for a, b in zip(xs, ys, strict=True):
        if b is None or not x.shows(a) or not y.shows(b):
            pen = "M"
            continue
        parts.append(f"{pen}{_at(x(a))} {_at(y(b))}")
        pen = "L"
    return element("path", d="".join(parts), class_=kind)


def _labelled_marker(
    index: int, name: str, place: tuple[float, float], label: tuple[bool, float], described: str
) -> Html:
    """A point's marker with its name beside it; ``label`` is (to the left, how high)."""
    (x, y), (left, height) = place, label
    side = "point-label end" if left else "point-label"
    text = element("text", name, x=_at(x - LABEL_OFFSET if left else x + LABEL_OFFSET), y=_at(height + 4), class_=side)
    mark = _marker(_shape(index), x, y, 5.5, described)
    return element("g", mark, text, class_=f"series {category(index)}", data_series=name)


def _marker(shape: str, x: float, y: float, r: float, described: str = "") -> Html:
    outline = {
        "circle": f"M{_at(x - r)} {_at(y)}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
        "square": f"M{_at(x - r)} {_at(y - r)}h{2 * r}v{2 * r}h{-2 * r}z",
        "diamond": f"M{_at(x)} {_at(y - 1.3 * r)}l{1.3 * r} {1.3 * r}l{-1.3 * r} {1.3 * r}l{-1.3 * r} {-1.3 * r}z",
        "triangle": f"M{_at(x)} {_at(y - 1.2 * r)}l{1.2 * r} {2.1 * r}h{-2.4 * r}z",
    }[shape]
    return element("path", element("title", described) if described else None, d=outline, class_="mark")


def _shape(index: int) -> str:
    return SHAPES[index % len(SHAPES)]


def _key(shape: str) -> Html:
    drawn = element("path", d="M1 8H15", class_="line") if shape == "line" else _marker(shape, 8, 8, 5)
    return element("svg", drawn, viewBox="0 0 16 16", aria_hidden="true")


def _series_table(series: Sequence[Series], x_label: str, y_label: str) -> dict[str, Any]:
    """The points as rows, with the ends of the band where any series has one."""
    banded = any(s.low is not None for s in series)
    rows: list[list[Any]] = []
    for s in series:
        for i, (x, y) in enumerate(zip(s.x, s.y, strict=True)):
            rows.append(
                [s.name, x, y, *((s.low[i], s.high[i]) if s.low and s.high else (None, None) if banded else ())]
            )
    return {"columns": ["series", x_label, y_label, *(("low", "high") if banded else ())], "rows": rows}


def _finite(content: Any) -> Any:
    """The content with null for NaN and infinity, which JSON does not have."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _at(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
