"""The tables of benchmarks/convert.py: rows by seed, their means, and the plan beside the other arms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import storing  # noqa: F401  the repository on the path

from attnlab.evaluation.intervals import mean_interval, paired_interval

__all__ = ["ROWS", "TASKS", "against", "means", "row_of", "with_seeds"]

Row = dict[str, Any]
ROWS = "conversion"
# The task's name in an evaluation, its column, and whether it is a loss.
TASKS = {"loss": ("loss", True), "book": ("book_loss", True), "continuation": ("continuation", True),
         "lambada": ("lambada", False), "needle": ("needle", False)}  # fmt: skip
# Columns of which several seeds have a mean and an interval, and those that all seeds share.
MEASURED = ("loss", "loss_above", "book_loss", "book_loss_above", "continuation", "continuation_above", "lambada",
            "needle", "training_tokens", "tokens_per_second")  # fmt: skip
SHARED = ("budget", "cache", "softmax_heads")
WITH_INTERVAL = ("loss_above", "continuation_above", "needle")


def row_of(labels: Row, scores: Mapping[str, Sequence[float]], teacher: Mapping[str, Sequence[float]]) -> Row:
    """A line of the table from the values of single windows and cases; losses also above the teacher's."""
    row = dict(labels)
    for task, (column, is_loss) in TASKS.items():
        if task in scores:
            row[column] = fmean(scores[task])
            if is_loss:
                row[f"{column}_above"] = row[column] - fmean(teacher[task])
    return row


def with_seeds(results: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Earlier results, in which rows of students had no seed of their own: it was that of the whole run."""
    if results is None:
        return None
    trained = [row for row in results["tables"].get(ROWS, []) if row.get("training_tokens")]
    for row in trained:
        row.setdefault("seed", results["config"].get("seed", 0))
    return results


def means(rows: Sequence[Row]) -> list[Row]:
    """One row for each model and budget: means over seeds, with 95 % intervals (Student's) where there are several."""
    by_arm: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        by_arm.setdefault((row["model"], row.get("budget")), []).append(row)
    return [_mean(own) for own in by_arm.values()]


def _mean(rows: Sequence[Row]) -> Row:
    made: Row = {"model": rows[0]["model"], "seeds": len(rows)}
    made |= {key: rows[0][key] for key in SHARED if rows[0].get(key) is not None}
    for column in MEASURED:
        values = [row[column] for row in rows if row.get(column) is not None]
        if values:
            interval = mean_interval(values)
            made[column] = interval.value
            if column in WITH_INTERVAL and interval.low is not None:
                made[f"{column}_interval"] = [interval.low, interval.high]
    return made


def against(scores: Mapping[str, Sequence[Mapping[str, Sequence[float]]]], first: str) -> Iterator[Row]:
    """How far arm ``first`` is from every other, with intervals over the same windows or cases.

    ``scores`` has for each arm one mapping a seed, {task: values}; a window's value is its mean over seeds.
    """
    for other in scores:
        for task, (column, is_loss) in TASKS.items():
            own, theirs = ([seed[task] for seed in scores[arm] if task in seed] for arm in (first, other))
            if other == first or not own or not theirs:
                continue
            pair = [[fmean(values) for values in zip(*of_arm, strict=True)] for of_arm in (own, theirs)]
            interval = paired_interval(*pair)
            yield {
                "arm": other, "task": column, "better": "lower" if is_loss else "higher",
                "difference": interval.value,
                "interval": None if interval.low is None else [interval.low, interval.high],
                "cases": interval.n, "seeds": len(own), "seeds_of_arm": len(theirs),
            }  # fmt: skip
