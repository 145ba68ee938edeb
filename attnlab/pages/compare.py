"""The page of ``attnlab compare``: mechanisms in a model's attention, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnlab.pages.charts import Axes, Point, Series, bar_chart, line_chart, scatter_chart
from attnlab.pages.fragments import config_list, download_json, explained, facts, provenance_facts, section
from attnlab.pages.heatmaps import heat_maps
from attnlab.pages.html import Html, breakable, element, page
from attnlab.pages.maps import map_viewer
from attnlab.pages.numbers import MISSING, number, times, with_interval
from attnlab.pages.pattern_audit import audit_section
from attnlab.pages.quality import (
    QualityAxis,
    quality_axis,
    quality_of,
    quality_title,
    quality_with_interval,
)
from attnlab.pages.recommend import recommendation_section
from attnlab.pages.tables import Column, columns_of, table

__all__ = ["compare_page", "comparison_columns", "comparison_rows", "finding"]

Row = Mapping[str, Any]

INTRODUCTION = (
    "In attention every token takes a weighted mean of the other tokens' values: output = W v, one weight matrix W per "
    "head. Exact (softmax) attention computes every weight, which is slow and large for long texts. Each mechanism "
    "here was put in its place in the same trained model, without any retraining, and run on the same text.",
    "Two things can then go wrong, and they are not the same: the weights W may differ (score error), or what comes "
    "out of the head, W v, may differ (output error). Only the output reaches the rest of the model, so a mechanism "
    "whose weights look wrong can still be exact.",
)
MEANINGS = (
    ("Mechanism", "The spec string: give it to attnlab.mechanism() or to -m on the command line for the same object."),
    ("Perplexity / MLM error", "How well the whole model still predicts: perplexity of the next token, or the share of "
     "masked tokens predicted wrongly. Lower is better; the dashed line is the model with exact attention."),
    ("Output error", "‖(Ŵ - W) v‖ / ‖W v‖ over all heads: 0 is exact, 1 is as wrong as no output at all."),
    ("Score error", "‖Ŵ - W‖ / ‖W‖: the error of the weights, values ignored."),
    ("After projection", "The output error once the layer's output matrix W_O has mixed the heads."),
    ("Effective error", "The error on effective attention: the part of W that the values do not cancel."),
    ("Time, memory", "Relative to softmax attention in the same run on the same machine: 2 is twice as much. A model's "
     "time is its whole forward pass; attention's time and peak memory are those of one layer's attention alone."),
)  # fmt: skip


def compare_page(result: Mapping[str, Any]) -> str:
    """The page for what ``attnlab compare --json`` prints; docs/reports.md lists the fields of ``result``.

    Opens with the finding in one sentence, then the table, quality against cost, and the error of each head.
    """
    if "rows" not in result:
        raise ValueError("a comparison needs 'rows', one per mechanism; docs/reports.md lists the fields")
    rows = [row for row in result["rows"] if not row.get("refused")]
    model, text = result.get("model") or {}, result.get("text") or {}
    title = f"Attention mechanisms on {model.get('name', 'a model')}"
    body = [
        element("h1", title),
        element("p", finding(result), class_="lead"),
        element("p", str(result.get("introduction", "")), class_="about") if result.get("introduction") else None,
        element(
            "div",
            element("h2", "What you are looking at"),
            element("div", [element("p", paragraph) for paragraph in INTRODUCTION]),
            class_="card teach",
        ),
        section("The mechanisms side by side", *_table(result)),
        section("What quality costs", element("div", _scatters(rows), class_="grid2")) if rows else None,
        _sweeps(result),
        recommendation_section(result.get("recommendation")),
        _layers(result),
        audit_section(result.get("patterns")),
        _maps(result),
        section("How to read the columns", explained(MEANINGS)),
        section("What was run", facts(_facts(result, model, text)), config_list(result.get("config") or {})),
        download_json(
            {k: v for k, v in result.items() if k not in ("maps", "explorer")}, name=str(result.get("name", "compare"))
        ),
    ]
    scripts = ("report.js", "maps.js") if result.get("maps") else ("report.js",)
    return page(title, body, subtitle="comparison", scripts=scripts)


def finding(result: Mapping[str, Any]) -> Html:
    """The numbers in plain words: which mechanism comes closest, which is furthest, and which are exact anyway."""
    rows = [row for row in result["rows"] if not row.get("refused") and not _is_exact(row)]
    distance = _distance_measure(rows)
    measured = [row for row in rows if distance(row) is not None]
    exact = _exact_sentence(result["rows"])
    if not measured:
        if exact:
            return element("span", exact)
        return Html("None of the mechanisms could be compared on this model; the table says why.")
    best = min(measured, key=lambda row: (distance(row), row.get("output_error") or 0.0))
    worst = max(measured, key=distance)
    several = len(measured) > 1
    sentences: list[object] = [
        _mech(best),
        " comes closest to exact attention" if several else " replaces exact attention",
        ": ",
    ]
    sentences += [_stated(best), ".", *_as_close(best, measured)]
    if several and distance(worst) > distance(best):
        sentences += [" ", _mech(worst), " is furthest from it: ", _stated(worst, with_exact=False), "."]
    return element("span", sentences, exact)


def _exact_sentence(rows: Sequence[Row]) -> list[object]:
    """That some mechanisms are exact attention under another name."""
    exact = [row["mechanism"] for row in rows if row.get("exact") and row["mechanism"] != "softmax"]
    if not exact:
        return []
    names = " and ".join(exact)
    return [f" {names} {'give' if len(exact) > 1 else 'gives'} exact attention's own output here, by construction."]


def _as_close(best: Row, rows: Sequence[Row]) -> list[object]:
    """That the text is too short to tell the closest from others, where their intervals overlap."""
    high = (best.get("quality") or {}).get("loss_above_high")
    if high is None:
        return []
    lows = {row["mechanism"]: (row.get("quality") or {}).get("loss_above_low") for row in rows if row is not best}
    alike = [name for name, low in lows.items() if low is not None and low <= high]
    return [f" This text cannot tell it from {' and '.join(alike)}."] if alike else []


def _stated(row: Row, *, with_exact: bool = True) -> str:
    if quality_of(row) is None:
        return f"output error {number(row.get('output_error'))}"
    quality = row["quality"]
    title = quality_title(quality["name"])
    title = title if title.startswith("MLM") else title[:1].lower() + title[1:]
    stated = f"{title} {quality_with_interval(quality)}"
    if not with_exact or quality.get("exact") is None:
        return stated
    exact = {"name": quality["name"], "value": quality["exact"]}
    exact |= {key: quality.get(f"exact_{key}") for key in ("low", "high")}
    return f"{stated}, where exact attention has {quality_with_interval(exact)}"


def _table(result: Mapping[str, Any]) -> list[Html | None]:
    rows = comparison_rows(result)
    title = f"{len(rows)} mechanisms" if len(rows) != 1 else "One mechanism"
    columns = comparison_columns(result, rows)
    return [
        table(rows, name="mechanisms", title=title, columns=columns, note=_note(result)) if rows else None,
        _refused([row for row in result["rows"] if row.get("refused")]),
    ]


def comparison_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the mechanisms' table: those that were measured, with one value in each column."""
    return [_flat(row) for row in result["rows"] if not row.get("refused")]


