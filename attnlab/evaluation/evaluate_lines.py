"""An evaluation as aligned text for a terminal: one line a subject."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnlab.evaluation.compare_lines import aligned
from attnlab.pages.evaluate import evaluation_columns, evaluation_table

__all__ = ["evaluation_lines"]


def evaluation_lines(result: Mapping[str, Any]) -> list[str]:
    """The table, and why a subject was refused."""
    header = ["attention", *evaluation_columns(result)]
    cells = [list(row.values()) for row in evaluation_table(result)]
    refused = [f"{row['subject']}  refused: {row['refused']}" for row in result["rows"] if row["refused"]]
    return [*aligned([header, *cells], left=1), *refused]
