"""The figures of Effective from papers/results/effective.json on one page, standard beside effective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attnlab.pages import Html, Series, bar_chart, element, heat_maps, line_chart, page, table

__all__ = ["figures_page"]

Row = Mapping[str, Any]
READINGS = ("standard", "effective")
PATTERNS = ("block", "diagonal", "vertical_diagonal", "heterogeneous", "vertical")


def figures_page(result: Mapping[str, Any]) -> str:
    """Tables 2 and 3 and Figures 1, 3, 4, 5, 6, and the study of faithfulness, for what the result holds."""
    tables: Mapping[str, list[Row]] = result["tables"]
    notes: Mapping[str, str] = result.get("notes", {})
    body: list[Html] = [element("h1", "Effective attention")]
    shown = (
        ("table_2", "Table 2: patterns (%)"),
        ("artefact", "How much of Table 2 is padding inside V (percentage points)"),
        ("segments", "Blocks where the segments are known"),
        ("lengths", "Inputs on which the two cannot differ"),
        ("table_3", "Table 3: time of an evaluation of the dev set"),
        ("timing", "Table 3: time of an evaluation batch"),
        ("identity", "The identity"),
        ("short_inputs", "Short inputs"),
        ("alternative", "Appendix A: other distributions with the same output"),
        ("scores", "Fine-tuning"),
    )
    body += [
        table(tables[name], name=name, title=title, note=notes.get(name, "")) for name, title in shown if name in tables
    ]
    tasks = list(dict.fromkeys(row["task"] for row in tables.get("table_2", tables.get("token_types", []))))
    for task in tasks:
        body.append(element("h2", task))
        body.append(element("div", list(_task(task, tables)), class_="grid2"))
    return page("Effective attention", body, subtitle="reproduction")


def _task(task: str, tables: Mapping[str, list[Row]]) -> Iterable[Html]:
    """The figures of one task."""
    of_task = {name: [row for row in rows if row.get("task") == task] for name, rows in tables.items()}
    yield from _figure_1(task, of_task)
    if of_task.get("finetuning_heads"):
        grids = {kind: _grid(of_task["finetuning_heads"], "similarity", attention=kind) for kind in READINGS}
        yield heat_maps(grids, name=f"figure_3_{task}", title=f"Figure 3, {task}: similarity to the pretrained maps")
    if of_task.get("figure_4"):
        yield from (_figure_4(task, of_task["figure_4"], kind) for kind in READINGS)
    yield from _figures_5_and_6(task, of_task)
    yield from _faithfulness(task, of_task.get("faithfulness", []))


def _figure_1(task: str, of_task: Mapping[str, list[Row]]) -> Iterable[Html]:
    """The weight of each token type when [CLS] is processed in the last layer, by head and averaged over heads."""
    if of_task.get("token_types_heads"):
        rows = of_task["token_types_heads"]
        tokens = sorted({row["token"] for row in rows})
        grids = {
            kind: [
                [row["weight"] for row in rows if (row["token"], row["attention"]) == (token, kind)] for token in tokens
            ]
            for kind in READINGS
        }
        note = "Token types: " + ", ".join(f"{i} {token}" for i, token in enumerate(tokens)) + "."
        title = f"Figure 1, {task}: weight of each head of the last layer"
        yield heat_maps(grids, name=f"figure_1_{task}", title=title, rows="token type", note=note)
    if of_task.get("token_types"):
        bars = [(f"{row['token']}, {row['attention']}", row["weight"]) for row in _sorted(of_task["token_types"])]
        title = f"Figure 1, {task}: weight in the last layer, mean over heads"
        yield bar_chart(bars, name=f"figure_1_mean_{task}", title=title, x_label="weight")


def _figures_5_and_6(task: str, of_task: Mapping[str, list[Row]]) -> Iterable[Html]:
    """The weight that other tokens give to [CLS] and to [SEP], by layer and head and averaged over heads.

    The colours of standard attention run from 0 to 1; those of effective attention, which has no fixed range, from the
    least to the largest of all its weights in the task, as in the paper.
    """
    ranges = {row["attention"]: (row["least"], row["largest"]) for row in of_task.get("weight_range", [])}
    for number, token in ((5, "cls"), (6, "sep")):
        for kind in READINGS if of_task.get("to_token_heads") else ():
            grid = _grid(of_task["to_token_heads"], "weight", attention=kind, token=token)
            low, high = ranges[kind] if kind == "effective" else (0.0, 1.0)
            title = f"Figure {number}, {task}: weight that other tokens give to [{token.upper()}], {kind}"
            yield heat_maps({kind: grid}, name=f"figure_{number}_{kind}_{task}", title=title, low=low, high=high)
    if of_task.get("to_token_layers"):
        lines = _lines(of_task["to_token_layers"], ("token", "attention"), "weight")
        title = f"Figures 5 and 6, {task}: weight that other tokens give to [CLS] and [SEP], mean over heads"
        yield line_chart(lines, name=f"figure_5_{task}", title=title, x_label="layer", y_label="weight")


def _figure_4(task: str, rows: list[Row], kind: str) -> Html:
    layers = [row for row in rows if row["attention"] == kind]
    lines = [
        Series(name, [row["layer"] for row in layers], [row[name] for row in layers], colour=i)
        for i, name in enumerate(PATTERNS)
    ]
    title = f"Figure 4, {task}: patterns of {kind} attention"
    return line_chart(lines, name=f"figure_4_{kind}_{task}", title=title, x_label="layer", y_label="% of maps")


def _faithfulness(task: str, rows: list[Row]) -> Iterable[Html]:
    for against in ("head output", "prediction"):
        layers = [row for row in rows if row["against"] == against and row["layer"] != "all"]
        if layers:
            lines = _lines(layers, ("reading",), "spearman", intervals=True)
            title = f"{task}: does a reading predict what hiding a key changes in the {against}?"
            name = f"faithfulness_{against.split()[0]}_{task}"
            yield line_chart(lines, name=name, title=title, x_label="layer", y_label="Spearman's correlation")


def _lines(rows: list[Row], names: tuple[str, ...], value: str, *, intervals: bool = False) -> list[Series]:
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("attention") != "authors" and row[value] is not None:
            by_name.setdefault(", ".join(str(row[name]) for name in names), []).append(row)
    return [
        Series(
            name,
            [row["layer"] for row in layers],
            [row[value] for row in layers],
            low=[row[f"{value}_low"] for row in layers] if intervals else None,
            high=[row[f"{value}_high"] for row in layers] if intervals else None,
            colour=i,
        )
        for i, (name, layers) in enumerate(by_name.items())
    ]


def _sorted(rows: list[Row]) -> list[Row]:
    return sorted((row for row in rows if row["attention"] != "authors"), key=lambda row: row["token"])


def _grid(rows: list[Row], value: str, **labels: str) -> list[list[float | None]]:
    """The values of the rows with these labels, a line for each layer and a column for each head."""
    by_layer: dict[int, list[float | None]] = {}
    for row in rows:
        if all(row[name] == label for name, label in labels.items()):
            by_layer.setdefault(row["layer"], []).append(row[value])
    return [by_layer[layer] for layer in sorted(by_layer)]
