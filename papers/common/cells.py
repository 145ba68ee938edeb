"""The numbers of a results file that a claim reads: columns of tables, in the rows where settings match, by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Cell", "Missing", "Result", "averages", "cell", "in_words", "mean_of", "rows_of", "select"]

Result = Mapping[str, Any]


class Missing(LookupError):  # noqa: N818
    """A table or row that a claim needs and the results do not have yet."""


@dataclass(frozen=True)
class Cell:
    """The numbers of a results file that a claim reads: a column of a table, in the rows where the settings match."""

    table: str
    column: str
    where: tuple[tuple[str, Any], ...] = ()


def cell(table: str, column: str, /, **where: Any) -> Cell:
    """The column of a table in the rows where the named settings match: ``cell("table_1", "mlm_error", r=1)``."""
    return Cell(table, column, tuple(where.items()))


def in_words(table: str) -> str:
    """A table's name on a page.

    >>> in_words("table_3a_quarter"), in_words("losses")
    ('Table 3a quarter', 'table losses')
    """
    words = table.replace("_", " ")
    return words.capitalize() if words.startswith("table") else f"table {words}"


def rows_of(result: Result, table: str) -> list[dict[str, Any]]:
    """The rows of a table; ``Missing`` when the results do not have it."""
    tables = result.get("tables") or {}
    if not tables.get(table):
        raise Missing(f"the results have no table {table}")
    return list(tables[table])


def select(result: Result, wanted: Cell) -> dict[Any, float]:
    """The values of a cell by seed (None where the rows have no seed); ``Missing`` when there is none."""
    by_seed: dict[Any, float] = {}
    where = "for " + ", ".join(f"{key} {setting}" for key, setting in wanted.where) if wanted.where else ""
    table = in_words(wanted.table)
    for row in rows_of(result, wanted.table):
        value = row.get(wanted.column)
        if value is not None and all(row.get(key) == setting for key, setting in wanted.where):
            if row.get("seed") in by_seed:
                raise Missing(f"{table} has several rows {where} with the same seed; one is expected")
            by_seed[row.get("seed")] = float(value)
    if not by_seed:
        what = f"{wanted.column.replace('_', ' ')} {where}".rstrip()
        raise Missing(f"missing: {what}, in {table}")
    return by_seed


def averages(result: Result, table: str, column: str, *keys: str) -> dict[tuple[Any, ...], float]:
    """The mean of a column, over seeds, for each combination of the keys; rows without a value are left out."""
    by_settings: dict[tuple[Any, ...], list[float]] = {}
    for row in rows_of(result, table):
        if row[column] is not None:
            by_settings.setdefault(tuple(row[key] for key in keys), []).append(float(row[column]))
    return {settings: math.fsum(values) / len(values) for settings, values in by_settings.items()}


def mean_of(result: Result, wanted: Cell) -> float:
    """The mean over seeds of a cell."""
    values = select(result, wanted)
    return math.fsum(values.values()) / len(values)
