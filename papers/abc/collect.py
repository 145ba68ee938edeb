"""From what the processes of an experiment left in a folder to its results file, the paper's numbers beside ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlab.provenance import provenance, write_json
from papers.abc.summaries import Rows
from papers.common.results import beside_paper, merge_results

__all__ = ["begin", "collect"]

RUN = "run.json"


def begin(work: Path, config: Mapping[str, Any], *, seed: int = 0) -> None:
    """Note in the folder what made it: results may be collected on another machine."""
    work.mkdir(parents=True, exist_ok=True)
    write_json(work / RUN, {"config": dict(config), "seed": seed, **provenance()})


def collect(
    name: str,
    works: Sequence[Path],
    out: Path,
    *,
    keys: Mapping[str, Sequence[str]],
    notes: Mapping[str, str],
    made: Mapping[Path, Mapping[str, list[dict[str, Any]]]] | None = None,
    untestable: Callable[[Mapping[str, list[dict[str, Any]]]], dict[str, str]] | None = None,
    derived: Callable[[dict[str, Rows]], dict[str, Rows]] | None = None,
) -> dict[str, Any]:
    """Merge the folders' rows, and the tables ``made`` from a folder, into ``out``; later folders win.

    ``derived`` makes further tables from all of them; ``untestable`` says which claims they cannot decide, and why.
    """
    result = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
    for work in works:
        tables: dict[str, list[dict[str, Any]]] = {}
        facts: dict[str, Any] = {}
        for path in sorted(work.glob("part-*.json")):
            content = json.loads(path.read_text(encoding="utf-8"))
            facts[path.stem.removeprefix("part-")] = content["facts"]
            for table, rows in content["tables"].items():
                tables.setdefault(table, []).extend(rows)
        tables |= {table: rows for table, rows in (made or {}).get(work, {}).items() if rows}
        found = {
            "name": name,
            "paper": "ABC",
            **json.loads((work / RUN).read_text(encoding="utf-8")),
            "keys": {table: list(columns) for table, columns in keys.items()},
            "notes": dict(notes),
            "parts": facts,
            "tables": {table: _beside(name, table, rows, keys) for table, rows in tables.items()},
        }
        result = found if result is None else merge_results(result, found)
    if result is None:
        raise ValueError("no folder of runs was given; name at least one")
    if derived is not None:
        result["tables"] |= derived(result["tables"])
    if untestable is not None:
        result["not_testable"] = untestable(result["tables"])
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, result)
    return result


def _beside(
    name: str, table: str, rows: list[dict[str, Any]], keys: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    shared = [key for key in keys.get(table, ()) if key != "seed"]
    return beside_paper(rows, results=name, table=table, keys=shared) if shared else rows
