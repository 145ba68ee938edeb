"""What ``python -m papers guidance-arm`` computes from its arms: each of them at its best learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

__all__ = ["ARM_NOTES", "FLAT", "derived"]

Rows = list[dict[str, Any]]
# The share of the updates at the end over which a curve's fall is measured, and the fall below which it is flat.
END, FLAT = 0.1, 0.02
ARM_NOTES = {
    "arms": "loss and error: of masked tokens in held-out articles at the end. guided_heads: heads of all layers that "
    "were guided to each pattern.",
    "convergence": "Each arm at the learning rate that is best on its first seed. steps: updates until the held-out "
    "loss reaches the last one of the unguided arm of the same seed; for that arm, all. fell_at_end: by how much the "
    "loss fell in the last tenth of the updates.",
    "finetuned": "Development accuracy in %, the mean over the seeds of fine-tuning.",
}


def derived(tables: Mapping[str, Rows]) -> dict[str, Rows]:
    """``convergence`` and ``finetuned``: the best arms, by seed."""
    arms = tables.get("arms", [])
    best = [row for row in arms if row["lr"] == _best_rate(arms, row)]
    curves = {_key(row): _curve_of(tables.get("curves", []), row) for row in best}
    plain = {_pair(row): row["loss"] for row in best if not row["guided"]}
    convergence = [
        {
            **{name: row[name] for name in ("language", "norm", "guided", "seed", "lr", "loss")},
            "steps": _reached(curves[_key(row)], plain.get(_pair(row)), row),
            "of_steps": row["steps"],
            "fell_at_end": _fall(curves[_key(row)]),
        }
        for row in best
    ]
    tuned = _tuned(tables.get("finetuned_runs", []), {_key(row) for row in best})
    return {name: rows for name, rows in (("convergence", convergence), ("finetuned", tuned)) if rows}


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("language", "norm", "guided", "lr", "seed"))


def _pair(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a guided arm and the unguided one that it is compared with have in common."""
    return tuple(row[name] for name in ("language", "norm", "seed"))


def _best_rate(arms: Rows, like: Mapping[str, Any]) -> float:
    """The rate with the lowest loss on the first seed that was trained, of arms that differ in rate and seed only."""
    same = ("language", "norm", "guided")
    own = [row for row in arms if all(row[name] == like[name] for name in same)]
    first = min(row["seed"] for row in own)
    return min((row for row in own if row["seed"] == first), key=lambda row: row["loss"])["lr"]


def _curve_of(rows: Rows, arm: Mapping[str, Any]) -> list[tuple[int, float]]:
    return sorted((row["step"], row["loss"]) for row in rows if _key(row) == _key(arm))


def _reached(curve: Sequence[tuple[int, float]], loss: float | None, row: Mapping[str, Any]) -> int | None:
    if not row["guided"]:
        return row["steps"]
    return None if loss is None else next((step for step, value in curve if value <= loss), row["steps"])


def _fall(curve: Sequence[tuple[int, float]]) -> float | None:
    if not curve:
        return None
    last = curve[-1][0]
    before = [loss for step, loss in curve if step <= (1 - END) * last]
    return before[-1] - curve[-1][1] if before else None


def _tuned(rows: Rows, best: set[tuple[Any, ...]]) -> Rows:
    names = ("language", "norm", "guided", "task", "seed")
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if _key(row) in best:
            groups.setdefault(tuple(row[name] for name in names), []).append(row["accuracy"])
    return [{**dict(zip(names, key, strict=True)), "accuracy": fmean(v), "runs": len(v)} for key, v in groups.items()]
