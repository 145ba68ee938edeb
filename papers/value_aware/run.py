"""``python -m papers value-aware``: Tables 1 and 2 and Figures 1 to 3 of Gupta and Berant (OVA).

Five trainings run at once, each in a process of its own: a masked LM continued at a greater length and, as the control,
at its own; and three causal LMs that differ in their kernel. Each then puts approximations in place of its attention.
Every row is on disk as soon as it is found, so that what is finished is kept when time runs out.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from attnlab.provenance import provenance, write_json
from papers.common.results import beside_paper, merge_results
from papers.common.row_store import Part, gather
from papers.value_aware.config import CONFIGS, Corpus, Meeting, ValueAwareConfig, plan_steps

__all__ = ["CONFIGS", "KEYS", "NAME", "ValueAwareConfig", "collect", "joined", "part_names", "reproduce", "run_part"]

NAME = "value-aware"
ARMS = ("long", "short")
# What tells the rows of a table apart, and so which row of the paper's lies beside ours.
KEYS = {
    "table_1": ["mechanism"],
    "table_2": ["kernel", "mechanism"],
    "figure_1": ["family", "r", "rounds"],
    "figure_1_few": ["family", "r"],
    "figure_2": ["kernel", "r"],
    "figure_2_few": ["kernel", "family", "r"],
    "figure_3": ["model"],
    "figure_3_curves": ["model", "step"],
    "lm_curves": ["kernel", "step"],
}
# The tables of the masked LMs.
MASKED = ("table_1", "figure_1", "figure_1_few", "figure_3", "figure_3_curves")
NOTES = {
    "table_1": "MLM error in % of the model continued at mlm_long, on held-out enwik8 and WikiText-103 valid.",
    "table_2": "perplexity is per word, as the paper's; perplexity_per_token per token of our 8k vocabulary. Text is "
    "lower-cased, @-@ is undone, and words that are <unk> in WikiText-103 are context but are not predicted. Trained "
    "on enwik8's text, not on WikiText-103. softmax names each kernel's exact attention.",
    "figure_1_few": "A few rows only: between 1 and d + 1 keys the value-aware ones are searched for.",
    "figure_2_few": "A few windows only: between 1 and d + 1 keys the value-aware ones are searched for.",
}


def part_names(config: ValueAwareConfig, only: str | None = None) -> list[str]:
    """The parts, each a process: mlm-long, mlm-short, lm-exp, ...; ``only`` is lm or mlm."""
    if only not in (None, "lm", "mlm"):
        raise ValueError(f"only must be lm or mlm, got {only!r}")
    names = [f"mlm-{arm}" for arm in ARMS] + [f"lm-{kernel}" for kernel in config.kernels]
    return [name for name in names if only is None or name.startswith(f"{only}-")]


def run_part(name: str, config: ValueAwareConfig, corpus: Path, model: Path, work: Path) -> None:
    """One part from its training to its last row, which it leaves in ``work``."""
    import torch

    from papers.value_aware.causal_lm import run_lm
    from papers.value_aware.masked_lm import run_mlm

    torch.set_num_threads(max(1, min(2, (os.cpu_count() or 1) // 5)))
    group, _, member = name.partition("-")
    shared: dict[str, Any] = {
        "config": config,
        "corpus": Corpus(corpus),
        "part": Part(work / f"{name}.json"),
        "meeting": Meeting(work, name),
        "folder": work / f"run-{name}",
    }
    if group == "lm":
        run_lm(member, **shared)
    else:
        run_mlm(member, model=model, **shared)


def reproduce(
    config: ValueAwareConfig,
    *,
    corpus: Path | str,
    model: Path | str,
    out: Path | str,
    work: Path | str,
    only: str | None = None,
    seconds: float | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Run the parts at once and write ``out``, anew with every row; what is not done after ``seconds`` is ended.

    ``corpus`` is a folder of token stores, ``model`` that of a masked LM, ``work`` an empty folder for the runs; with
    ``resume``, that of a run which was ended: trainings go on from their checkpoints, and its rows are kept. Rows that
    ``out`` held before and this run does not have stay in it, but for those of masked LMs that are trained anew.
    """
    out, work = Path(out), Path(work)
    names = part_names(config, only)
    for name in names:
        if (work / f"{name}.json").exists() and not resume:
            raise ValueError(f"{work} holds an earlier run ({name}.json); resume it or name an empty folder")
    work.mkdir(parents=True, exist_ok=True)
    before = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
    made_by = provenance()
    context = multiprocessing.get_context("spawn")
    parts = {
        name: context.Process(target=run_part, args=(name, config, Path(corpus), Path(model), work), name=name)
        for name in names
    }
    started = time.monotonic()
    for part in parts.values():
        part.start()
    try:
        shown = None
        while any(part.is_alive() for part in parts.values()):
            _lead(parts, config, work)
            found = collect(config, work, names)
            if found["tables"] != shown:
                shown = found["tables"]
                write_json(out, joined(before, found | made_by))
            if seconds is not None and time.monotonic() - started > seconds:
                break
            time.sleep(0.5)
    finally:
        for part in parts.values():
            if part.is_alive():
                part.kill()
            part.join()
    found = collect(config, work, names)
    found["unfinished"] = {name: part.exitcode for name, part in parts.items() if part.exitcode != 0}
    found["seconds"] = round(time.monotonic() - started, 1)
    write_json(out, joined(before, found | made_by))
    return found | made_by


