"""``python -m papers value-aware``: Tables 1 and 2 and Figures 1 to 3 of Gupta and Berant (OVA).

Five trainings run at once, each in a process of its own: a masked LM continued at a greater length and, as the control,
at its own; and three causal LMs that differ in their kernel. Each then puts approximations in place of its attention.
Every row is on disk as soon as it is found, so that what is finished is kept when time runs out.
"""

from __future__ import annotations

import argparse
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

from attnlab.provenance import check_writable, write_json
from papers.common.folders import Experiment, add_out, beside_paper
from papers.common.row_store import Part, gather, make_results, merge_results, read_results, write_results
from papers.value_aware import PAPER
from papers.value_aware.config import CONFIGS, KEYS, NAME, NOTES, ValueAwareConfig

__all__ = ["EXPERIMENTS", "collect", "merged_with", "part_names", "reproduce", "run_part"]

ARMS = ("long", "short")
# The tables of the masked LMs.
MASKED = ("table_1", "figure_1", "figure_1_few", "figure_3", "figure_3_curves")


def part_names(config: ValueAwareConfig, only: str | None = None) -> list[str]:
    """The parts, each a process: mlm-long, mlm-short, lm-exp, ...; ``only`` is lm or mlm."""
    if only not in (None, "lm", "mlm"):
        raise ValueError(f"only must be lm or mlm, got {only!r}")
    names = [f"mlm-{arm}" for arm in ARMS] + [f"lm-{kernel}" for kernel in config.kernels]
    return [name for name in names if only is None or name.startswith(f"{only}-")]


def run_part(name: str, config: ValueAwareConfig, corpus: Path, model: Path, work: Path) -> None:
    """One part from its training to its last row, which it leaves in ``work``."""
    import torch

    from papers.common.wiki_corpus import WikiCorpus
    from papers.value_aware.causal_lm import run_lm
    from papers.value_aware.masked_lm import run_mlm
    from papers.value_aware.training import Rendezvous

    torch.set_num_threads(max(1, min(2, (os.cpu_count() or 1) // 5)))
    group, _, member = name.partition("-")
    shared: dict[str, Any] = {
        "config": config,
        "corpus": WikiCorpus(corpus),
        "part": Part(work / f"{name}.json", keys=KEYS),
        "rendezvous": Rendezvous(work, name),
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
    before = read_results(out)
    context = multiprocessing.get_context("spawn")
    parts = {
        name: context.Process(target=run_part, args=(name, config, Path(corpus), Path(model), work), name=name)
        for name in names
    }
    started = time.monotonic()
    for part in parts.values():
        part.start()
    try:
        written = None
        while any(part.is_alive() for part in parts.values()):
            _plan_together(parts, config, work)
            result = collect(config, work, names)
            if result["tables"] != written:
                written = result["tables"]
                write_results(out, merged_with(before, result))
            if seconds is not None and time.monotonic() - started > seconds:
                break
            time.sleep(0.5)
    finally:
        for part in parts.values():
            if part.is_alive():
                part.kill()
            part.join()
    result = collect(config, work, names)
    result["unfinished"] = {name: part.exitcode for name, part in parts.items() if part.exitcode != 0}
    result["seconds"] = round(time.monotonic() - started, 1)
    write_results(out, merged_with(before, result))
    return result


def collect(config: ValueAwareConfig, work: Path, names: Sequence[str]) -> dict[str, Any]:
    """The results of the rows that the parts have written so far, with the paper's numbers beside ours."""
    rows = gather({name: work / f"{name}.json" for name in names})
    with_paper = {
        table: beside_paper(rows.tables[table], results=NAME, table=table, keys=KEYS[table])
        for table in KEYS
        if table in rows.tables
    }
    return make_results(
        NAME, PAPER, with_paper, config=asdict(config), seed=config.seed, rows_of=rows,
        keys=KEYS, notes=NOTES, parts=rows.facts, intervals=_intervals(rows.tables.get("figure_3", [])),
    )  # fmt: skip


def merged_with(before: Mapping[str, Any] | None, result: Mapping[str, Any]) -> dict[str, Any]:
    """Earlier results and new ones; masked LMs that are trained anew leave no row of those before them."""
    if before is None:
        return dict(result)
    replaced = MASKED if any(name.startswith("mlm-") for name in result["parts"]) else ()
    kept = {name: rows for name, rows in before["tables"].items() if name not in replaced}
    merged = merge_results({**before, "tables": kept}, result)
    # In the order of the paper's tables.
    tables = {name: merged["tables"][name] for name in KEYS if name in merged["tables"]}
    return merged | {"tables": tables, "parts": before.get("parts", {}) | result["parts"]}


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


def _plan_together(parts: Mapping[str, BaseProcess], config: ValueAwareConfig, work: Path) -> None:
    """Let the parts measure their speeds at the same time, then write the number of steps for them."""
    living = [name for name, part in parts.items() if part.is_alive()]
    if all((work / f"{name}.ready").exists() for name in living):
        (work / "go").touch()
    if (work / "steps.json").exists() or not all((work / f"{name}.rate").exists() for name in living):
        return
    rates = {name: json.loads((work / f"{name}.rate").read_text()) for name in living}
    share = {"lm": config.lm_share, "mlm": 1 - config.lm_share}
    from papers.value_aware.training import plan_steps

    write_json(work / "steps.json", plan_steps(rates, seconds=config.train_seconds, share=share))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", type=Path, required=True, help="the folder that wiki-corpus wrote")
    parser.add_argument("--model", type=Path, help="the masked LM to continue (default: the shipped one)")
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--work", type=Path, help="an empty folder for the runs")
    work.add_argument("--resume", type=Path, metavar="DIR", help="go on with the runs in this folder")
    add_out(parser, NAME)
    parser.add_argument("--config", choices=CONFIGS, default="quick", help="paper: A.2 and Table 4, for days")
    parser.add_argument("--only", choices=("lm", "mlm"), help="one half; the other's results are kept")
    parser.add_argument("--seconds", type=float, help="stop after this long; what is finished is kept")


def _run(options: argparse.Namespace) -> Path:
    from attnlab.adapters.load import SHIPPED

    check_writable(options.out)
    reproduce(
        CONFIGS[options.config],
        corpus=options.corpus,
        model=options.model or SHIPPED,
        out=options.out,
        work=options.resume or options.work,
        only=options.only,
        seconds=options.seconds,
        resume=options.resume is not None,
    )
    return options.out


EXPERIMENTS: dict[str, Experiment] = {
    "value-aware": Experiment(
        "Value-aware approximation: its Tables 1 and 2 and Figures 1 to 3.",
        _arguments,
        _run,
        "--corpus runs/wiki --work runs/value-aware",
    ),
}
