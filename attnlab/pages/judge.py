"""The page of ``attnlab judge``: score against bytes for every task and length, and one table of everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnlab.pages.charts import Axes, Series, line_chart
from attnlab.pages.fragments import config_list, download_json, explained, facts, provenance_facts, section
from attnlab.pages.html import Html, element, page
from attnlab.pages.numbers import MISSING, number, percent, times, with_interval
from attnlab.pages.tables import Column, table

__all__ = ["CANNOT_EITHER", "judge_page", "judge_table"]

Row = Mapping[str, Any]
FULL = "full cache"
CANNOT_EITHER = "the full cache cannot do this either"
COLUMNS = {"unseen": "question unseen", "seen": "question seen"}
LOSS = "loss"
MEANINGS = (
    ("question unseen", "The context is compressed before the question is read: the cache must serve any question."),
    ("question seen", "The question is read with the context, all but its last token, before the cache is compressed."),
    ("score", "The share of answers that the model's text contains, after RULER; for lambada the share of passages "
     "whose last word is the most probable one. For loss, nats a token of a continuation: lower is better."),
    ("over full", "The difference from the full cache on the same cases, with a paired bootstrap interval."),
    ("bytes", "What the cache really holds after compression, as a share of the full cache's bytes."),
    ("reading", "Seconds to read the context and compress it, over the seconds to read it."),
    ("a token", "Seconds of a decoding step over those of the full cache's, in the first batch of each length."),
    ("[low, high]", "A 95 % interval: Wilson's for shares, Student's for losses."),
)  # fmt: skip


def judge_page(result: Mapping[str, Any]) -> str:
    """The page for what ``attnlab judge --json`` prints."""
    model = result.get("model") or {}
    title = f"Cache policies on {model.get('name', 'a model')}"
    rows = result["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    body = [
        element("h1", title),
        element("p", _lead(rows), class_="lead"),
        [_task_section(task, [row for row in rows if row["task"] == task]) for task in tasks],
        section("All scores", _scores(rows), _refused(rows)),
        section("How to read the columns", explained(MEANINGS)),
        section("What was run", facts(_facts(result, model)), config_list(result.get("config") or {})),
        download_json(dict(result), name="judge"),
    ]
    return page(title, body, subtitle="judge of caches")


def judge_table(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """The table as its cells are written, without the times of one machine."""
    return [
        {
            "task": row["task"],
            "length": number(row["length"]),
            "policy": row["policy"],
            "budget": percent(row["budget"]),
            **{cell: text for column in COLUMNS for cell, text in _column_cells(row, column).items()},
            "bytes": percent(row["bytes_ratio"]),
            "note": _note(row),
        }
        for row in result["rows"]
    ]


def _column_cells(row: Row, column: str) -> dict[str, str]:
    scores = row.get(column) or {}
    over = scores.get("over_full")
    is_full = row["policy"] == FULL
    shown = MISSING
    if over is not None and over["value"] is not None:
        shown = "0" if is_full else with_interval(over["value"], over["low"], over["high"], sign=True)
    return {column: _shown(scores), f"{column}, over full": shown}


def _shown(scores: Mapping[str, Any]) -> str:
    return with_interval(scores["score"], scores["low"], scores["high"]) if "score" in scores else MISSING


def _note(row: Row) -> str:
    columns = [name for name in COLUMNS if row.get(name)]
    refused = [row[name]["refused"] for name in columns if "refused" in row[name]]
    if refused:
        return "refused"
    cannot = [COLUMNS[name] for name in columns if row[name].get("full_cannot")]
    both = len(cannot) == len(columns)
    return f"{CANNOT_EITHER}{'' if both else f' ({cannot[0]})'}" if cannot else ""


def _lead(rows: Sequence[Row]) -> str:
    """The policy that is best at the smallest budget, on the tasks that the full cache can do."""
    budgets = [row["budget"] for row in rows if row["policy"] != FULL]
    if not budgets:
        return "Nothing could be measured yet."
    smallest = min(budgets)
    sums: dict[str, list[float]] = {}
    for row in rows:
        scores = row.get("unseen") or {}
        if row["budget"] == smallest and row["task"] != LOSS and "score" in scores and not scores["full_cannot"]:
            sums.setdefault(row["policy"], []).append(scores["over_full"]["value"])
    if not sums:
        return f"At no length and task with a question does the full cache find half of the answers: {CANNOT_EITHER}."
    best = max(sums, key=lambda policy: sum(sums[policy]) / len(sums[policy]))
    count = len(sums[best])
    mean = sum(sums[best]) / count
    rows_of_it = "in the one row" if count == 1 else f"the mean of {count} rows"
    return (
        f"With {percent(smallest)} of the keys and the question unseen, {best} stays nearest to the full cache: its "
        f"score is {mean:+.2f} beside the full cache's, {rows_of_it} where that finds at least half of the answers."
    )


def _task_section(task: str, rows: Sequence[Row]) -> Html:
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    charts = [
        _chart(task, length, column, [row for row in rows if row["length"] == length])
        for length in lengths
        for column in COLUMNS
    ]
    return section(f"{task}: score against bytes", element("div", charts, class_="grid2"))


def _chart(task: str, length: int, column: str, rows: Sequence[Row]) -> Html | None:
    """One line a policy over the bytes of its budgets; the full cache is the dashed line."""
    measured = [row for row in rows if "score" in (row.get(column) or {}) and row["bytes_ratio"] is not None]
    policies = list(dict.fromkeys(row["policy"] for row in measured if row["policy"] != FULL))
    if not policies:
        return None
    full = next(row[column] for row in measured if row["policy"] == FULL)
    series = [_series(name, i, column, measured, full["score"]) for i, name in enumerate(policies)]
    note = "Upright lines: 95 % of the difference from the full cache on the same cases."
    if full["full_cannot"]:
        note += f" {CANNOT_EITHER[0].upper()}{CANNOT_EITHER[1:]}: it scores {number(full['score'])}."
    words = COLUMNS[column] if task != LOSS else "continuation"
    return line_chart(
        series,
        name=f"{task}-{length}-{column}",
        title=f"{task}, {length:,} tokens, {words}",
        x_label="bytes held, share of the full cache",
        y_label="nats a token" if task == LOSS else "score",
        axes=Axes(reference=(FULL, full["score"])),
        note=note,
    )


def _series(policy: str, colour: int, column: str, rows: Sequence[Row], full: float) -> Series:
    """A policy's scores by its bytes; the ends of its intervals are those of the paired differences."""
    points = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["bytes_ratio"])
    over = [row[column]["over_full"] for row in points]
    return Series(
        policy,
        [row["bytes_ratio"] for row in points],
        [row[column]["score"] for row in points],
        low=[full + each["low"] for each in over],
        high=[full + each["high"] for each in over],
        colour=colour,
        marked=True,
        whiskers=True,
    )


