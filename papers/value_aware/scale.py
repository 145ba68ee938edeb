"""At which scale the results of value-aware approximation were made, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from papers.common.cells import Cell, Result
from papers.common.scale import millions, span

__all__ = ["SCALES", "SECONDS"]


def _trainings(result: Result, group: str) -> Iterator[dict[str, float]]:
    for name, facts in (result.get("parts") or {}).items():
        if name.startswith(group) and "training" in facts:
            yield facts["training"]


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


def _seconds(result: Result) -> float | None:
    # All trainings run at once.
    return max((run["seconds"] for run in _trainings(result, "")), default=None)


SCALES: dict[str, Callable[[Result, Cell], str]] = {"value-aware": _scale}
SECONDS: dict[str, Callable[[Result], float | None]] = {"value-aware": _seconds}
