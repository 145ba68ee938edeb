"""Charts put their numbers where the axes say."""

from __future__ import annotations

import re

import pytest

from attnlab.pages import Axes, Point, Series, bar_chart, heat_maps, line_chart, scatter_chart, table
from attnlab.pages.colours import SURFACES, THEMES, _channels, _steps, diverging, sequential
from attnlab.pages.label_placement import BOTTOM, LEFT, RIGHT, TOP, place_labels
from attnlab.pages.numbers import MISSING, Scale, scale_over, short
from attnlab.pages.tables import Column

from .parsing import parse


def test_a_line_runs_through_its_points_and_breaks_at_nan() -> None:
    series = Series("a", [0, 1, 2, 3, 4], [1.0, 3.0, float("nan"), 2.0, None])
    tree = parse(line_chart([series], name="n", title="t", x_label="x", y_label="y"))
    path = tree.one("figure").all("path", "line")[0].attributes["d"] or ""
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]
    y = scale_over([1.0, 3.0], BOTTOM, TOP, pad=0.04)
    quarter = (RIGHT - LEFT) / 4
    assert re.sub(r"[\d. ]", "", path) == "MLM"
    assert points == [
        pytest.approx((LEFT, y(1.0)), abs=0.1),
        pytest.approx((LEFT + quarter, y(3.0)), abs=0.1),
        pytest.approx((LEFT + 3 * quarter, y(2.0)), abs=0.1),
    ]
    assert tree.one("figure").data()["hover"]["series"][0]["y"] == [1.0, 3.0, None, 2.0, None]


def test_logarithmic_axes_leave_out_what_they_cannot_show() -> None:
    low, high = [0.5, 5.0, 50.0, 0.0], [2.0, 20.0, 200.0, 1.0]
    series = Series("a", [0, 1, 10, 100], [1.0, 10.0, 100.0, 0.0], low=low, high=high, marked=True)
    tree = parse(line_chart([series], name="n", title="t", x_label="x", y_label="y", axes=Axes(log_x=True, log_y=True)))
    path = tree.one("figure").all("path", "line")[0].attributes["d"] or ""
    assert len(re.findall("[ML]", path)) == 2
    points = [Point("a", 1, 2), Point("b", 0, 5), Point("c", 2, float("inf"))]
    scatter = scatter_chart(
        points, name="n", title="t", x_label="x", y_label="y", axes=Axes(log_x=True, reference=("exact", 3.0))
    )
    assert [node.text for node in parse(scatter).all("title")] == ["a: x 1, y 2"]
    assert f"M{LEFT} " in path
    assert len(tree.all("circle", "dot")) == 2
    assert len((tree.one("polygon").attributes["points"] or "").split()) == 4


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 10, 0, 1), [0, 2, 4, 6, 8, 10]),
        (Scale(0.13, 0.47, 0, 1), [0.2, 0.3, 0.4]),
        (Scale(1, 1000, 0, 1, log=True), [1, 10, 100, 1000]),
        (Scale(2, 40, 0, 1, log=True), [3, 10, 30]),
        (Scale(5, 5, 0, 1), [5]),
    ],
)
def test_ticks_are_round(scale: Scale, ticks: list[float]) -> None:
    assert scale.ticks() == pytest.approx(ticks)


def test_scales_hold_their_values_whatever_they_are() -> None:
    assert scale_over([], 0, 1) == Scale(1.0 - 0, 10.0, 0, 1)
    assert scale_over([2.0], 0, 1)(2.0) == pytest.approx(0.5)
    assert scale_over([0.0, 0.0], 0, 1)(0.0) == pytest.approx(0.5)
    assert scale_over([3.0, 7.0], 0, 1, zero=True, pad=0.1) == Scale(0.0, 7.7, 0, 1)
    assert [short(v) for v in (0.0, 12_500.0, -2e6, 3e-5)] == ["0", "12.5k", "-2M", "3e-5"]


def test_labels_of_near_points_do_not_lie_on_each_other() -> None:
    points = [(300.0, 100.0), (300.0, 103.0), (300.0, 90.0), (120.0, 101.0)]
    labels = place_labels(points, [40.0] * 4, [])
    # (to the left, how high): beside its point, on the other side, or as little away as is free.
    assert labels == [(True, 100), (False, 110), (False, 90), (False, 101)]


