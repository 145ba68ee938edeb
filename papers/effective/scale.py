"""At which scale the results of effective attention were made, in words."""

from __future__ import annotations

from collections.abc import Callable

from papers.common.cells import Cell, Result
from papers.common.scale import span
from papers.effective.config import NAME, PRETRAINED

__all__ = ["SCALES", "SECONDS"]


def _scale(result: Result, wanted: Cell) -> str:
    table = wanted.table
    config = result["config"]
    if table == "timing":
        return f"{config['model'] or 'the shipped masked LM'}, {config['length']} tokens, batch {config['batch_size']}"
    if not config.get("finetune", True):
        inputs = span(row["inputs"] for row in (result.get("tables") or {}).get("identity", []))
        return f"{config['model']}, as it was pretrained, {inputs} inputs of a task, {config['length']} tokens"
    steps = span(row["steps"] for row in (result.get("tables") or {}).get("scores", []))
    tuned = f"fine-tuned for {config['epochs']:g} epochs ({steps} updates of {config['batch_size']})"
    return f"{config['model'] or 'the shipped masked LM'}, {tuned}, {config['length']} tokens"


def _seconds(result: Result) -> float | None:
    """The times of the tasks, which ran one after the other or at once: an upper bound."""
    totals = [
        max((value for name, value in facts.items() if name.startswith("seconds: ")), default=0.0)
        for facts in (result.get("parts") or {}).values()
    ]
    return sum(totals) or None


SCALES: dict[str, Callable[[Result, Cell], str]] = {NAME: _scale, PRETRAINED: _scale}
SECONDS: dict[str, Callable[[Result], float | None]] = {NAME: _seconds, PRETRAINED: _seconds}
