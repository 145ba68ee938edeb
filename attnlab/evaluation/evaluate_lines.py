"""An evaluation as aligned text for a terminal: one line a subject."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnlab.evaluation.compare_lines import aligned
from attnlab.pages.evaluate import evaluation_columns

__all__ = ["evaluation_lines"]


def evaluation_lines(result: Mapping[str, Any]) -> list[str]:
    """The table, and why a subject was refused."""
    columns = evaluation_columns(result)
    measured = [row for row in result["rows"] if not row["refused"]]
    cells = [[row["subject"], *(cell(row) for cell in columns.values())] for row in measured]
    refused = [f"{row['subject']}  refused: {row['refused']}" for row in result["rows"] if row["refused"]]
    return [*aligned([["attention", *columns], *cells], left=1), *refused]
