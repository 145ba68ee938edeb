"""Results files: read a folder of them, merge what several runs found, set the paper's numbers beside ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from attnlab.pages.tables import PAPER

__all__ = ["beside_paper", "load_results", "merge_results", "paper_table"]

# Where the results of the papers lie in the repository.
RESULTS = Path(__file__).resolve().parent.parent / "results"
PROVENANCE = ("config", "seed", "versions", "python", "device", "commit")
Rows = list[dict[str, Any]]


def load_results(folder: Path | str = RESULTS) -> dict[str, dict[str, Any]]:
    """Every results/<name>.json by name; a file that is no JSON object is an error that names it."""
    found = {}
    for path in sorted(Path(folder).glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"{path} is not readable JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
        found[path.stem] = content
    return found


def merge_results(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What was there and what is new: a row of ``new`` replaces the row of ``old`` for the same settings, others stay.

    The settings of a row are the columns that ``keys: {table: [columns]}`` names, or else all its columns but floats.
    The older parts' provenance is kept under ``earlier``, so that each number can still be traced.
    """
    if old.get("name") != new.get("name"):
        raise ValueError(f"results of {old.get('name')!r} and {new.get('name')!r} cannot be merged: names differ")
    keys = {**(old.get("keys") or {}), **(new.get("keys") or {})}
    before, after = old.get("tables") or {}, new.get("tables") or {}
    tables = {
        name: _merge_rows(before.get(name) or [], after.get(name) or [], keys.get(name))
        for name in dict.fromkeys((*before, *after))
    }
    merged = {**old, **new, "tables": tables}
    for field in ("keys", "intervals"):
        both = {**(old.get(field) or {}), **(new.get(field) or {})}
        if both:
            merged[field] = both
    merged["earlier"] = [*(old.get("earlier") or []), *_earlier(old, new)]
    return merged if merged["earlier"] else {k: v for k, v in merged.items() if k != "earlier"}


@cache
def _papers() -> dict[str, dict[str, Rows]]:
    return json.loads((Path(__file__).parent / "papers.json").read_text(encoding="utf-8"))


def paper_table(results: str, table: str) -> Rows:
    """A paper's table in the columns of ours: ``paper_table("value-aware", "table_1")``; empty if it has no numbers.

    >>> paper_table("value-aware", "table_1")[2]
    {'mechanism': 'top-r:r=d+1', 'mlm_error': 43.5}
    """
    return [dict(row) for row in _papers().get(results, {}).get(table, [])]


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


def _merge_rows(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], keys: list[str] | None) -> Rows:
    merged = {_settings(row, keys): dict(row) for row in old}
    merged |= {_settings(row, keys): dict(row) for row in new}
    return list(merged.values())


def _settings(row: Mapping[str, Any], keys: list[str] | None) -> str:
    chosen = {k: row.get(k) for k in keys} if keys else {k: v for k, v in row.items() if not isinstance(v, float)}
    return json.dumps(chosen, sort_keys=True, default=str)


def _earlier(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    before = {field: old[field] for field in PROVENANCE if field in old}
    after = {field: new[field] for field in PROVENANCE if field in new}
    return [before] if before and before != after else []
