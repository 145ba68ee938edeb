"""Tables that can be sorted and downloaded, with the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from attnlab.pages.charts import figure
from attnlab.pages.html import Html, element
from attnlab.pages.numbers import MISSING, number

__all__ = ["PAPER", "Column", "columns_of", "plain_table", "table"]

PAPER = "_paper"


@dataclass(frozen=True)
class Column:
    """A column: the key in the rows, its title, what it means, how a value is written, and which values are good."""

    key: str
    title: str = ""
    help: str = ""
    show: Callable[[Any], str] = number
    best: str = ""
    bar: bool = False

    def __post_init__(self) -> None:
        if self.best not in ("", "low", "high"):
            raise ValueError(f"best must be 'low', 'high' or empty, got {self.best!r}")


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The columns that occur in the rows, in order of appearance; ``x_paper`` moves beside ``x``.

    >>> [c.title for c in columns_of([{"model": "BASE", "bleu": 26.1, "n": 32, "bleu_paper": 27.2}])]
    ['model', 'bleu', 'bleu (paper)', 'n']
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    ordered = [key for key in keys if not (key.endswith(PAPER) and key.removesuffix(PAPER) in keys)]
    both = [k for key in ordered for k in (key, key + PAPER) if k in keys]
    return [Column(key, _title(key)) for key in both]


def table(
    rows: Sequence[Mapping[str, Any]],
    *,
    name: str,
    title: str,
    columns: Sequence[Column] | None = None,
    note: str = "",
    stacked: bool = False,
) -> Html:
    """A table with a button in each heading that sorts by it; the best value of a column is set in bold.

    On a narrow screen it scrolls sideways, or, if ``stacked``, each row becomes a block: right for wordy tables.
    """
    columns = list(columns) if columns is not None else columns_of(rows)
    head = [
        element(
            "th",
            element("button", c.title or c.key, type="button", title=c.help or None),
            scope="col",
            class_=_class(c, rows),
            aria_sort="none",
        )
        for c in columns
    ]
    drawn = _drawn(rows, columns, head)
    raw = {"columns": [c.key for c in columns], "rows": [[_raw(row.get(c.key)) for c in columns] for row in rows]}
    wrapped = element("div", drawn, class_="scroll", tabindex="0", role="region", aria_label=title)
    return figure(wrapped, name=name, title=title, note=note, table=raw, kind="table stacked" if stacked else "table")


def plain_table(rows: Sequence[Mapping[str, Any]], *, columns: Sequence[Column] | None = None) -> Html:
    """A table that needs no script: nothing to sort by and nothing to download, as a notebook shows it."""
    columns = list(columns) if columns is not None else columns_of(rows)
    head = [element("th", c.title or c.key, scope="col", class_=_class(c, rows)) for c in columns]
    return _drawn(rows, columns, head)


def _drawn(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], head: Sequence[Html]) -> Html:
    body = [element("tr", [_cell(c, row, rows, first=i == 0) for i, c in enumerate(columns)]) for row in rows]
    return element("table", element("thead", element("tr", head)), element("tbody", body))


def _cell(c: Column, row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], *, first: bool) -> Html:
    value = row.get(c.key)
    is_number = _is_number(value)
    shown = c.show(_raw(value))
    style = _bar_style(c, value, rows)
    classes = [_class(c, rows), "has-bar" if style else "", "missing" if shown == MISSING else ""]
    return element(
        "th" if first else "td",
        _emphasised(c, shown, is_best=bool(c.best) and is_number and value == _best(c, rows)),
        class_=" ".join(filter(None, classes)),
        style=style,
        scope="row" if first else None,
        data_value=value if is_number else None,
        data_label=None if first else c.title or c.key,
    )


def _emphasised(c: Column, shown: str, *, is_best: bool) -> str:
    """A value in bold if it is the column's best, above its bar if the column has bars."""
    if is_best:
        return element("strong", shown)
    return element("span", shown, class_="barred") if c.bar else shown


def _bar_style(c: Column, value: Any, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The length of the value's bar, relative to the longest of the column."""
    if not c.bar or not _is_number(value):
        return None
    longest = max(abs(v) for v in _numbers(c, rows)) or 1
    return f"--bar:{min(abs(value) / longest, 1):.3f}"


def _best(c: Column, rows: Sequence[Mapping[str, Any]]) -> float:
    values = _numbers(c, rows)
    return min(values) if c.best == "low" else max(values)


def _numbers(c: Column, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [row[c.key] for row in rows if _is_number(row.get(c.key))]


def _class(c: Column, rows: Sequence[Mapping[str, Any]]) -> str:
    kind = "number" if any(_is_number(row.get(c.key)) for row in rows) else "words"
    return f"{kind} paper" if c.key.endswith(PAPER) else kind


def _raw(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return " to ".join(number(v) for v in value)
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def _title(key: str) -> str:
    if key.endswith(PAPER):
        return f"{_title(key.removesuffix(PAPER))} (paper)"
    return key.replace("_", " ")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
