"""From what the parts of the reproduction left to papers/results/guidance.json: its tables, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attnlab.provenance import provenance, write_json
from papers.guidance.tables import ELECTRA_RUN, RUN, made_tables

__all__ = ["NOTES", "assemble"]

# What tells rows of a table apart; of several with the same, the last counts.
KEYS = {
    "runs": RUN,
    "curves": RUN,
    "evaluations": (*RUN, "at"),
    "finetuned_runs": ("training", "task", "arm", "seed"),
    "electra_runs": ELECTRA_RUN,
    "electra_curves": ELECTRA_RUN,
    "translation_runs": ("arm", "seed"),
    "translation_curves": ("arm", "seed"),
    "translation_evaluations": ("arm", "seed", "at"),
    "bleu": ("arm", "seed"),
}
NOTES = {
    "summary": "Means over the seeds.",
    "settings": "What was trained; batch counts texts, tokens those of a batch of translations.",
    "tuning": "Every learning rate with every warm-up (a share of the planned updates), with and without guidance. "
    "loss: of masked tokens in held-out articles, at the last update that all arms of a seed reached in their time.",
    "large_tuning": "As tuning, of an earlier run with larger batches, some cut short by their time.",
    "large_convergence": "As convergence, of that run.",
    "large_ag_loss": "As ag_loss, of that run.",
    "convergence": "The arms that are best on the first seed, over the seeds. loss: held-out, at the run's last look. "
    "steps: updates until the training loss (mean of the last 2 %) reaches the last one of the model without "
    "guidance; for that model, all updates. mlm_drop: as in ag_loss, empty where the loss never came so low.",
    "ag_loss": "Shares of the training, counted in updates. converged: 95 % of the fall of L_AG is done. drop: the MLM "
    "loss is half a nat below that of guessing by frequency, where it would stay for long.",
    "finetuned": "Development accuracy in %, of models pretrained with the same learning rate and warm-up.",
    "electra": "loss: generator's and detector's, the latter times 50, the mean of the last 2 %. steps: updates to the "
    "last loss of the unguided model, all of them where that was not reached.",
    "translation": "loss: training, label-smoothed, the mean of the last 2 % of updates; valid_nll without smoothing.",
    "low_resource": "The loss of masked tokens in held-out texts.",
    "ablations": "As tuning, one setting of the best guided arm changed at a time.",
}


def assemble(work: Path, out: Path | None, *, config: Mapping[str, Any], keep: Path | None = None) -> dict[str, Any]:
    """Gather every part's JSON below ``work`` (and the tables in ``keep``, an earlier result) and write ``out``."""
    tables, where, trained = _gathered(work, keep)
    made = {"settings": settings(trained), **made_tables(tables)}
    result = {
        "name": "guidance",
        "paper": "AG",
        # What was asked for, and what each part was trained with.
        "config": {**config, "trained": trained},
        "seed": 0,
        # Where the last part was trained, which need not be here.
        **where,
        "notes": NOTES,
        "tables": {name: rows for name, rows in made.items() if rows},
        # What the tables were made from, so that a later run can add to it.
        "raw": tables,
    }
    if out is not None:
        write_json(out, result)
    return result


def settings(trained: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The size of each part's models and batches, and the updates that were planned."""
    rows = []
    for part, config in sorted(trained.items()):
        own = config.get("base", config)
        told = {name: own.get(name) for name in ("layers", "width", "heads", "length", "batch", "tokens", "dropout")}
        rows.append({"part": part, **told, "updates": own.get("steps")})
    return rows


def _gathered(work: Path, keep: Path | None) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any], dict[str, Any]]:
    """(the rows of every table, versions and device of the last part, the settings of every part)."""
    found: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {name: {} for name in KEYS}
    where, trained = provenance(), dict[str, Any]()
    contents: list[Mapping[str, Iterable[dict[str, Any]]]] = []
    if keep is not None and keep.exists():
        before = json.loads(keep.read_text(encoding="utf-8"))
        contents.append(before.get("raw", {}))
        where = {name: before[name] for name in where if name in before}
        trained = dict(before.get("config", {}).get("trained", {}))
    for path in sorted(p for p in work.rglob("*.json") if p.parent.name != "steps"):
        part = json.loads(path.read_text(encoding="utf-8"))
        contents.append(part.get("tables", {}))
        facts = part.get("facts", {})
        where = facts.get("provenance", where)
        if "config" in facts:
            trained[path.stem] = facts["config"]
    for content in contents:
        for name, keys in KEYS.items():
            for row in content.get(name, []):
                found[name][tuple(row.get(key) for key in keys)] = row
    return {name: list(rows.values()) for name, rows in found.items() if rows}, where, trained
