"""At which scale the results of value-aware approximation were made, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from papers.common.cells import Cell, Result
from papers.common.scale import millions, span
from papers.value_aware.config import LM_NAME, NAME

__all__ = ["EXACT_LMS", "SCALES", "SECONDS"]


def _trainings(result: Result, group: str) -> Iterator[dict[str, float]]:
    for name, facts in (result.get("parts") or {}).items():
        if name.startswith(group) and "training" in facts:
            yield facts["training"]


def _exact(result: Result, table: str) -> list[dict[str, Any]]:
    """The kernels' own models; Figure 2 approximates the same ones."""
    rows = (result.get("tables") or {}).get("table_2", []) if table in ("table_2", "figure_2") else []
    return [row for row in rows if row["mechanism"] == "softmax"]


def _scale(result: Result, wanted: Cell) -> str:
    table = wanted.table
    config = result["config"]
    causal = table in ("table_2", "figure_2")
    runs = list(_trainings(result, "lm-" if causal else "mlm-"))
    sizes = f"{millions(run['parameters'] for run in runs)} parameters, {span(run['steps'] for run in runs)} updates"
    if causal:
        tokens = config["lm_batch"] * config["lm_length"]
        return f"{config['lm_layers']} layers x {config['lm_width']}, {sizes} of {tokens:,} tokens"
    return f"the shipped masked LM, continued: {sizes} of {config['mlm_tokens']:,} tokens"


def _lm_scale(result: Result, wanted: Cell) -> str:
    rows = (result.get("tables") or {}).get(wanted.table, [])
    subject = ((result.get("parts") or {}).get("lm") or {}).get("subject") or {}
    windows = {length: span(r["windows"] for r in rows if r["length"] == length) for length in _lengths(rows)}
    read = " and ".join(f"{count} windows of {length:,} tokens" for length, count in windows.items())
    return f"{subject.get('model', 'a pretrained LM')}, {read} of {subject.get('text', 'a text')}"


def _lengths(rows: list[dict[str, int]]) -> list[int]:
    return sorted({row["length"] for row in rows}, reverse=True)


def _seconds(result: Result) -> float | None:
    # All trainings run at once.
    return max((run["seconds"] for run in _trainings(result, "")), default=None)


SCALES: dict[str, Callable[[Result, Cell], str]] = {"value-aware": _scale, LM_NAME: _lm_scale}
SECONDS: dict[str, Callable[[Result], float | None]] = {"value-aware": _seconds}
EXACT_LMS: dict[str, Callable[[Result, str], list[dict[str, Any]]]] = {NAME: _exact}
