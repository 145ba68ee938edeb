"""A run's recorded steps as an exploration: a slider over training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.pages.explorer.exploration import Exploration
from attnlab.pages.explorer.payload import Item, LayerMaps, Tokens, pack
from attnlab.pages.explorer.timeline import RecordedStep, read_timeline
from attnlab.pages.explorer.tokens import TYPE_NAMES, guess_types, guess_words, readable

__all__ = ["explore_run"]

COLUMNS = (
    {"key": "entropy", "title": "entropy", "help": "Of a token's attention, in nats, averaged over tokens"},
    {"key": "largest", "title": "largest", "help": "A token's largest weight, averaged over tokens"},
)


def explore_run(run_dir: Path | str, *, precise: bool = False) -> Exploration:
    """The maps and scalars that ``record_step`` left in a run folder, to be played over its steps."""
    run = read_timeline(run_dir)
    texts = {name: Tokens(readable(told), guess_words(told), guess_types(told)) for name, told in run.sequences.items()}
    items = [Item(f"step {one.step:,}", texts, _layers(one), step=one.step, scalars=one.scalars) for one in run.steps]
    first, last = run.steps[0].step, run.steps[-1].step
    scalars = sorted({name for one in run.steps for name, value in one.scalars.items() if isinstance(value, Mapping)})
    told = [{"key": name, "title": name, "help": f"{name} of the head at this step"} for name in scalars]
    return Exploration(
        pack(
            items,
            title=run.name,
            subtitle=f"{len(items)} recorded steps, {first:,} to {last:,}",
            type_names=TYPE_NAMES,
            columns=[*COLUMNS, *told],
            panes=[(None, "standard")],
            metrics=run.metrics,
            precise=precise,
            about={"run": run.name, "steps": len(items)},
        )
    )


def _layers(step: RecordedStep) -> Iterator[LayerMaps]:
    for (kind, layer), half in step.maps.items():
        w = half.astype(np.float32)
        shares = np.abs(w) / np.maximum(np.abs(w).sum(-1, keepdims=True), 1e-12)
        statistics: dict[str, Any] = {
            "entropy": (shares * -np.log(np.maximum(shares, 1e-12))).sum(-1).mean(-1).tolist(),
            "largest": w.max(-1).mean(-1).tolist(),
        }
        for name, value in step.scalars.items():
            if isinstance(value, Mapping) and f"{kind}.{layer}" in value:
                statistics[name] = value[f"{kind}.{layer}"]
        yield LayerMaps(kind, layer, {"standard": w}, statistics)