def comparison_columns(result: Mapping[str, Any], rows: Sequence[Row]) -> list[Column]:
    """The columns of the mechanisms' table that ``rows`` of ``comparison_rows`` have values for."""
    known = _columns([row for row in result["rows"] if not row.get("refused")])
    extra = [c for c in columns_of(rows) if c.key not in {*(c.key for c in known), "refused"}]
    return [c for c in (*known, *extra) if any(row.get(c.key) not in (None, "") for row in rows)]


def _flat(row: Row) -> dict[str, Any]:
    """A row with one value in each column: the errors of readings get columns of their own."""
    by_reading = row.get("reading_errors") or {}
    quality = row.get("quality")
    plain = {key: value for key, value in row.items() if key not in ("reading_errors", "exact")}
    shown = {"quality": quality_of(row)}
    if quality and quality.get("loss_above") is not None:
        shown["loss_above"] = with_interval(*(quality[f"loss_above{p}"] for p in ("", "_low", "_high")), sign=True)
    return plain | shown | {f"{name} error": error for name, error in by_reading.items()}


def _columns(rows: Sequence[Row]) -> list[Column]:
    """The columns of the mechanisms' table; quality is written with its row's interval."""
    axis = quality_axis(rows)
    texts = {quality_of(row): quality_with_interval(row["quality"]) for row in rows if row.get("quality")}
    return [
        Column("mechanism", "Mechanism", show=breakable),
        Column(
            "quality",
            quality_title(str(axis and axis.name)),
            show=lambda value: texts.get(value, MISSING),
            help="with its 95 % interval",
        ),
        Column("loss_above", "Loss above exact", show=str, help="on the same tokens, with its 95 % interval"),
        Column("output_error", "Output error", bar=True),
        Column("score_error", "Score error", bar=True),
        Column("after_projection", "After projection"),
        Column("effective_error", "Effective error"),
        Column("time_ratio", "Model time", show=times, help="of the model's forward pass, relative to softmax"),
        Column("attention_time_ratio", "Attention time", show=times, help="of one layer, relative to softmax"),
        Column("memory_ratio", "Attention memory", show=times, help="peak of one layer, relative to softmax"),
    ]


