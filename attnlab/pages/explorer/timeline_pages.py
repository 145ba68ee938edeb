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
    timeline = read_timeline(run_dir)
    steps = timeline.steps
    texts = {
        name: Tokens(readable(tokens), guess_words(tokens), guess_types(tokens))
        for name, tokens in timeline.sequences.items()
    }
    items = [Item(f"step {s.step:,}", texts, _layers(s), step=s.step, scalars=s.scalars) for s in steps]
    by_head = sorted({name for s in steps for name, value in s.scalars.items() if isinstance(value, Mapping)})
    columns = [{"key": name, "title": name, "help": f"{name} of the head at this step"} for name in by_head]
    return Exploration(
        pack(
            items,
            title=timeline.name,
            subtitle=f"{len(items)} recorded steps, {steps[0].step:,} to {steps[-1].step:,}",
            type_names=TYPE_NAMES,
            columns=[*COLUMNS, *columns],
            panes=[(None, "standard")],
            metrics=timeline.metrics,
            precise=precise,
            about={"run": timeline.name, "steps": len(items)},
        )
    )


def _layers(step: RecordedStep) -> Iterator[LayerMaps]:
    for (kind, layer), maps in step.maps.items():
        w = maps.astype(np.float32)
        shares = np.abs(w) / np.maximum(np.abs(w).sum(-1, keepdims=True), 1e-12)
        statistics: dict[str, Any] = {
            "entropy": (shares * -np.log(np.maximum(shares, 1e-12))).sum(-1).mean(-1).tolist(),
            "largest": w.max(-1).mean(-1).tolist(),
        }
        for name, value in step.scalars.items():
            if isinstance(value, Mapping) and f"{kind}.{layer}" in value:
                statistics[name] = value[f"{kind}.{layer}"]
        yield LayerMaps(kind, layer, {"standard": w}, statistics)
