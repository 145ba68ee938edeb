"""The recorded steps of a run folder: maps and scalars over training, read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.pages.runs import read_run

__all__ = ["RecordedStep", "Timeline", "read_timeline"]

FOLDER, INDEX = "steps", "index.json"


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """One step: ``maps[kind, layer]`` is (head, query, key); a scalar is a number or {"kind.layer": one per head}."""

    step: int
    maps: Mapping[tuple[str, int], np.ndarray]
    scalars: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Timeline:
    """The steps of one run over one text, oldest first, with the run's own metrics beside them."""

    name: str
    sequences: Mapping[str, list[str]]
    steps: tuple[RecordedStep, ...]
    # {name: [(step, value), ...]} from metrics.jsonl.
    metrics: Mapping[str, list[tuple[float, float]]]


def read_timeline(run_dir: Path | str) -> Timeline:
    """Read what ``attnlab.reading.timeline.record_step`` wrote into a run folder; a ValueError says what is wrong."""
    run_dir = Path(run_dir)
    file = run_dir / FOLDER / INDEX
    if not file.is_file():
        raise ValueError(f"{run_dir} holds no recorded steps ({FOLDER}/{INDEX} is missing); record_step writes them")
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
        steps = tuple(_step(file.parent, entry) for entry in index["steps"])
        sequences = {name: [str(token) for token in tokens] for name, tokens in index["sequences"].items()}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is damaged ({error}); record the run again") from None
    if not steps:
        raise ValueError(f"{run_dir} holds no recorded steps")
    name, metrics = _name_and_metrics(run_dir)
    return Timeline(name, sequences, steps, metrics)


def _name_and_metrics(run_dir: Path) -> tuple[str, dict[str, list[tuple[float, float]]]]:
    """The name in run.json, or else the folder's; and the run's metrics where it wrote any."""
    if not (run_dir / "run.json").is_file():
        return run_dir.resolve().name, {}
    run = read_run(run_dir.resolve())
    curves = {
        f"{kind} {metric}": [
            (step, value) for step, value in zip(curve.steps, curve.values, strict=True) if value is not None
        ]
        for (kind, metric), curve in run.curves.items()
    }
    return run.name, {name: points for name, points in curves.items() if points}


def _step(folder: Path, entry: Mapping[str, Any]) -> RecordedStep:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        stored = load_file(folder / entry["file"])
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / entry['file']} cannot be read ({error}); record the step again") from None
    maps = {(kind, int(layer)): stored[f"{kind}.{layer}"] for kind, layer in entry["layers"]}
    return RecordedStep(int(entry["step"]), maps, entry["scalars"])
