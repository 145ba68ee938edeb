"""At which scale the results of attention guidance were made, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from papers.common.cells import Cell, Result
from papers.common.scale import millions, span

__all__ = ["SCALES", "SECONDS"]

# The part of the study, and the column of updates, of the tables that claims read.
PARTS = {
    "ag_loss": ("a", "steps"),
    "convergence": ("a", "of_steps"),
    "electra": ("c", "of_steps"),
    "translation": ("d", "steps"),
    "low_resource": ("f-oromo", ""),
    "finetuned": ("a", ""),
}


def _scale(result: Result, wanted: Cell) -> str:
    table = wanted.table
    part, column = PARTS[table]
    layers = dict(wanted.where).get("layers")
    settings = {row["part"]: row for row in result["tables"]["settings"]}.get(part)
    if settings is None:
        return "its settings were not recorded"
    rows = [row for row in result["tables"][table] if layers is None or row.get("layers") == layers]
    updates = span(row[column] for row in rows if row.get(column)) if column else f"{settings['updates']:,} planned"
    batch = f"{settings['batch']} x {settings['length']}" if settings["batch"] else f"{settings['tokens']:,}"
    text = f"{layers or settings['layers']} layers x {settings['width']}, {updates} updates of {batch} tokens"
    return f"pretrained: {text}" if table == "finetuned" else text


def _seconds(result: Result) -> float | None:
    """The longest run of each part and seed: the arms of one are trained side by side."""
    longest: dict[tuple[Any, ...], float] = {}
    raw = result.get("raw") or {}
    for table in ("runs", "electra_runs", "translation_runs"):
        for row in raw.get(table, []):
            place = table, row.get("part"), row.get("depth"), row.get("seed")
            longest[place] = max(longest.get(place, 0.0), row.get("seconds") or 0.0)
    return sum(longest.values()) or None


def _arm_scale(result: Result, wanted: Cell) -> str:
    norm = dict(wanted.where).get("norm")
    rows = [row for row in (result.get("tables") or {}).get("arms", []) if row["norm"] == norm]
    sizes = f"{span(row['layers'] for row in rows)} layers x {span(row['width'] for row in rows)}, {norm}-norm"
    return f"{sizes}, each arm alone: {millions(row['tokens'] for row in rows)} tokens"


def _arm_seconds(result: Result) -> float | None:
    return sum(row.get("seconds") or 0.0 for row in (result.get("tables") or {}).get("arms", [])) or None


SCALES: dict[str, Callable[[Result, Cell], str]] = {"guidance": _scale, "guidance-arm": _arm_scale}
SECONDS: dict[str, Callable[[Result], float | None]] = {"guidance": _seconds, "guidance-arm": _arm_seconds}
