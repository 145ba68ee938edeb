"""What trainings one at a time share: which of them a results file may hold beside each other."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from attnlab.training import read_metrics
from papers.common.row_store import read_results, write_results

__all__ = ["check_same_sizes", "held_out_curve", "keep_tables"]

# Settings that may differ between the arms of a results file.
OWN = ("models", "seeds", "streams", "tune_streams", "compile", "eval_batch")


def check_same_sizes(config: Mapping[str, Any], work: Path, out: Path, *, replaces: bool) -> None:
    """Refuse to add an arm to those of other sizes or lengths, in the folder or in the results file."""
    wanted = _comparable(config)
    for path in (work / "run.json", *(() if replaces else (out,))):
        known = _comparable((read_results(path) or {}).get("config") or wanted)
        other = [name for name in wanted if known.get(name) != wanted[name]]
        if other:
            name = other[0]
            raise ValueError(
                f"{path} has models with {name}={known.get(name)!r}, this one has {name}={wanted[name]!r}: they are "
                "not compared. Name another folder and --out, or put new results in the place of old ones by --replace"
            )


def keep_tables(out: Path, kept: Collection[str]) -> None:
    """Leave only some tables of a results file, so that others are put in the place of the rest."""
    result = read_results(out)
    if result is None:
        return
    tables, made_by = ({k: v for k, v in result.get(part, {}).items() if k in kept} for part in ("tables", "made_by"))
    if tables:
        write_results(out, {**result, "tables": tables, "made_by": made_by, "config": None})
    else:
        out.unlink()


def held_out_curve(folder: Path, metric: str) -> list[dict[str, Any]]:
    """The points of a run folder's curve: step and loss."""
    losses = {line["step"]: line["values"][metric] for line in read_metrics(folder) if line["kind"] == "eval"}
    return [{"step": step, "loss": loss} for step, loss in sorted(losses.items())]


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in which arms must agree, as a JSON file has them."""
    return {name: value for name, value in _flat(json.loads(json.dumps(config))) if name not in OWN}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