def _note(result: Mapping[str, Any]) -> str:
    share = result.get("ranking_differs")
    values = (
        "" if share is None else f" For {share:.0%} of the queries the nearest value is not the heaviest (OVA, Eq. 3)."
    )
    warnings = "".join(f" Warning: {warning}." for warning in result.get("warnings", []))
    exact = "".join(map(str, _exact_sentence(result["rows"])))
    cost = f"{exact} No time or memory is shown for that." if exact else ""
    return f"Click a heading to sort by it.{_how_much(result)}{values}{cost}{warnings}"


def _how_much(result: Mapping[str, Any]) -> str:
    """How much text the numbers are about, and why not more; that the comparison was stopped, where it was."""
    text, over = result.get("text") or {}, result.get("errors_over")
    read = f" The model read {text['tokens']:,} tokens ({text['why']})." if "why" in text else ""
    if over:
        read += f" Errors are over {over['queries']} queries in each of {over['windows']} windows of {over['tokens']}."
    asked = len((result.get("config") or {}).get("mechanisms", ()))
    stopped = f" Stopped early: {len(result['rows'])} of {asked} mechanisms." if len(result["rows"]) < asked else ""
    return read + stopped


def _refused(rows: Sequence[Row]) -> Html | None:
    if not rows:
        return None
    listed = [(str(row["mechanism"]), str(row["refused"])) for row in rows]
    return element("div", element("h3", "Could not be used here"), explained(listed), class_="refused")


def _scatters(rows: Sequence[Row]) -> list[Html]:
    axis = quality_axis(rows)
    timed = [row for row in rows if row.get("time_ratio")]
    charts = [_quality_and_time(timed, axis)] if axis and timed else []
    known = [row for row in rows if row.get("output_error") is not None]
    both = [row for row in known if row.get("score_error") is not None]
    if both:
        charts.append(_score_and_output(both))
    elif known and not charts:
        bars = [(row["mechanism"], row["output_error"]) for row in known]
        charts.append(
            bar_chart(bars, name="output-error", title="Output error", x_label="relative to the exact output")
        )
    return charts


def _quality_and_time(timed: Sequence[Row], axis: QualityAxis) -> Html:
    points = [
        Point(row["mechanism"], row["time_ratio"], quality_of(row) * axis.factor) for row in timed if row.get("quality")
    ]
    return scatter_chart(
        points,
        name="quality-and-time",
        title="Quality against time",
        x_label="time relative to softmax",
        y_label=axis.label,
        axes=Axes(log_x=True, log_y=axis.is_log([p.y for p in points]), reference=axis.reference),
        note="Lower is closer to the exact model; further left is faster.",
    )


def _score_and_output(rows: Sequence[Row]) -> Html:
    return scatter_chart(
        [Point(row["mechanism"], row["score_error"], row["output_error"]) for row in rows],
        name="score-and-output-error",
        title="Output error against score error",
        x_label="score error",
        y_label="output error",
        note="A point at the bottom right has wrong weights and a right output: the values make up for it.",
    )


def _sweeps(result: Mapping[str, Any]) -> Html | None:
    sweeps = result.get("sweeps")
    if not sweeps:
        return None
    charts = [_quality_sweep(sweeps, quality_axis(result["rows"])), _error_sweep(sweeps)]
    about = "Each mechanism may use r keys per query; more keys cost more and come closer to exact attention."
    notes = [element("p", note, class_="about") for note in result.get("sweep_notes", [])]
    return section("How many keys are enough", element("div", charts, class_="grid2"), *notes, about=about)


