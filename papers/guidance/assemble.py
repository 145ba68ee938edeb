"""papers/results/guidance.json from the rows of the study's parts: its tables, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnlab.provenance import provenance
from papers.common.row_store import Gathered, gather, make_results, read_results, write_results
from papers.guidance import PAPER
from papers.guidance.tables import ELECTRA_RUN, RUN, made_tables

__all__ = ["KEYS", "NOTES", "assemble"]

# The columns that identify a row of a table; of several rows with the same values, the last is kept.
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
    "table_11": ("setting", "seed"),
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
    "guidance; for that model, all updates. mlm_drop: as in ag_loss, empty where the loss never came so low. "
    "patterns: those that heads were guided to.",
    "ag_loss": "Shares of the training, counted in updates. converged: 95 % of the fall of L_AG is done. drop: the MLM "
    "loss is half a nat below that of guessing by frequency, where it would stay for long.",
    "finetuned": "Development accuracy in %, of models pretrained with the same learning rate and warm-up. f1: of the "
    "second of two classes; the paper's QQP is F1, as GLUE's server scored its test set.",
    "electra": "loss: generator's and detector's, the latter times 50, the mean of the last 2 %. steps: updates to the "
    "last loss of the unguided model, all of them where that was not reached. patterns: those that heads of the "
    "detector were guided to.",
    "translation": "loss: training, label-smoothed, the mean of the last 2 % of updates; valid_nll without smoothing.",
    "low_resource": "The loss of masked tokens in held-out texts. patterns: those that heads were guided to.",
    "ablations": "As tuning, one setting of the best guided arm changed at a time. patterns: those that heads were "
    "guided to.",
    "table_11": "Rows of Table 11 as the paper trains them; loss: of masked tokens in held-out texts, error: the share "
    "of them that is predicted wrongly. hold: the share of the steps with alpha at alpha0.",
}


def assemble(work: Path, out: Path | None, *, config: Mapping[str, Any], keep: Path | None = None) -> dict[str, Any]:
    """Gather every part's JSON below ``work`` (and the rows in ``keep``, an earlier result) and write ``out``."""
    rows, where, trained = _gathered(work, keep)
    tables = {"settings": settings(trained), **made_tables(rows.tables)}
    result = make_results(
        "guidance",
        PAPER,
        {name: table for name, table in tables.items() if table},
        # The settings of this run, and those that each part was trained with.
        config={**config, "trained": trained},
        rows_of=rows,
        # Where the last part was trained, which may be another machine.
        made=where,
        notes=NOTES,
        # The rows that the tables are made from, so that a later run can add to them.
        raw=rows.tables,
    )
    # The sources are those of the raw rows.
    result["made_by"] = rows.compact_sources()
    if out is not None:
        write_results(out, result)
    return result


def settings(trained: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The size of each part's models and batches, and the updates that were planned."""
    rows = []
    for part, config in sorted(trained.items()):
        own = config.get("base", config)
        sizes = {name: own.get(name) for name in ("layers", "width", "heads", "length", "batch", "tokens", "dropout")}
        rows.append({"part": part, **sizes, "updates": own.get("steps")})
    return rows


def _gathered(work: Path, keep: Path | None) -> tuple[Gathered, dict[str, Any], dict[str, Any]]:
    """(the rows of every table, versions and device of the last part, the settings of every part)."""
    rows, where, trained = Gathered(), provenance(), dict[str, Any]()
    before = None if keep is None else read_results(keep)
    if before is not None:
        rows.add_results(before, before.get("raw", {}), keys=KEYS)
        where = {name: before[name] for name in (*where, "command") if name in before}
        trained = dict(before.get("config", {}).get("trained", {}))
    # Not those of recorded steps, nor of the run folders of Table 11.
    paths = sorted(
        path
        for path in work.rglob("*.json")
        if path.parent.name != "steps" and "runs" not in path.relative_to(work).parts
    )
    parts = gather({str(path): path for path in paths}, keys=KEYS)
    for name, facts in parts.facts.items():
        where = facts.get("provenance", where)
        if "config" in facts:
            trained[Path(name).stem] = facts["config"]
    known = {table: parts.tables[table] for table in KEYS if table in parts.tables}
    rows.add(known, sources=parts.sources, made_by=parts.made_by, keys=KEYS)
    return rows, where, trained
