"""The results file of ``python -m papers value-aware``: the parts' rows and notes, and earlier results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attnlab.progress import note
from papers.common.folders import beside_paper
from papers.common.row_store import gather, make_results, merge_results
from papers.value_aware import PAPER
from papers.value_aware.config import KEYS, NAME, ValueAwareConfig

__all__ = ["collect", "merged_with", "notes_of"]

# The tables of the masked LMs.
MASKED = ("table_1", "figure_1", "figure_1_few", "figure_3", "figure_3_curves")
# Those of the causal LMs, which may have several seeds.
CAUSAL = ("table_2", "figure_2", "figure_2_few", "lm_curves")
VOCABULARY = {
    "words": "Trained and tested on WikiText-103 as published, by whole words; perplexity_per_token is the same.",
    "pieces": "perplexity_per_token is per token of the corpus's vocabulary of pieces. Text is lower-cased, @-@ is "
    "undone, and words that are <unk> in WikiText-103 are context but are not predicted. Trained on enwik8's text, not "
    "on WikiText-103.",
}


def notes_of(config: ValueAwareConfig) -> dict[str, str]:
    """What the tables mean, with the share of the held-out text that each is scored on."""
    few = "only: between 1 and d + 1 keys the value-aware ones are searched for."
    return {
        "table_1": "MLM error in % of the model continued at mlm_long, on held-out enwik8 and WikiText-103 valid. "
        + _scored_on(config.table_every, "batch"),
        "table_2": f"perplexity is per word, as the paper's. {VOCABULARY[config.lm_vocabulary]} softmax names each "
        "kernel's exact attention.",
        "figure_1": _scored_on(config.sweep_every, "batch"),
        "figure_1_few": f"A few rows {few}",
        "figure_2": _scored_on(config.sweep_every, "batch of windows"),
        "figure_2_few": f"A few windows {few}",
    }


def _other_settings(before: Mapping[str, Any], result: Mapping[str, Any]) -> str | None:
    """A setting of the causal LMs in which results differ."""
    old, new = (json.loads(json.dumps(one.get("config") or {})) for one in (before, result))
    return next((name for name in new if name.startswith("lm_") and old.get(name) != new[name]), None)


def _scored_on(every: int, unit: str) -> str:
    return f"Scored on every {unit}." if every == 1 else f"Scored on one {unit} in {every}."


def collect(config: ValueAwareConfig, work: Path, names: Sequence[str]) -> dict[str, Any]:
    """The results of the rows that the parts have written so far, with the paper's numbers beside ours."""
    rows = gather({name: work / f"{name}.json" for name in names})
    with_paper = {
        table: beside_paper(
            rows.tables[table], results=NAME, table=table, keys=[key for key in KEYS[table] if key != "seed"]
        )
        for table in KEYS
        if table in rows.tables
    }
    return make_results(
        NAME, PAPER, with_paper, config=asdict(config), seed=config.seed, rows_of=rows,
        keys=KEYS, notes=notes_of(config), parts=rows.facts,
    )  # fmt: skip


def merged_with(before: Mapping[str, Any] | None, result: Mapping[str, Any]) -> dict[str, Any]:
    """Earlier results and new ones; masked LMs that are trained again leave no row of the earlier ones.

    Neither do causal LMs of other settings: those of one file differ in kernel and seed only.
    """
    if before is None:
        return dict(result)
    groups = {"mlm-": MASKED, "lm-": CAUSAL}
    again = {group for group in groups if any(name.startswith(group) for name in result["parts"])}
    if "lm-" in again and (other := _other_settings(before, result)) is None:
        again.remove("lm-")
    elif "lm-" in again:
        note(f"earlier causal LMs had another {other}; their rows are not kept")
    replaced = [table for group in again for table in groups[group]]
    kept = {name: rows for name, rows in before["tables"].items() if name not in replaced}
    merged = merge_results({**before, "tables": kept}, result)
    # In the order of the paper's tables.
    tables = {name: merged["tables"][name] for name in KEYS if name in merged["tables"]}
    return merged | {"tables": tables, "parts": before.get("parts", {}) | result["parts"]}
