"""The figures of Effective from papers/results/effective.json, on one page: ours, standard beside effective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlab.pages import Html, Series, bar_chart, element, heat_maps, line_chart, page, table
from attnlab.provenance import write_atomic

__all__ = ["figures_page", "write_figures"]

Row = Mapping[str, Any]
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
        ("lengths", "Inputs on which nothing can differ"),
        ("timing", "Table 3: time of an evaluation"),
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


def write_figures(result: Mapping[str, Any], out: Path | str) -> Path:
    """Write ``figures_page``."""
    return write_atomic(out, figures_page(result))


def _task(task: str, tables: Mapping[str, list[Row]]) -> Iterable[Html]:
    mine = {name: [row for row in rows if row.get("task") == task] for name, rows in tables.items()}
    if mine.get("token_types"):
        bars = [(f"{row['token']}, {row['attention']}", row["weight"]) for row in _sorted(mine["token_types"])]
        yield bar_chart(
            bars, name=f"figure_1_{task}", title=f"Figure 1, {task}: weight in the last layer", x_label="weight"
        )
    if mine.get("finetuning_heads"):
        grids: dict[str, Sequence[Sequence[float | None]]] = {
            kind: _grid(mine["finetuning_heads"], kind) for kind in ("standard", "effective")
        }
        yield heat_maps(grids, name=f"figure_3_{task}", title=f"Figure 3, {task}: similarity to the pretrained maps")
    if mine.get("figure_4"):
        yield from (_figure_4(task, mine["figure_4"], kind) for kind in ("standard", "effective"))
    if mine.get("to_token_layers"):
        lines = _lines(mine["to_token_layers"], ("token", "attention"), "weight")
        title = f"Figures 5 and 6, {task}: weight that other tokens give to [CLS] and [SEP]"
        yield line_chart(lines, name=f"figure_5_{task}", title=title, x_label="layer", y_label="weight")
    yield from _faithfulness(task, mine.get("faithfulness", []))


def _figure_4(task: str, rows: list[Row], kind: str) -> Html:
    mine = [row for row in rows if row["attention"] == kind]
    lines = [
        Series(name, [r["layer"] for r in mine], [r[name] for r in mine], colour=i) for i, name in enumerate(PATTERNS)
    ]
    title = f"Figure 4, {task}: patterns of {kind} attention"
    return line_chart(lines, name=f"figure_4_{kind}_{task}", title=title, x_label="layer", y_label="% of maps")


def _faithfulness(task: str, rows: list[Row]) -> Iterable[Html]:
    for against in ("head output", "prediction"):
        mine = [row for row in rows if row["against"] == against and row["layer"] != "all"]
        if mine:
            lines = _lines(mine, ("reading",), "spearman", intervals=True)
            title = f"{task}: does a reading say what hiding a key changes in the {against}?"
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
            [row["layer"] for row in mine],
            [row[value] for row in mine],
            low=[row[f"{value}_low"] for row in mine] if intervals else None,
            high=[row[f"{value}_high"] for row in mine] if intervals else None,
            colour=i,
        )
        for i, (name, mine) in enumerate(by_name.items())
    ]


def _sorted(rows: list[Row]) -> list[Row]:
    return sorted((row for row in rows if row["attention"] != "authors"), key=lambda row: row["token"])


def _grid(rows: list[Row], kind: str) -> list[list[float | None]]:
    by_layer: dict[int, list[float | None]] = {}
    for row in rows:
        if row["attention"] == kind:
            by_layer.setdefault(row["layer"], []).append(row["similarity"])
    return [by_layer[layer] for layer in sorted(by_layer)]
