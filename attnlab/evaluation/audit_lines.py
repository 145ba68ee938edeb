"""An audit as text for a terminal: the changes, the findings, and what was read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnlab.evaluation.audit_statistics import FINDINGS
from attnlab.evaluation.compare_lines import aligned
from attnlab.pages.audit import change_text, finding_rows, head_name
from attnlab.pages.numbers import number

__all__ = ["audit_lines"]

# Heads of one finding, and changes, that are listed; the JSON has all.
MOST = 12


def audit_lines(result: Mapping[str, Any]) -> list[str]:
    """The changes since the baseline, one line a head and statistic; then the heads of each finding."""
    heads, text = result["heads"], result["text"]
    lines = [f"{len(heads)} heads on {text['windows']} windows of {result['shape']['length']} tokens of {text['name']}"]
    if result["baseline"] is not None:
        lines += _change_lines(result)
    rows = finding_rows(heads)
    for name, finding in FINDINGS.items():
        of = [row for row in rows if row["finding"] == name]
        if of:
            named = ", ".join(f"{head_name(row)} {row['value']}" for row in of[:MOST])
            more = f", and {len(of) - MOST} more" if len(of) > MOST else ""
            lines.append(f"{name} ({len(of)}; {finding.meaning}): {named}{more}")
    return lines if rows else [*lines, "no findings"]


def _change_lines(result: Mapping[str, Any]) -> list[str]:
    changes, about = result["changes"], result["baseline"]
    against = f"against the baseline, in {number(about['comparisons'])} comparisons"
    if not changes:
        return [f"no change {against}"]
    header = ["head", "statistic", "before", "now", "log-odds", "findings"]
    cells = [
        [head_name(row), row["statistic"], number(row["before"]), number(row["now"]), *change_text(row)]
        for row in changes[:MOST]
    ]
    more = [f"and {len(changes) - MOST} more changes"] if len(changes) > MOST else []
    return [f"changes {against}: {len(changes)}", *aligned([header, *cells], left=2), *more]