def test_labels_do_not_lie_on_markers() -> None:
    marks = [(292.0, 308.0, 100.0), (322.0, 338.0, 102.0)]
    assert place_labels([(300, 100), (330, 102)], [40.0, 40.0], marks) == [(True, 100), (False, 102)]
    tree = parse(
        scatter_chart(
            [Point("far", 2, 5), Point("near", 1, 1)],
            name="n",
            title="t",
            x_label="x",
            y_label="y",
            axes=Axes(reference=("exact", 4.8)),
        )
    )
    (name,) = (node for node in tree.all("text") if node.text == "exact")
    # At the right end it would lie on the marker of "far".
    assert float(name.attributes["x"] or 0) == LEFT + 6


def test_scatter_and_bars_show_every_value() -> None:
    tree = parse(scatter_chart([Point("a", 1, 2), Point("b", 3, 5)], name="n", title="t", x_label="x", y_label="y"))
    assert [node.text for node in tree.all("title")] == ["a: x 1, y 2", "b: x 3, y 5"]
    bars = parse(bar_chart([("a", 2.0), ("b", 4.0)], name="n", title="t", x_label="x"))
    first, second = (float(node.attributes["width"] or 0) for node in bars.all("rect", "bar"))
    assert second == pytest.approx(2 * first)


def test_heat_maps_share_one_scale_and_diverge_around_zero() -> None:
    tree = parse(heat_maps({"a": [[0.0, 0.5]], "b": [[1.0, None]]}, name="n", title="t"))
    fills = [node.attributes["style"] for node in tree.all("rect")]
    assert fills == ["fill:var(--seq-0)", "fill:var(--seq-8)", "fill:var(--seq-15)", "fill:none"]
    signed = parse(heat_maps({"a": [[-2.0, 0.0, 1.0]]}, name="n", title="t"))
    assert [node.attributes["style"] for node in signed.all("rect")] == [
        "fill:var(--div-0)",
        "fill:var(--div-8)",
        "fill:var(--div-12)",
    ]
    assert (sequential(7, high=0), diverging(-9, high=1)) == ("var(--seq-0)", "var(--div-0)")
    ranged = parse(heat_maps({"a": [[-1.0, 2.0, 5.0]]}, name="n", title="t", low=-1.0, high=5.0))
    assert [node.attributes["style"] for node in ranged.all("rect")] == [
        "fill:var(--seq-0)",
        "fill:var(--seq-8)",
        "fill:var(--seq-15)",
    ]
    assert [node.text for node in ranged.all("span") if node.text][-2:] == ["-1", "5"]


def _luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in _channels(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_told_from_their_background_and_scales_are_monotone(theme: str) -> None:
    surface = SURFACES[theme]
    for name in ("text", "muted", "accent", "held", "failed"):
        for ground in ("paper", "card"):
            assert _contrast(surface[name], surface[ground]) >= 4.5, (name, ground)
    for colour in THEMES[theme]["cat"]:
        assert _contrast(colour, surface["card"]) >= 3.0, colour
    sequence = [_luminance(c) for c in _steps(THEMES[theme]["seq"], 16)]
    assert sequence == sorted(sequence, reverse=theme == "light")
    arms = [_luminance(c) for c in _steps(THEMES[theme]["div"], 17)]
    rising = arms[:9] if theme == "light" else arms[8:]
    assert rising == sorted(rising)


def test_tables_sort_by_value_mark_the_best_and_keep_raw_numbers() -> None:
    rows = [{"m": "a", "x": 0.123456, "x_paper": 0.5}, {"m": "b", "x": None}, {"m": "c", "x": 2, "x_paper": 1.5}]
    tree = parse(table(rows, name="n", title="t", columns=[Column("m"), Column("x", best="low", bar=True)]))
    cells = tree.all("td")
    assert [cell.attributes.get("data-value") for cell in cells] == ["0.123456", None, "2"]
    assert [cell.text for cell in cells] == ["0.123", MISSING, "2"]
    assert tree.one("strong").text == "0.123"
    assert cells[2].attributes["style"] == "--bar:1.000"
    assert tree.one("figure").data()["table"]["rows"] == [["a", 0.123456], ["b", None], ["c", 2]]
    assert [node.text for node in parse(table(rows, name="n", title="t")).all("button")][1:] == ["m", "x", "x (paper)"]
    with pytest.raises(ValueError, match="best must be"):
        Column("x", best="lowest")
