"""The recorded steps of a run folder: maps and scalars over training, read without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
    metrics: Mapping[str, list[tuple[int, float]]]


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
    return Timeline(_name(run_dir), sequences, steps, dict(_metrics(run_dir)))


def _name(run_dir: Path) -> str:
    """What the run calls itself, or its folder's name."""
    file = run_dir / "run.json"
    told = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return str(told.get("name") or run_dir.resolve().name)


def _step(folder: Path, entry: Mapping[str, Any]) -> RecordedStep:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        stored = load_file(folder / entry["file"])
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / entry['file']} cannot be read ({error}); record the step again") from None
    maps = {(kind, int(layer)): stored[f"{kind}.{layer}"] for kind, layer in entry["layers"]}
    return RecordedStep(int(entry["step"]), maps, entry["scalars"])


def _metrics(run_dir: Path) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    file = run_dir / "metrics.jsonl"
    found: dict[str, list[tuple[int, float]]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        told = json.loads(line)
        for name, value in told["values"].items():
            if isinstance(value, (int, float)):
                found.setdefault(f"{told['kind']} {name}", []).append((told["step"], float(value)))
    yield from found.items()
