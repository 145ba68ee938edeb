"""Results files: read a folder of them, and set the paper's numbers beside ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from attnlab.pages.tables import PAPER
from papers.common.discovery import folders, paper_folder

__all__ = ["RESULTS", "beside_paper", "described_columns", "load_results", "paper_table"]

# Where the results of the papers lie in the repository.
RESULTS = Path(__file__).resolve().parent.parent / "results"
Rows = list[dict[str, Any]]


def load_results(folder: Path | str = RESULTS) -> dict[str, dict[str, Any]]:
    """Every results/<name>.json by name; a file that is no JSON object is an error that names it."""
    results = {}
    for path in sorted(Path(folder).glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"{path} is not readable JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
        results[path.stem] = content
    return results


@cache
def _tables() -> dict[str, dict[str, dict[str, Any]]]:
    """{results: {table: {"columns": text, "paper": the paper's rows}}}, from the paper_tables.json of every folder."""
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for folder in folders():
        path = paper_folder(folder) / "paper_tables.json"
        if path.exists():
            tables |= json.loads(path.read_text(encoding="utf-8"))
    return tables


def described_columns() -> dict[str, dict[str, str]]:
    """The columns of our tables in words: {results: {table: text}}."""
    return {
        results: {name: table["columns"] for name, table in tables.items() if "columns" in table}
        for results, tables in _tables().items()
    }


def paper_table(results: str, table: str) -> Rows:
    """A paper's table in the columns of ours: ``paper_table("value-aware", "table_1")``; empty if it has no numbers.

    >>> paper_table("value-aware", "table_1")[2]
    {'mechanism': 'top-r:r=d+1', 'mlm_error': 43.5}
    """
    return [dict(row) for row in _tables().get(results, {}).get(table, {}).get("paper", [])]


def beside_paper(rows: Sequence[Mapping[str, Any]], *, results: str, table: str, keys: Sequence[str]) -> Rows:
    """Our rows with the paper's numbers for the same settings under ``<column>_paper``.

    >>> beside_paper([{"mechanism": "softmax", "mlm_error": 30.1}], results="value-aware", table="table_1",
    ...              keys=["mechanism"])
    [{'mechanism': 'softmax', 'mlm_error': 30.1, 'mlm_error_paper': 24.2}]
    """
    known = {tuple(row.get(key) for key in keys): row for row in paper_table(results, table)}
    joined = []
    for row in rows:
        theirs = known.get(tuple(row.get(key) for key in keys), {})
        extra = {f"{key}{PAPER}": value for key, value in theirs.items() if key not in keys and key in row}
        joined.append({**row, **extra})
    return joined
