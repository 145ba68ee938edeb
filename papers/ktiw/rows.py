"""Rows of tables as they are found, on disk once a group is complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attnlab.provenance import write_json

__all__ = ["Rows"]


class Rows:
    """Tables and facts of one experiment; ``fact`` and ``save`` write what there is, lest a kill lose more."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.facts: dict[str, Any] = {}

    def add(self, table: str, **values: Any) -> None:
        """A row."""
        self.tables.setdefault(table, []).append(values)

    def fact(self, name: str, value: Any) -> None:
        """Something that is no table, such as a time; everything so far is written."""
        self.facts[name] = value
        self.save()

    def save(self) -> None:
        """Write what there is."""
        write_json(self.path, {"tables": self.tables, "facts": self.facts})

    @classmethod
    def load(cls, path: Path | str) -> Rows:
        """What another process wrote."""
        found = cls(path)
        content = json.loads(found.path.read_text(encoding="utf-8"))
        found.tables, found.facts = content["tables"], content["facts"]
        return found
