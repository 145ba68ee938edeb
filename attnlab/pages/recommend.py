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
    "its measured loss was within the budget. Plans that softmax or another plan beats are left out."
)


def recommendation_section(recommendation: Mapping[str, Any] | None) -> Html | None:
    """The recommendation in a sentence, the plans that pay with their quality and cost, and each part's sensitivity."""
    if not recommendation:
        return None
    rows = recommendation["rows"]
    sentence = recommendation.get("sentence")
    return section(
        "What each part of the model can bear",
        element("p", f"{sentence[:1].upper()}{sentence[1:]}.", class_="lead") if sentence else None,
        _plan_table(rows, recommendation),
        element(
            "div",
            _loss_and_bytes(rows),
            _layer_table(recommendation) if recommendation["by"] == "layers" else _head_maps(recommendation),
            class_="grid2",
        ),
        _layer_by_layer(rows),
        about=ABOUT,
    )


def _plan_table(rows: Sequence[Row], recommendation: Mapping[str, Any]) -> Html:
    name, of = recommendation["exact"]["name"], recommendation["by"]
    shown = ("mechanism", "budget", "loss_increase", "held_out_increase", "attention_bytes", "time_ratio")
    flat = [
        {
            **{key: row.get(key) for key in (*shown, "predicted_increase")},
            "replaced": f"{row['replaced']} of {row['units']}",
            "quality": row["quality"]["value"],
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
        Column("attention_bytes", "Attention bytes", help="keys, values or memory that a query reads; softmax is 1"),
        Column("time_ratio", "Time", show=times, help="of the forward pass, relative to softmax"),
    ]  # fmt: skip
    left_out = len(recommendation["left_out"])
    note = f"{left_out} more plans are left out: softmax or one of these is as good, as small and as fast."
    return table(flat, name="plans", title="Plans that pay", columns=columns, note=note if left_out else "")


def _loss_and_bytes(rows: Sequence[Row]) -> Html:
    return scatter_chart(
        [Point(_plan_name(row), row["attention_bytes"], 100 * row["loss_increase"]) for row in rows],
        name="plans-loss-and-bytes",
        title="Loss against bytes read",
        x_label="attention bytes relative to softmax",
        y_label="increase of the loss in %",
        axes=Axes(reference=("exact attention", 0.0)),
        note="The plans that no other beats in loss, bytes and time together.",
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
        title=_sensitivity_title(recommendation, "Increase of the loss with the mechanism in this layer alone"),
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
        title=_sensitivity_title(recommendation, "Increase of the loss in %, with the mechanism there alone"),
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


def _sensitivity_title(recommendation: Mapping[str, Any], title: str) -> str:
    return title + (", estimated from its gradient" if recommendation.get("sensitivity_is") == "estimated" else "")


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
