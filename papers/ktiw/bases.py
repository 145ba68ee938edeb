"""Does a head's initialisation decide whether copying permutations is learned, or that of the rest of the model?

Figure 6 draws heads for one base model: its embeddings, encoder and decoder. Here single heads are trained on several
bases, every head on every base, all on the same data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from attnlab.devices import best_device
from attnlab.progress import each
from papers.common.row_store import Part, gather, make_results, write_results
from papers.ktiw.config import PermutationsConfig
from papers.ktiw.permutations import LEARNED, figure_3_tasks, final_accuracy, seed_training, with_heads
from papers.ktiw.seeds import train_one

__all__ = ["NAME", "by_base", "run_bases", "write_bases"]

NAME = "ktiw-bases"
KEYS = {"trainings": ["base", "head", "updates"]}


def run_bases(config: PermutationsConfig, part: Part, *, bases: Sequence[int], heads: Sequence[int]) -> None:
    """Train each head alone on each base for ``head_steps`` updates; what ``part`` has already is not trained again.

    A training ends early when its accuracy has been above ``LEARNED`` for three evaluations.
    """
    task = figure_3_tasks(config)["permutations", "hard"]
    how = replace(seed_training(config, config.head_steps), enough=LEARNED)
    # Heads in turn, so that an ended run has about as many of them on every base.
    for head, base in each([(head, base) for head in heads for base in bases]):
        labels = {"base": base, "head": head, "updates": config.head_steps}
        if part.has("trainings", **labels):
            continue
        model = with_heads(replace(config, base=base), task, [head])
        curves = train_one(model, task, how=how, device=best_device())
        final = float(final_accuracy(curves)[0])
        part.row(
            "trainings", **labels, accuracy=round(final, 4), learned=final > LEARNED,
            ended_at=curves.steps[-1], seconds=round(curves.seconds, 1),
        )  # fmt: skip


def by_base(trainings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each base how many heads were trained on it, how many of them learned, and the least and most accurate."""
    rows = []
    for base in sorted({row["base"] for row in trainings}):
        mine = [row for row in trainings if row["base"] == base]
        accuracies = [row["accuracy"] for row in mine]
        learned = sum(row["learned"] for row in mine)
        rows.append(
            {"base": base, "heads": len(mine), "learned": learned, "least": min(accuracies), "most": max(accuracies)}
        )
    return rows


def write_bases(out: Path, *, config: PermutationsConfig, bases: Sequence[int], heads: Sequence[int]) -> dict[str, Any]:
    """Train what is missing and write the results file; the rows lie beside it until all are there."""
    path = out.with_suffix(".rows")
    run_bases(config, Part(path, keys=KEYS), bases=bases, heads=heads)
    rows = gather({NAME: path})
    trainings = rows.tables["trainings"]
    seconds = round(sum(row["seconds"] for row in trainings), 1)
    result = make_results(
        NAME, "ktiw", rows.tables, config=asdict(config), seed=config.seed, rows_of=rows, seconds=seconds
    )
    result["tables"]["by_base"] = by_base(trainings)
    written = write_results(out, result)
    path.unlink()
    return written
