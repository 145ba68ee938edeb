"""The part of the comparison's page that says which layers can take which mechanism, per loss of quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnlab.pages.charts import Axes, Point, scatter_chart
from attnlab.pages.fragments import explained, section
from attnlab.pages.heatmaps import Grid, heat_maps
from attnlab.pages.html import Html, breakable, element
from attnlab.pages.numbers import MISSING, times
from attnlab.pages.quality import quality_title, show_quality
from attnlab.pages.tables import Column, table

__all__ = ["recommendation_section"]

Row = Mapping[str, Any]

ABOUT = (
    "One part of the model at a time was given each mechanism, the rest left exact. The increases of the loss were "
    "taken to add up, which proposes a plan for each budget; every plan below was then really run, and cut down until "
    "its measured loss was within the budget."
)


def recommendation_section(recommendation: Mapping[str, Any] | None) -> Html | None:
    """Plans with their measured quality, time and memory, the unbeaten ones, and how sensitive each part is."""
    if not recommendation:
        return None
    rows = recommendation["rows"]
    return section(
        "What each part of the model can bear",
        _plan_table(rows, recommendation),
        element(
            "div",
            _loss_and_time(rows),
            _layer_table(recommendation) if recommendation["by"] == "layers" else _head_maps(recommendation),
            class_="grid2",
        ),
        _layer_by_layer(rows),
        about=ABOUT,
    )


def _plan_table(rows: Sequence[Row], recommendation: Mapping[str, Any]) -> Html:
    name, of = recommendation["exact"]["name"], recommendation["by"]
    flat = [
        {
            **{key: row[key] for key in ("mechanism", "budget", "loss_increase", "time_ratio", "memory_ratio")},
            "replaced": f"{row['replaced']} of {row['units']}",
            "quality": row["quality"]["value"],
            "held_out_increase": row.get("held_out_increase"),
            "predicted_increase": row["predicted_increase"],
            "pareto": "yes" if row["pareto"] else "",
        }
        for row in rows
    ]
    columns = [
        Column("budget", "Budget", show=_share, help="how much of the exact loss may be added"),
        Column("mechanism", "Mechanism", show=breakable),
        Column("replaced", of.capitalize(), help=f"{of} that take it; all others stay exact"),
        Column("quality", quality_title(name), show=show_quality(name)),
        Column("loss_increase", "Loss", show=_share, help="measured, relative to the exact loss"),
        Column("held_out_increase", "Loss, held out", show=_share, help="on text that had no part in the choice"),
        Column("predicted_increase", "Loss, predicted", show=_share, help="the sum of the single increases"),
        Column("time_ratio", "Time", show=times, help="of the forward pass, relative to softmax"),
        Column("memory_ratio", "Memory", show=times, help="of the hungriest layer's attention, relative to softmax"),
        Column("pareto", "Unbeaten", show=str, help="no plan is as good in loss, time and memory and better in one"),
    ]  # fmt: skip
    return table(flat, name="plans", title="Plans per budget", columns=columns)


def _loss_and_time(rows: Sequence[Row]) -> Html:
    # Several budgets may lead to the same plan, which is one point. Each budget's first plan replaces the most.
    firsts = {row["budget"]: row for row in reversed(rows)}
    shown = {str(row["plan"]): row for row in reversed(rows) if row["pareto"] or firsts[row["budget"]] is row}
    return scatter_chart(
        [Point(_plan_name(row), row["time_ratio"], 100 * row["loss_increase"]) for row in reversed(shown.values())],
        name="plans-loss-and-time",
        title="Loss against time",
        x_label="time relative to softmax",
        y_label="increase of the loss in %",
        axes=Axes(reference=("exact attention", 0.0)),
        note="The plans that no other beats in loss, time and memory together, and the first one of each budget.",
    )


def _layer_table(recommendation: Mapping[str, Any]) -> Html:
    """How much the loss rises with each mechanism in one layer alone, as a table."""
    rows: dict[str, dict[str, Any]] = {}
    for row in recommendation["sensitivity"]:
        name = f"{row['kind']} {row['layer']}"
        rows.setdefault(name, {"layer": name})[row["mechanism"]] = _relative(row["increase"], recommendation)
    return table(
        list(rows.values()),
        name="sensitivity",
        title="Increase of the loss with the mechanism in this layer alone",
        columns=[
            Column("layer", "Layer", show=str),
            *(Column(spec, spec, show=_share) for spec in recommendation["candidates"]),
        ],
        note="A dash: the mechanism cannot be used there.",
    )


def _head_maps(recommendation: Mapping[str, Any]) -> Html:
    """How much the loss rises with each mechanism in one head alone, as heat maps."""
    kinds = list(dict.fromkeys(row["kind"] for row in recommendation["sensitivity"]))
    maps: dict[str, Grid] = {
        spec if len(kinds) == 1 else f"{spec}, {kind}": _head_grid(recommendation, spec, kind)
        for spec in recommendation["candidates"]
        for kind in kinds
    }
    values = [v for grid in maps.values() for line in grid for v in line if v is not None]
    return heat_maps(
        maps,
        name="sensitivity",
        title="Increase of the loss in %, with the mechanism there alone",
        high=max(values, default=1.0) or 1.0,
        note="Rows are layers from the input up, columns are heads. Light bears the mechanism, dark does not.",
    )


def _head_grid(recommendation: Mapping[str, Any], spec: str, kind: str) -> Grid:
    """(layer, head): the increase of the loss in per cent with ``spec`` in that head; None where it cannot be used."""
    grid: dict[int, list[float | None]] = {}
    for row in recommendation["sensitivity"]:
        if row["mechanism"] == spec and row["kind"] == kind:
            grid.setdefault(row["layer"], []).append(_relative(row["increase"], recommendation, scale=100))
    return list(grid.values())


def _relative(increase: float | None, recommendation: Mapping[str, Any], *, scale: int = 1) -> float | None:
    return None if increase is None else scale * increase / recommendation["exact"]["loss"]


def _layer_by_layer(rows: Sequence[Row]) -> Html | None:
    listed = [
        (_plan_name(row), "; ".join(f"{layer}: {spec}" for layer, spec in row["plan"]["layers"].items()))
        for row in rows
        if row["replaced"]
    ]
    if not listed:
        return None
    return element("details", element("summary", "The plans, layer by layer"), explained(listed), class_="card")


def _plan_name(row: Row) -> str:
    return str(row["mechanism"]) if row["budget"] is None else f"{row['mechanism']}, {_share(row['budget'])}"


def _share(value: Any) -> str:
    return MISSING if value is None else f"{100 * value:+.3g} %"