def _quality_sweep(sweeps: Mapping[str, Sequence[Row]], axis: QualityAxis | None) -> Html | None:
    series = _sweep_series(sweeps, "quality", factor=1 if axis is None else axis.factor)
    if not series:
        return None
    # Without any quality in the rows the values are drawn as they are.
    axis = axis or QualityAxis("quality", None)
    values = [v for s in series for v in s.y if v is not None]
    return line_chart(
        series,
        name="sweep-quality",
        title=f"{quality_title(axis.name)} against the number of keys",
        x_label="keys per query, r",
        y_label=axis.label,
        axes=Axes(log_x=True, log_y=axis.is_log(values), reference=axis.reference),
    )


def _error_sweep(sweeps: Mapping[str, Sequence[Row]]) -> Html | None:
    series = _sweep_series(sweeps, "output_error")
    if not series:
        return None
    return line_chart(
        series,
        name="sweep-output-error",
        title="Output error against the number of keys",
        x_label="keys per query, r",
        y_label="Output error",
        axes=Axes(log_x=True),
    )


def _sweep_series(sweeps: Mapping[str, Sequence[Row]], key: str, *, factor: int = 1) -> list[Series]:
    """One line per mechanism: ``factor`` times the value at ``key``, over r."""
    series = []
    for i, (family, rows) in enumerate(sweeps.items()):
        points = sorted((row["r"], row[key] * factor) for row in rows if row.get(key) is not None)
        if points:
            series.append(Series(family, [r for r, _ in points], [v for _, v in points], colour=i, marked=True))
    return series


def _layers(result: Mapping[str, Any]) -> Html | None:
    layers = {spec: grid for spec, grid in (result.get("layers") or {}).items() if grid and spec != "softmax"}
    if not layers:
        return None
    values = [v for grid in layers.values() for row in grid for v in row if v is not None]
    heat = heat_maps(
        layers,
        name="output-error-by-head",
        title="Output error of each head",
        high=min(max(values, default=1.0), 1.0) or 1.0,
        note="Rows are layers from the input up, columns are heads. The scale's first step is exact, its last an error "
        "of that size or more.",
    )
    about = "A mechanism need not be used everywhere: some heads take it without harm, others do not."
    return section("Where the error sits", heat, about=about)


def _maps(result: Mapping[str, Any]) -> Html | None:
    maps = result.get("maps")
    if not maps:
        return None
    tokens = result.get("tokens", maps.get("tokens"))
    if tokens is None:
        raise ValueError("attention maps need their 'tokens', one string per position")
    maps = {name: values for name, values in maps.items() if name != "tokens"}
    about = (
        "The weights of every head on one piece of the text. Blue is weight; where weights can be negative, blue is "
        "below zero and orange above."
    )
    closer = None
    if result.get("explorer"):
        link = element("a", "the same attention in the explorer", href=str(result["explorer"]))
        closer = element("p", "Look closer: ", link, ".")
    return section("Attention maps", map_viewer(tokens, maps), closer, about=about)


def _facts(result: Mapping[str, Any], model: Row, text: Row) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for kind, fields in (("Model", model), ("Text", text)):
        for key, value in fields.items():
            label = kind if key == "name" else f"{kind}: {key.replace('_', ' ')}"
            pairs.append((label, number(value) if isinstance(value, (int, float)) else value))
    return pairs + provenance_facts(result)


def _distance_measure(rows: Sequence[Row]) -> Callable[[Row], Any]:
    """How far a row is from exact attention: by quality where any row has it, by the output error otherwise."""
    if any(quality_of(row) is not None for row in rows):
        return _distance
    return lambda row: row.get("output_error")


def _distance(row: Row) -> Any:
    """How far quality is from the exact model's: better by chance is as far as worse."""
    value, exact = quality_of(row), (row.get("quality") or {}).get("exact")
    return value if value is None or exact is None else abs(value - exact)


def _is_exact(row: Row) -> bool:
    return bool(row["mechanism"] == "softmax" or row.get("exact"))


def _mech(row: Row) -> Html:
    return element("strong", row["mechanism"])
