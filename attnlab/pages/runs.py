"""Run folders as a report reads them: run.json, metrics.jsonl and result.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnlab.errors import read_json_object
from attnlab.pages.charts import Series
from attnlab.pages.fragments import flatten

__all__ = ["Curve", "Run", "curves", "differing_settings", "grouped", "read_run"]

MOST_POINTS = 600
# The difference of two such numbers is still a float.
LARGEST = 1e300
COPIED = "was the run interrupted while copying it?"
# A line of more points has no dots.
MOST_MARKS = 40


@dataclass(frozen=True)
class Curve:
    """One metric over steps; None where the value was not a finite number."""

    steps: list[float]
    values: list[float | None]


@dataclass(frozen=True)
class Run:
    """The content of a run folder: its settings, its curves by (kind, metric), and its result once it has one."""

    folder: Path
    about: Mapping[str, Any]
    curves: Mapping[tuple[str, str], Curve]
    seconds: float
    result: Mapping[str, Any] | None = None
    skipped: int = 0
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", str(self.about.get("name") or self.folder.name))

    @property
    def finished(self) -> bool:
        """Whether the run wrote its result, which it does last."""
        return self.result is not None


def read_run(folder: Path | str) -> Run:
    """Read a run folder; a metrics file that ends in the middle of a line is read up to that line."""
    folder = Path(folder)
    about, result = _about(folder), _result(folder)
    curves: dict[tuple[str, str], Curve] = {}
    seconds, skipped = 0.0, 0
    for line in _lines(folder / "metrics.jsonl"):
        entry = _entry(line)
        if entry is None:
            skipped += 1
            continue
        step, kind, values, until = entry
        seconds = max(seconds, until)
        for metric, value in values.items():
            curve = curves.setdefault((kind, str(metric)), Curve([], []))
            # A resumed run writes the steps after its checkpoint again: the later entry counts.
            while curve.steps and curve.steps[-1] >= step:
                curve.steps.pop()
                curve.values.pop()
            curve.steps.append(step)
            curve.values.append(_finite(value))
    return Run(folder, about, curves, seconds, result, skipped)


def grouped(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Runs of one configuration together, whatever their seed, under a name that tells the groups apart."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps([run.name, _seedless(run)], sort_keys=True), []).append(run)
    members = list(groups.values())
    differing = differing_settings([group[0] for group in members])
    named = []
    for group in members:
        settings = flatten(_seedless(group[0]))
        distinction = ", ".join(f"{key.rsplit('.', 1)[-1]} {settings.get(key, 'unset')}" for key in differing)
        name = group[0].name
        unique = sum(name == other[0].name for other in members) == 1
        named.append((name if unique or not distinction else f"{name} ({distinction})", group))
    return named


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """The dotted names of the settings, other than the seed, that are not the same in all runs."""
    flat = [flatten(_seedless(run)) for run in runs]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    return [key for key in keys if len({settings.get(key) for settings in flat}) > 1]


def curves(groups: Sequence[tuple[str, list[Run]]], kind: str, metric: str) -> list[Series]:
    """One line per group: of a single run as it is, of several seeds their mean with a band from least to greatest."""
    drawn = []
    for i, (name, runs) in enumerate(groups):
        of_runs = [run.curves[kind, metric] for run in runs if (kind, metric) in run.curves]
        if len(of_runs) == 1:
            drawn.append(_single(name, of_runs[0], colour=i, marked=kind != "train"))
        elif of_runs:
            drawn.append(_mean_of_seeds(name, of_runs, colour=i, marked=kind != "train"))
    return drawn


def _single(name: str, curve: Curve, *, colour: int, marked: bool) -> Series:
    steps, values = _thin(curve.steps, curve.values)
    return Series(name, steps, values, colour=colour, marked=marked and len(steps) <= MOST_MARKS)


def _mean_of_seeds(name: str, seeds: Sequence[Curve], *, colour: int, marked: bool) -> Series:
    """The mean over seeds at the steps where all have a finite value, between the least and the greatest."""
    by_step = [dict(zip(curve.steps, curve.values, strict=True)) for curve in seeds]
    shared = [step for step in seeds[0].steps if all(_finite(values.get(step)) is not None for values in by_step)]
    shared, _ = _thin(shared, shared)
    columns = [[float(values[step] or 0.0) for values in by_step] for step in shared]
    return Series(
        f"{name}, {len(seeds)} seeds",
        shared,
        [math.fsum(column) / len(column) for column in columns],
        low=[min(column) for column in columns],
        high=[max(column) for column in columns],
        faint=tuple(_thin(curve.steps, curve.values) for curve in seeds),
        colour=colour,
        marked=marked and len(shared) <= MOST_MARKS,
    )


def _thin(steps: Sequence[float], values: Sequence[Any]) -> tuple[list[float], list[Any]]:
    """Every k-th point and the last, such that a page stays small; no value is averaged."""
    every = -(-len(steps) // MOST_POINTS) or 1
    kept = sorted({*range(0, len(steps), every), len(steps) - 1}) if steps else []
    return [steps[i] for i in kept], [values[i] for i in kept]


def _seedless(run: Run) -> dict[str, Any]:
    """The run's settings without any seed, at any depth."""

    def without(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: without(value) if isinstance(value, Mapping) else value
            for key, value in settings.items()
            if key != "seed"
        }

    return without(run.about.get("config") or {})


def _finite(value: Any) -> float | None:
    """The value as a float that a chart can show; None for anything else, such as NaN or an int of 400 digits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        return None
    return float(value)


def _entry(line: str) -> tuple[float, str, dict[str, Any], float] | None:
    """(step, kind, values, seconds) of a line of metrics.jsonl; None if it is not of that shape."""
    try:
        entry = json.loads(line)
        step, seconds = _finite(entry["step"]), _finite(entry.get("seconds", 0.0))
        kind, values = entry["kind"], entry["values"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if step is None or seconds is None or not isinstance(kind, str) or not isinstance(values, dict):
        return None
    return step, kind, values, seconds


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]


def _about(folder: Path) -> dict[str, Any]:
    """The content of run.json, whose parts are of the shape that a page shows."""
    file = folder / "run.json"
    if not file.is_file():
        raise ValueError(f"{folder} is no run folder: it has no run.json; give a folder that `attnlab train` wrote")
    about = read_json_object(file, remedy=COPIED)
    for name in ("config", "versions"):
        _check_object(file, name, about.get(name))
    return about


def _result(folder: Path) -> dict[str, Any] | None:
    """The content of result.json, None without one: its metrics by name, and its tables as lists of rows."""
    file = folder / "result.json"
    if not file.is_file():
        return None
    result = read_json_object(file, remedy=COPIED)
    _check_object(file, "metrics", result.get("metrics"))
    tables = result.get("tables") or {}
    if isinstance(tables, list) and all(isinstance(one, dict) and "rows" in one for one in tables):
        tables = {i: one["rows"] for i, one in enumerate(tables)}
    rows_of = tables.values() if isinstance(tables, dict) else [None]
    if not all(isinstance(rows, list) and all(isinstance(row, dict) for row in rows) for rows in rows_of):
        raise ValueError(f"{file}: tables must be lists of rows, each an object; {COPIED}")
    return result


def _check_object(file: Path, name: str, value: Any) -> None:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{file}: {name} must be an object, got {type(value).__name__}; {COPIED}")
