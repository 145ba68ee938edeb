"""At which scale KTIW's results were made, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from papers.common.cells import Cell, Result
from papers.common.scale import span

__all__ = ["SCALES", "SECONDS"]

STUDIES = ("ktiw-table2", "ktiw-tau", "ktiw-train", "ktiw-frozen", "ktiw-logreg", "ktiw-optimal")
TOYS = {
    "ktiw-permutations": "steps",
    "ktiw-multihead": "figure_6_steps",
    "ktiw-multihead-projected": "figure_6_steps",
    "ktiw-permute-function": "permute_steps",
    "ktiw-local": "steps",
}


def _study(result: Result, _: Cell) -> str:
    configs = list(result["config"].values())
    sizes = f"LSTMs of width {span(config['width'] for config in configs)}"
    steps = span(config["steps"] for config in configs)
    return f"{sizes}, at most {steps} updates, {span(config['examples'] for config in configs)} training examples"


def _toy(updates: str) -> Callable[[Result, Cell], str]:
    def scale(result: Result, _: Cell) -> str:
        config = result["config"]
        # All of the model but its heads, where another than the first was taken.
        base = f", base {config['base']}" if config.get("base") else ""
        return f"width {config['width']}, {config[updates]:,} updates of {config['batch']}{base}"

    return scale


def _toy_seconds(result: Result) -> float | None:
    seconds: Any = result.get("seconds")
    return sum(seconds.values()) if isinstance(seconds, dict) else None


SCALES: dict[str, Callable[[Result, Cell], str]] = {
    **dict.fromkeys(STUDIES, _study),
    **{name: _toy(updates) for name, updates in TOYS.items()},
}
SECONDS: dict[str, Callable[[Result], float | None]] = dict.fromkeys(TOYS, _toy_seconds)
