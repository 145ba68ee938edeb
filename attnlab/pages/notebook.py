"""What a notebook shows of an object: a title, a sentence and a short table, without scripts and in its own colours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnlab.pages.audit import finding_rows, head_name
from attnlab.pages.compare import comparison_columns, comparison_rows, finding
from attnlab.pages.evaluate import evaluation_table
from attnlab.pages.html import element
from attnlab.pages.judge import judge_table
from attnlab.pages.tables import Column, columns_of, plain_table

__all__ = ["Result", "notebook_view"]

Row = Mapping[str, Any]
# Rows that are shown; a model has more heads than a cell of a notebook has room.
MOST = 40


def notebook_view(
    title: str, rows: Sequence[Row], *, about: object = "", columns: Sequence[Column] | None = None, note: str = ""
) -> str:
    """The markup of one view. It names no colour, so that it is readable on a light and on a dark notebook alike.

    >>> notebook_view("one < two", [{"head": 0, "rank": 3.5}]).startswith("<div><p><strong>one &lt; two</strong></p>")
    True
    """
    shown = rows[:MOST]
    columns = columns or columns_of(rows)
    left_out = f"The first {len(shown)} of {len(rows):,} rows." if len(rows) > len(shown) else ""
    # A wide table scrolls by itself, by keyboard too.
    scrolls = {"style": "overflow-x:auto", "tabindex": "0", "role": "region", "aria_label": title}
    return element(
        "div",
        element("p", element("strong", title)),
        element("p", about) if about else None,
        element("div", plain_table(shown, columns=columns), **scrolls) if shown else None,
        element("p", " ".join(filter(None, [left_out, note]))) if left_out or note else None,
    )


class Result(dict[str, Any]):
    """A result as its JSON file holds it; a notebook shows the table of its page."""

    def _repr_html_(self) -> str:
        return VIEWS[self["name"]](self)


def _comparison(result: Row) -> str:
    rows = comparison_rows(result)
    return notebook_view(
        f"Attention mechanisms on {_model(result)}",
        rows,
        about=finding(result),
        columns=comparison_columns(result, rows),
        note=_refused(result["rows"], "mechanism"),
    )


def _evaluation(result: Row) -> str:
    note = _refused(result["rows"], "subject")
    return notebook_view(f"{_model(result)}: scores, with 95 % intervals", evaluation_table(result), note=note)


def _judgement(result: Row) -> str:
    return notebook_view(f"Cache policies on {_model(result)}, with 95 % intervals", judge_table(result))


def _audit(result: Row) -> str:
    rows = [
        {"head": head_name(row), "finding": row["finding"], "by": row["statistic"], "value": row["value"]}
        for row in finding_rows(result["heads"])
    ]
    about = f"{len(result['heads'])} heads, {len(rows)} findings"
    if result["baseline"] is not None:
        changed = len({head_name(row) for row in result["changes"]})
        about += f"; {changed} heads changed since the baseline"
    return notebook_view(f"The heads of {_model(result)}", rows, about=f"{about}.")


# By the name of the command whose result it is.
VIEWS: dict[str, Callable[[Row], str]] = {
    "compare": _comparison,
    "evaluate": _evaluation,
    "judge": _judgement,
    "audit": _audit,
}


def _model(result: Row) -> str:
    return str(result["model"].get("name") or "a model")


def _refused(rows: Sequence[Row], key: str) -> str:
    return " ".join(f"{row[key]} was refused: {row['refused']}." for row in rows if row.get("refused"))
