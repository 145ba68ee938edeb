"""The page of ``attnlab compare`` and ``attnlab demo``: mechanisms in a model's attention, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from attnlab.pages.audit import audit_section
from attnlab.pages.charts import Point, Series, bar_chart, heat_maps, line_chart, scatter_chart
from attnlab.pages.fragments import config_list, download_json, explained, facts, provenance_facts, section
from attnlab.pages.html import Html, breakable, element, page
from attnlab.pages.maps import map_viewer
from attnlab.pages.numbers import MISSING, TIMES, number
from attnlab.pages.recommend import recommendation_section
from attnlab.pages.tables import Column, columns_of, table

__all__ = ["compare_page", "finding"]

Row = Mapping[str, Any]

QUALITY = {"perplexity": "Perplexity", "mlm_error": "MLM error"}
TEACH = (
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
    demo = result.get("name") == "demo"
    model, text = result.get("model") or {}, result.get("text") or {}
    name = str(model.get("name", "a model"))
    title = "What attention can be replaced by" if demo else f"Attention mechanisms on {name}"
    body = [
        element("h1", title),
        element("p", finding(result), class_="lead"),
        element("p", str(result.get("introduction", "")), class_="about") if result.get("introduction") else None,
        element(
            "div",
            element("h3", "What you are looking at"),
            element("div", [element("p", t) for t in TEACH]),
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
    return page(title, body, subtitle="demo" if demo else "comparison", scripts=scripts)


def finding(result: Mapping[str, Any]) -> Html:
    """The numbers in plain words: which mechanism comes closest, which is furthest, and which error foresaw it."""
    rows = [row for row in result["rows"] if not row.get("refused") and not _is_exact(row)]
    measure = _measure(rows)
    judged = [row for row in rows if measure(row) is not None]
    if not judged:
        return Html("None of the mechanisms could be compared on this model; the table says why.")
    best, worst = min(judged, key=lambda row: (measure(row), row.get("output_error") or 0.0)), max(judged, key=measure)
    told = [_mech(best), " comes closest to exact attention" if len(judged) > 1 else " replaces exact attention", ": "]
    told += [_stated(best), "."]
    if len(judged) > 1 and measure(worst) > measure(best):
        told += [" ", _mech(worst), " is furthest from it: ", _stated(worst, against=False), "."]
    return element("span", told, _foresight(judged))


def _foresight(rows: Sequence[Row]) -> list[object]:
    """Which error orders the mechanisms as their quality does: the share of pairs that agree (ties left out)."""
    if any(_quality(row) is None for row in rows) or len(rows) < 3:
        return []
    shares = {}
    for key in ("output_error", "score_error"):
        pairs = [
            (_distance(a) - _distance(b)) * (a[key] - b[key])
            for a, b in combinations([row for row in rows if row.get(key) is not None], 2)
        ]
        decided = [p for p in pairs if p != 0]
        if not decided:
            return []
        shares[key] = (sum(p > 0 for p in decided), len(decided))
    out, score = shares["output_error"], shares["score_error"]
    return [
        f" The output error orders {out[0]} of {out[1]} pairs of mechanisms as the model's quality does, "
        f"the score error {score[0]} of {score[1]}."
    ]


def _stated(row: Row, *, against: bool = True) -> str:
    if _quality(row) is None:
        return f"output error {number(row.get('output_error'))}"
    quality = row["quality"]
    name = QUALITY.get(quality["name"], quality["name"])
    name = name if name.startswith("MLM") else name[:1].lower() + name[1:]
    told = f"{name} {_shown(quality['name'], quality['value'])}"
    if not against or quality.get("exact") is None:
        return told
    return f"{told}, where exact attention has {_shown(quality['name'], quality['exact'])}"


def _table(result: Mapping[str, Any]) -> list[Html | None]:
    ran = [row for row in result["rows"] if not row.get("refused")]
    name = next((row["quality"]["name"] for row in ran if row.get("quality")), None)
    flat = [{**row, "quality": _quality(row)} for row in ran]
    columns = [
        Column("mechanism", "Mechanism", show=breakable),
        Column(
            "quality", QUALITY.get(str(name), str(name)), best="low", show=_percent if name == "mlm_error" else number
        ),
        Column("output_error", "Output error", bar=True),
        Column("score_error", "Score error", bar=True),
        Column("after_projection", "After projection"),
        Column("effective_error", "Effective error"),
        Column("time_ratio", "Model time", show=_times, help="of the model's forward pass, relative to softmax"),
        Column("attention_time_ratio", "Attention time", show=_times, help="of one layer, relative to softmax"),
        Column("memory_ratio", "Attention memory", show=_times, help="peak of one layer, relative to softmax"),
    ]
    known = {*(c.key for c in columns), "refused"}
    extra = [c for c in columns_of(flat) if c.key not in known]
    used = [c for c in (*columns, *extra) if any(row.get(c.key) not in (None, "") for row in flat)]
    title = f"{len(ran)} mechanisms" if len(ran) != 1 else "One mechanism"
    return [
        table(flat, name="mechanisms", title=title, columns=used, note=_note(result)) if ran else None,
        _refused([row for row in result["rows"] if row.get("refused")]),
    ]


def _note(result: Mapping[str, Any]) -> str:
    share = result.get("ranking_differs")
    values = (
        "" if share is None else f" For {share:.0%} of the queries the nearest value is not the heaviest (OVA, Eq. 3)."
    )
    return f"Click a heading to sort by it.{values}"


def _refused(rows: Sequence[Row]) -> Html | None:
    if not rows:
        return None
    listed = [(str(row["mechanism"]), str(row["refused"])) for row in rows]
    return element("div", element("h3", "Could not be used here"), explained(listed), class_="refused")


def _scatters(rows: Sequence[Row]) -> list[Html]:
    charts = []
    timed = [row for row in rows if row.get("time_ratio")]
    quality = next((row["quality"] for row in rows if row.get("quality")), None)
    if quality and timed:
        percent = 100 if quality["name"] == "mlm_error" else 1
        label = QUALITY.get(quality["name"], quality["name"]) + (" in %" if percent == 100 else "")
        points = [
            Point(row["mechanism"], row["time_ratio"], _quality(row) * percent) for row in timed if row.get("quality")
        ]
        values = [p.y for p in points]
        charts.append(
            scatter_chart(
                points,
                name="quality-and-time",
                title="Quality against time",
                x_label="time relative to softmax",
                y_label=label,
                log_x=True,
                log_y=bool(values) and percent == 1 and max(values) > 8 * min(values) > 0,
                reference=("exact attention", quality["exact"] * percent) if quality.get("exact") is not None else None,
                note="Lower is closer to the exact model; further left is faster.",
            )
        )
    both = [row for row in rows if row.get("output_error") is not None and row.get("score_error") is not None]
    if both:
        charts.append(
            scatter_chart(
                [Point(row["mechanism"], row["score_error"], row["output_error"]) for row in both],
                name="score-and-output-error",
                title="Output error against score error",
                x_label="score error",
                y_label="output error",
                note="A point at the bottom right has wrong weights and a right output: the values make up for it.",
            )
        )
    elif not charts and any(row.get("output_error") is not None for row in rows):
        bars = [(row["mechanism"], row["output_error"]) for row in rows if row.get("output_error") is not None]
        charts.append(
            bar_chart(bars, name="output-error", title="Output error", x_label="relative to the exact output")
        )
    return charts


def _sweeps(result: Mapping[str, Any]) -> Html | None:
    sweeps = result.get("sweeps")
    if not sweeps:
        return None
    quality = next((row["quality"] for row in result["rows"] if row.get("quality")), None)
    percent = 100 if quality and quality["name"] == "mlm_error" else 1
    label = QUALITY.get(quality["name"], quality["name"]) if quality else "quality"
    charts = []
    for key, title, factor in (("quality", label, percent), ("output_error", "Output error", 1)):
        series = []
        for i, (family, rows) in enumerate(sweeps.items()):
            found = sorted((row["r"], row[key] * factor) for row in rows if row.get(key) is not None)
            if found:
                series.append(Series(family, [r for r, _ in found], [v for _, v in found], colour=i, marked=True))
        if not series:
            continue
        exact = quality.get("exact") if quality and key == "quality" else None
        values = [v for s in series for v in s.y if v is not None]
        charts.append(
            line_chart(
                series,
                name=f"sweep-{key.replace('_', '-')}",
                title=f"{title} against the number of keys",
                x_label="keys per query, r",
                y_label=title + (" in %" if factor == 100 else ""),
                log_x=True,
                log_y=factor == 1 and key == "quality" and max(values) > 8 * min(values) > 0,
                reference=("exact attention", exact * factor) if exact is not None else None,
            )
        )
    about = "Each mechanism may use r keys per query; more keys cost more and come closer to exact attention."
    notes = [element("p", note, class_="about") for note in result.get("sweep_notes", [])]
    return section("How many keys are enough", element("div", charts, class_="grid2"), *notes, about=about)


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
    )
    about += "below zero and orange above."
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


def _measure(rows: Sequence[Row]) -> Any:
    if any(_quality(row) is not None for row in rows):
        return _distance
    return lambda row: row.get("output_error")


def _distance(row: Row) -> Any:
    """How far quality is from the exact model's: better by chance is as far as worse."""
    value, exact = _quality(row), (row.get("quality") or {}).get("exact")
    return value if value is None or exact is None else abs(value - exact)


def _quality(row: Row) -> Any:
    return (row.get("quality") or {}).get("value")


def _is_exact(row: Row) -> bool:
    return row["mechanism"] == "softmax"


def _mech(row: Row) -> Html:
    return element("strong", row["mechanism"])


def _shown(name: str, value: float) -> str:
    return _percent(value) if name == "mlm_error" else number(value)


def _percent(value: Any) -> str:
    return MISSING if value is None else f"{100 * value:.1f} %"


def _times(value: Any) -> str:
    return MISSING if value is None else f"{number(value)} {TIMES}"
