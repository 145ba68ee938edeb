"""Looks at a validation set: how long models were trained, and how flat their curves were at the end."""

from __future__ import annotations

from collections.abc import Sequence

from attnlab.experiments.abc.summaries import Rows

__all__ = ["FLAT", "Looks", "last_looks", "looks_of", "with_curves"]

# {seed: {update: loss}}
Looks = dict[int, dict[int, float]]
# A curve is flat whose loss fell by less than this many percent in the last part of the training.
FLAT = 1.0


def looks_of(rows: Rows, *, data: str | None = None) -> dict[str, Looks]:
    """Each model's losses on the validation set (of one corpus, where there are several) by seed and update."""
    found: dict[str, Looks] = {}
    for row in rows:
        if data in (None, row["data"]) and row["nll"] is not None:
            found.setdefault(row["variant"], {}).setdefault(row["seed"], {})[row["step"]] = row["nll"]
    return found


def last_looks(rows: Rows) -> Rows:
    """How flat the curves were at the end: each model's last loss on the validation set, and what it was before.

    ``fell`` is the difference in percent, over the last sixth of the training or a little more.
    """
    found = []
    for key in dict.fromkeys((row["data"], row["variant"], row["seed"]) for row in rows):
        mine = [row for row in rows if (row["data"], row["variant"], row["seed"]) == key]
        # A look soon after another says nothing about how flat the curve is.
        last = max(mine, key=lambda row: row["step"])
        far = [row for row in mine if row["step"] <= 0.85 * last["step"]]
        before = max(far, key=lambda row: row["step"]) if far else None
        known = before is not None and before["nll"] is not None and last["nll"] is not None
        found.append(
            {
                **{name: last[name] for name in ("data", "variant", "seed", "step", "nll")},
                "step_before": before and before["step"],
                "nll_before": before and before["nll"],
                "fell": 100 * (1 - last["nll"] / before["nll"]) if before is not None and known else None,
                "lowest": min((row["nll"] for row in mine if row["nll"] is not None), default=None),
            }
        )
    return found


def with_curves(rows: Rows, looks: Rows, *, data: str) -> Rows:
    """The rows (one for each ``variant``) with how long their models were trained and whether their curves are flat."""
    found = []
    for row in rows:
        mine = [x for x in last_looks(looks) if (x["data"], x["variant"]) == (data, row["variant"])]
        falls = [x["fell"] for x in mine if x["fell"] is not None]
        curve = {"updates": min(x["step"] for x in mine), "nll": _mean_of([x["nll"] for x in mine])} if mine else {}
        if falls:
            curve |= {"fell": _mean_of(falls), "flat": max(falls) < FLAT}
        found.append({**row, **curve})
    return found


def _mean_of(values: Sequence[float | None]) -> float | None:
    some = [v for v in values if v is not None]
    return sum(some) / len(some) if some else None