def collect(config: ValueAwareConfig, work: Path, names: Sequence[str]) -> dict[str, Any]:
    """What the parts have found so far, with the paper's numbers beside ours."""
    tables, facts = gather(work, names)
    with_paper = {
        table: beside_paper(tables[table], results=NAME, table=table, keys=KEYS[table])
        for table in KEYS
        if table in tables
    }
    return {
        "name": NAME,
        "paper": "OVA",
        "config": asdict(config),
        "seed": config.seed,
        "keys": KEYS,
        "notes": NOTES,
        "parts": facts,
        "intervals": _intervals(tables.get("figure_3", [])),
        "tables": with_paper,
    }


def joined(before: Mapping[str, Any] | None, found: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier result and what was found since; masked LMs trained anew leave no row of those before them."""
    if before is None:
        return dict(found)
    stale = MASKED if any(name.startswith("mlm-") for name in found["parts"]) else ()
    kept = {name: rows for name, rows in before["tables"].items() if name not in stale}
    merged = merge_results({**before, "tables": kept}, found)
    # In the order of the paper's tables, whichever were made anew.
    tables = {name: merged["tables"][name] for name in KEYS if name in merged["tables"]}
    return merged | {"tables": tables, "parts": before.get("parts", {}) | found["parts"]}


def _intervals(figure_3: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """How much lower the long model's error is, 95 %: masked tokens are right or wrong, and each model has its own."""
    by = {row["model"]: row for row in figure_3}
    if not {"long", "short"} <= by.keys():
        return {}
    long, short = by["long"], by["short"]
    gap = short["mlm_error"] - long["mlm_error"]
    spread = sum(row["mlm_error"] * (100 - row["mlm_error"]) / row["predicted"] for row in (long, short))
    around = 1.96 * math.sqrt(spread)
    return {"ova-longer-is-better": [gap - around, gap + around]}


def _lead(parts: Mapping[str, BaseProcess], config: ValueAwareConfig, work: Path) -> None:
    """Let the parts measure their speeds together, then tell them the number of steps."""
    living = [name for name, part in parts.items() if part.is_alive()]
    if all((work / f"{name}.ready").exists() for name in living):
        (work / "go").touch()
    if (work / "steps.json").exists() or not all((work / f"{name}.rate").exists() for name in living):
        return
    rates = {name: json.loads((work / f"{name}.rate").read_text()) for name in living}
    share = {"lm": config.lm_share, "mlm": 1 - config.lm_share}
    write_json(work / "steps.json", plan_steps(rates, seconds=config.train_seconds, share=share))