class _Written(float):
    """A number that sorts as such and is shown with its interval."""

    shown: str = ""

    @classmethod
    def of(cls, value: float | None, shown: str) -> _Written | None:
        """None where there is no number."""
        if value is None:
            return None
        made = cls(value)
        made.shown = shown
        return made


def _show_written(value: Any) -> str:
    return MISSING if value is None else value.shown


def _scores(rows: Sequence[Row]) -> Html:
    columns = [
        Column("task"),
        Column("length"),
        Column("policy", show=str),
        Column("budget", show=percent),
        *(Column(name, name, show=_show_written) for name in _written_columns()),
        Column("bytes", show=percent),
        Column("reading", show=times),
        Column("a token", show=times),
        Column("note", show=str),
    ]
    flat = [_flat(row) for row in rows]
    return table(flat, name="scores", title="Every policy at every budget, beside the full cache", columns=columns)


def _written_columns() -> list[str]:
    return [name for words in COLUMNS.values() for name in (words, f"{words}, over full")]


def _flat(row: Row) -> dict[str, Any]:
    """A row of the table, whose cells sort as numbers."""
    cells: dict[str, Any] = {name: row[name] for name in ("task", "length", "policy", "budget")}
    for column, words in COLUMNS.items():
        scores, shown = row.get(column) or {}, list(_column_cells(row, column).values())
        cells[words] = _Written.of(scores.get("score"), shown[0])
        cells[f"{words}, over full"] = _Written.of((scores.get("over_full") or {}).get("value"), shown[1])
    ratios = {"bytes": "bytes_ratio", "reading": "prefill_ratio", "a token": "decode_ratio"}
    return (
        cells
        | {name: row[key] for name, key in ratios.items()}
        | {
            # In one line: the column is the last of a wide table.
            "note": _note(row).replace(" ", "\u00a0")
        }
    )


def _refused(rows: Sequence[Row]) -> Html | None:
    """The first reason of each policy that refused."""
    reasons: dict[str, str] = {}
    for row in rows:
        for column in COLUMNS:
            if "refused" in (row.get(column) or {}):
                reasons.setdefault(row["policy"], row[column]["refused"])
    if not reasons:
        return None
    return element("ul", [element("li", element("code", name), f" refused: {why}") for name, why in reasons.items()])


def _facts(result: Mapping[str, Any], model: Mapping[str, Any]) -> list[tuple[str, object]]:
    cases = (result.get("config") or {}).get("cases")
    return [
        ("Model", model.get("name")),
        ("Parameters", f"{model.get('parameters', 0):,}"),
        ("Type of numbers", model.get("dtype")),
        ("Cases of a task and length", cases),
        *provenance_facts(result),
    ]
