"""Experiments in parts that run at once: each part's rows on disk as they are found, and all of them gathered."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlab.provenance import write_json

__all__ = ["Part", "gather"]

# The columns that say what a row is for, in tables that name none.
LABELS = ("mechanism", "spec", "kernel", "family", "r", "rounds", "model", "step")


class Part:
    """What one process has found so far, on disk after every row: a kill loses only the row under way.

    ``keys`` names, table by table, the columns that tell rows apart.
    """

    def __init__(self, path: Path, *, keys: Mapping[str, Sequence[str]] | None = None) -> None:
        self.path = path
        self.keys = dict(keys or {})
        self.content: dict[str, Any] = {"tables": {}, "facts": {}}
        if path.exists():
            # A resumed run goes on from the rows it had.
            self.content = json.loads(path.read_text(encoding="utf-8"))

    def has(self, table: str, **labels: Any) -> bool:
        """Whether the table has a row of these labels."""
        rows = self.content["tables"].get(table, [])
        return any(all(row.get(name) == value for name, value in labels.items()) for row in rows)

    def row(self, table: str, **values: Any) -> None:
        """Add a row to a table, in place of one for the same setting and step."""
        self.extend(table, [values])

    def extend(self, table: str, rows: Sequence[dict[str, Any]]) -> None:
        """Add rows to a table, which is written once."""
        for values in rows:
            labels = {name: value for name, value in values.items() if name in self.keys.get(table, LABELS)}
            kept = [
                row
                for row in self.content["tables"].get(table, [])
                if not labels or any(row.get(name) != value for name, value in labels.items())
            ]
            self.content["tables"][table] = [*kept, values]
            print(f"{self.path.stem}: {table} {json.dumps(values)}", flush=True)
        write_json(self.path, self.content)

    def rows(self, table: str, wanted: Mapping[str, dict[str, Any]], measure: Callable[[str], dict[str, Any]]) -> None:
        """A row for each of ``wanted``, {spec: what tells it apart}; one that fails is noted and the others go on."""
        for spec, labels in wanted.items():
            if self.has(table, **labels):
                continue
            try:
                found = measure(spec)
            except (RuntimeError, ValueError) as error:
                traceback.print_exc()
                self.fact(f"failed: {table} {spec}", str(error).strip().partition("\n")[0])
                continue
            self.row(table, **labels, **found)

    def fact(self, name: str, value: Any) -> None:
        """Note something that is no table: sizes, speeds."""
        self.content["facts"][name] = value
        write_json(self.path, self.content)


def gather(work: Path, names: Sequence[str]) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """(every table's rows, each part's facts) of what the named parts have found so far."""
    tables: dict[str, list[dict[str, Any]]] = {}
    facts = {}
    for name in names:
        path = work / f"{name}.json"
        if not path.exists():
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        facts[name] = content["facts"]
        for table, rows in content["tables"].items():
            tables.setdefault(table, []).extend(rows)
    return tables, facts
