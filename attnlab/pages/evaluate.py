"""The page of ``attnlab evaluate``: one table of scores with intervals, and needles by length and depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnlab.pages.fragments import config_list, download_json, explained, facts, provenance_facts, section
from attnlab.pages.heatmaps import heat_maps
from attnlab.pages.html import Html, element, page
from attnlab.pages.numbers import MISSING, number, with_interval
from attnlab.pages.tables import Column, table

__all__ = ["evaluate_page", "evaluation_columns", "evaluation_table"]

Row = Mapping[str, Any]
MEANINGS = (
    ("loss", "Nats a token of the text, over windows; perplexity is its exponential. Lower is better."),
    ("over own", "How much more loss than with the model's own attention on the same windows, with its interval."),
    ("lambada", "The share of passages whose last word the model would write (lm-eval's lambada_openai)."),
    ("needle and other generated tasks", "The share of answers that the model's text contains, by prompt length, after "
     "RULER's definitions."),
    ("[low, high]", "A 95 % interval: Wilson's for shares, Student's over windows for losses. Numbers without one come "
     "from a single measurement."),
)  # fmt: skip
OF_TASKS = ("loss", "over own", "lambada")
# Tasks of depth, most of them in one heat map.
DEPTHS = 8


def evaluate_page(result: Mapping[str, Any]) -> str:
    """The page for what ``attnlab evaluate --json`` prints."""
    model = result.get("model") or {}
    name = str(model.get("name", "a model"))
    title = f"{name} under other kinds of attention"
    rows = [row for row in result["rows"] if not row.get("refused")]
    body = [
        element("h1", title),
        element("p", _lead(rows), class_="lead"),
        section("Scores", _scores(result), _refused(result["rows"])),
        _needles(rows),
        section("How to read the columns", explained(_meanings(result))),
        section("What was run", facts(_facts(result, model)), config_list(result.get("config") or {})),
        download_json(dict(result), name="evaluate"),
    ]
    return page(title, body, subtitle="evaluation")


def _meanings(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is said about the columns; of a task that was not run nothing."""
    columns = evaluation_columns(result)
    return [(name, text) for name, text in MEANINGS if name in columns or name not in OF_TASKS]


def evaluation_columns(result: Mapping[str, Any]) -> dict[str, Callable[[Row], str]]:
    """The columns of the table: a title, and what a row shows there."""
    tasks = list(dict.fromkeys(task for row in result["rows"] for task in row["tasks"]))
    columns: dict[str, Callable[[Row], str]] = {}
    for task in tasks:
        if task == "loss":
            columns["loss"] = lambda row: _shown(row["tasks"].get("loss"), "loss")
            columns["over own"] = lambda row: _difference(row["tasks"].get("loss"))
            columns["perplexity"] = lambda row: number((row["tasks"].get("loss") or {}).get("perplexity"))
        else:
            columns[task] = lambda row, task=task: _main_score(row["tasks"].get(task))  # type: ignore[misc]
    columns["seconds"] = lambda row: number(row.get("seconds"))
    return columns


def evaluation_table(result: Mapping[str, Any], *, seconds: bool = True) -> list[dict[str, str]]:
    """The table as its cells are written; a document shows it without the ``seconds`` of one machine."""
    columns = {title: cell for title, cell in evaluation_columns(result).items() if seconds or title != "seconds"}
    rows = [row for row in result["rows"] if not row.get("refused")]
    return [{"attention": row["subject"], **{title: cell(row) for title, cell in columns.items()}} for row in rows]


def _main_score(task: Mapping[str, Any] | None) -> str:
    for name in ("recall", "acc"):
        if task is not None and name in task:
            return _shown(task, name)
    known = [value for key, value in (task or {}).items() if isinstance(value, float) and key not in ("low", "high")]
    return number(known[0]) if known else MISSING


def _shown(task: Mapping[str, Any] | None, name: str) -> str:
    return MISSING if task is None else with_interval(task[name], task.get("low"), task.get("high"))


def _difference(task: Mapping[str, Any] | None) -> str:
    over = None if task is None else task.get("over_own")
    if over is None:
        return MISSING
    return with_interval(over["value"], over["low"], over["high"], sign=True)


def _lead(rows: Sequence[Row]) -> str:
    """The subject whose loss is nearest to that of the model's own attention, in one sentence."""
    if not rows:
        return "Nothing could be measured; the table says why."
    own = rows[0]["tasks"]
    others = [row for row in rows[1:] if (row["tasks"].get("loss") or {}).get("over_own")]
    if not others:
        scores = [f"{task} {_shown(own[task], 'loss') if task == 'loss' else _main_score(own[task])}" for task in own]
        return f"With its own attention the model has {', '.join(scores)}."
    best = min(others, key=lambda row: row["tasks"]["loss"]["over_own"]["value"])
    kept = [f"{task} {_plain(best['tasks'][task])} (own: {_plain(own[task])})" for task in own if task != "loss"]
    return (
        f"Nearest in loss to the model's own attention is {best['subject']}: {_difference(best['tasks']['loss'])} nats "
        f"a token{'; ' + ', '.join(kept) if kept else ''}."
    )


def _plain(task: Mapping[str, Any]) -> str:
    """A task's score without its interval."""
    return _main_score(task).partition(" [")[0]


def _scores(result: Mapping[str, Any]) -> Html:
    headings = [Column("attention"), *(Column(title, title, show=str) for title in evaluation_columns(result))]
    return table(evaluation_table(result), name="scores", title="Scores, with 95 % intervals", columns=headings)


def _refused(rows: Sequence[Row]) -> Html | None:
    refused = [row for row in rows if row.get("refused")]
    if not refused:
        return None
    return element(
        "ul", [element("li", element("code", row["subject"]), f" was refused: {row['refused']}") for row in refused]
    )


def _needles(rows: Sequence[Row]) -> Html | None:
    """For each subject a map of length and depth: the share of needles found."""
    lengths = [task for task in (rows[0]["tasks"] if rows else ()) if task.split()[0] == "needle" and " " in task]
    if not lengths:
        return None
    cases = {task: rows[0]["tasks"][task]["cases"] for task in lengths}
    bins = min(DEPTHS, *(len(each) for each in cases.values()))
    grids = {row["subject"]: [_by_depth(row["tasks"][task]["cases"], bins) for task in lengths] for row in rows}
    return section(
        "Needles by length and depth",
        heat_maps(
            grids,
            name="needles",
            title="Share of needles found",
            note="Rows: tokens of the prompt. Columns: where the needle stands, from the beginning of the text (0) on.",
            rows="length",
            columns="depth",
            row_names=[task.split()[1] for task in lengths],
            low=0.0,
            high=1.0,
        ),
    )


def _by_depth(cases: Sequence[Mapping[str, Any]], bins: int) -> list[float | None]:
    cells: list[list[float]] = [[] for _ in range(bins)]
    for case in cases:
        cells[min(bins - 1, int(case["depth"] * bins))].append(case["recall"])
    return [sum(cell) / len(cell) if cell else None for cell in cells]


def _facts(result: Mapping[str, Any], model: Mapping[str, Any]) -> list[tuple[str, object]]:
    return [
        ("Model", model.get("name")),
        ("Parameters", f"{model.get('parameters', 0):,}"),
        ("Type of numbers", model.get("dtype")),
        *provenance_facts(result),
    ]
