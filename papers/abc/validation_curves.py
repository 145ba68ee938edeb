"""Losses on a validation set during training: how long models were trained, and how flat their curves end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from papers.abc.summaries import Rows

__all__ = ["FLAT", "ValidationCurves", "curve_ends", "curves_of", "sets_of", "with_curves"]

# {seed: {update: loss}}
ValidationCurves = dict[int, dict[int, float]]
# A curve is flat whose loss fell by less than this many percent in the last part of the training.
FLAT = 1.0


def curves_of(rows: Rows, *, data: str | None = None) -> dict[str, ValidationCurves]:
    """Each model's losses on the validation set (of one corpus, where there are several) by seed and update."""
    curves: dict[str, ValidationCurves] = {}
    for row in rows:
        if data in (None, row["data"]) and row["nll"] is not None:
            curves.setdefault(row["variant"], {}).setdefault(row["seed"], {})[row["step"]] = row["nll"]
    return curves


def sets_of(rows: Rows, *, data: str | None = None) -> dict[str, dict[int, str]]:
    """What each model was trained beside, by seed; a later training counts."""
    sets: dict[str, dict[int, str]] = {}
    for row in rows:
        if data in (None, row["data"]) and "set" in row:
            sets.setdefault(row["variant"], {})[row["seed"]] = row["set"]
    return sets


def curve_ends(rows: Rows) -> Rows:
    """How flat the curves were at the end: each model's last loss on the validation set, and what it was before.

    ``fell`` is the difference in percent over the last sixth of the training, between evaluations by interpolation.
    """
    ends = []
    for data, variant, seed in dict.fromkeys((row["data"], row["variant"], row["seed"]) for row in rows):
        curve = curves_of([r for r in rows if r["variant"] == variant and r["seed"] == seed], data=data).get(
            variant, {}
        )
        steps = sorted(curve.get(seed, {}))
        losses = [curve[seed][step] for step in steps]
        # A curve of one point has no end.
        before = float(np.interp(steps[-1] * 5 / 6, steps, losses)) if len(steps) > 1 else None
        ends.append(
            {
                "data": data,
                "variant": variant,
                "seed": seed,
                "step": steps[-1] if steps else None,
                "nll": losses[-1] if steps else None,
                "nll_before": before,
                "fell": 100 * (1 - losses[-1] / before) if before is not None else None,
                "lowest": min(losses, default=None),
            }
        )
    return ends


def with_curves(rows: Rows, validation: Rows, *, data: str) -> Rows:
    """The rows (one for each ``variant``) with how long their models were trained and whether their curves are flat."""
    rows_with_curves = []
    for row in rows:
        mine = [x for x in curve_ends(validation) if (x["data"], x["variant"]) == (data, row["variant"]) and x["step"]]
        falls = [x["fell"] for x in mine if x["fell"] is not None]
        curve = {"updates": min(x["step"] for x in mine), "nll": _mean_of([x["nll"] for x in mine])} if mine else {}
        if falls:
            curve |= {"fell": _mean_of(falls), "flat": max(falls) < FLAT}
        rows_with_curves.append({**row, **curve})
    return rows_with_curves


def _mean_of(values: Sequence[float | None]) -> float | None:
    some = [v for v in values if v is not None]
    return sum(some) / len(some) if some else None
