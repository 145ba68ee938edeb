"""Where results come from: device, commit, command, and how long they took; what is not known says so, with a reason.

A results file has ``commit`` and ``command``. Where one of them cannot be known any more it is null, ``unknown`` says
why, ``{"command": "written before commands were recorded"}``, and ``writer`` is the command without its options.
``edited_in`` lists the commits of the repository that changed tables without measuring anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnlab.pages.numbers import MISSING
from papers.common.scale import cost_of

__all__ = ["KNOWN", "misplaced", "source_rows", "unexplained", "writer_of"]

# What every results file says of its origin, or says why it cannot.
KNOWN = ("device", "commit", "command", "writer")
# The digits of a commit that a page shows.
SHORT = 10


def unexplained(result: Mapping[str, Any]) -> list[str]:
    """What a results file says nothing of: neither where it comes from nor why that is not known."""
    reasons = result.get("unknown") or {}
    known = {**result, "writer": writer_of(result)}
    return [name for name in KNOWN if not known.get(name) and not reasons.get(name)]


def misplaced(result: Mapping[str, Any]) -> list[str]:
    """Tables whose ``made_by`` does not fit: it has not one place for each row, or a place that ``sources`` lacks.

    >>> misplaced({"sources": [{}], "made_by": {"t": [0, 0], "u": 1}, "tables": {"t": [{}], "u": [{}]}})
    ['t', 'u']
    """
    count, wrong = len(result.get("sources") or []), []
    for table, by in (result.get("made_by") or {}).items():
        rows = result["tables"].get(table, [])
        places = by if isinstance(by, list) else [by] * len(rows)
        if len(places) != len(rows) or any(place is not None and not 0 <= place < count for place in places):
            wrong.append(table)
    return wrong


def writer_of(result: Mapping[str, Any]) -> str | None:
    """The program that writes a results file: its command without options, with the experiment's name.

    >>> writer_of({"command": "python -m papers abc-mt --data data"}), writer_of({"command": "attnlab bench -m rfa"})
    ('python -m papers abc-mt', 'attnlab bench')
    """
    words = str(result.get("writer") or result.get("command") or "").split()
    if words[:2] == ["python", "-m"]:
        return " ".join(words[: 4 if words[2] in ("papers", "attnlab") else 3])
    return " ".join(words[:2]) or None


def source_rows(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each results file, by name: device, time, commit and command."""
    return [
        {
            "file": f"papers/results/{name}.json",
            "device": _shown(result, "device"),
            "took": cost_of(name, result),
            "commit": _shown(result, "commit"),
            "command": _shown(result, "command"),
        }
        for name, result in results.items()
    ]


def _shown(result: Mapping[str, Any], name: str) -> str:
    reason = (result.get("unknown") or {}).get(name)
    value = result.get(name)
    if not value:
        writer = f"`{writer_of(result)}`; its options are " if name == "command" and writer_of(result) else ""
        return f"{writer}unknown: {reason}" if reason else MISSING
    text = _short(str(value)) if name == "commit" else f"`{value}`" if name == "command" else str(value)
    more = (
        len({source.get(name) for source in result.get("sources") or []} | {value}) - 1
        if name in ("commit", "command")
        else 0
    )
    return f"{text} and {more} more" if more > 0 else text


def _short(commit: str) -> str:
    plain, dash, changed = commit.partition("-")
    return plain[:SHORT] + dash + changed
