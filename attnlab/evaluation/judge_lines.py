"""A judge's result as aligned text for a terminal: one line for each task, length, policy and budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnlab.evaluation.compare_lines import aligned
from attnlab.pages.judge import judge_table
from attnlab.pages.numbers import times

__all__ = ["judge_lines"]


def judge_lines(result: Mapping[str, Any]) -> list[str]:
    """The table with its times, and why a policy refused."""
    rows = [
        {
            **{name: cell for name, cell in cells.items() if name != "note"},
            "reading": times(row["prefill_ratio"]),
            "a token": times(row["decode_ratio"]),
            "note": cells["note"],
        }
        for row, cells in zip(result["rows"], judge_table(result), strict=True)
    ]
    refused: dict[str, str] = {}
    for row in result["rows"]:
        for column in ("unseen", "seen"):
            if row[column] and "refused" in row[column]:
                refused.setdefault(row["policy"], row[column]["refused"])
    reasons = [f"{policy}  refused: {why}" for policy, why in refused.items()]
    return [*aligned([list(rows[0]), *(list(row.values()) for row in rows)], left=3), *reasons]
