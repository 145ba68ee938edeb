"""The parts of the reproduction of Effective, each in a process of its own, and the results file of what they wrote."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from attnlab.progress import note
from attnlab.provenance import write_json
from papers.common.folders import beside_paper
from papers.common.row_store import Part, gather, make_results, read_results, write_results
from papers.effective import PAPER
from papers.effective.config import KEYS, NAME, NOTES, PRETRAINED, EffectiveConfig

__all__ = ["collect", "part_names", "public_settings", "run_parts"]

TIMING = "timing"


def part_names(config: EffectiveConfig, only: str | Sequence[str] | None = None) -> list[str]:
    """The parts, each a process: timing, then a task each; ``only`` names some of them.

    >>> part_names(EffectiveConfig(tasks=("RTE",)))
    ['timing', 'RTE']
    """
    names = [TIMING, *config.tasks]
    chosen = only.split(",") if isinstance(only, str) else only
    unknown = sorted(set(chosen or ()) - set(names))
    if unknown:
        raise ValueError(f"only must name parts among {', '.join(names)}, got {', '.join(unknown)}")
    return [name for name in names if chosen is None or name in chosen]


def run_parts(
    config: EffectiveConfig,
    *,
    only: str | Sequence[str] | None = None,
    out: Path | str = "papers/results/effective.json",
    work: Path | str | None = None,
    seconds: float | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Run the parts and write ``out`` after every new table; parts that run longer than ``seconds`` are ended.

    The timing runs first and alone. ``work`` is an empty folder for the runs; with ``resume``, that of a run which was
    ended: its tables are kept and its trainings go on from their checkpoints. Rows that ``out`` held before and this
    run does not have stay in it.
    """
    started, out = time.monotonic(), Path(out)
    names = part_names(config, only)
    if resume and work is None:
        raise ValueError("resume=True needs work=, the folder of the run that was ended")
    work = Path(tempfile.mkdtemp(prefix="attnlab-effective-") if work is None else work)
    work.mkdir(parents=True, exist_ok=True)
    _check_work(work, config, names, resume=resume)
    before = read_results(out)
    config = _prepared(config, work, names)
    codes: dict[str, int | None] = {}

    def publish() -> dict[str, Any]:
        result = collect(config, work, names)
        result["unfinished"] = {name: codes.get(name) for name in names if codes.get(name) != 0}
        result["seconds"] = round(time.monotonic() - started, 1)
        write_results(out, result, before=before)
        note(f"{sum(map(len, result['tables'].values()))} rows of {', '.join(names)}")
        return result

    deadline = None if seconds is None else started + seconds
    tasks = [name for name in names if name != TIMING]
    if TIMING in names:
        # A slow SVD must not use up the tasks' time.
        timing_deadline = None if seconds is None else started + seconds / 4
        _run_processes([TIMING], 1, config, work, timing_deadline, codes, publish)
    if tasks:
        _run_processes(tasks, config.jobs or _jobs(len(tasks)), config, work, deadline, codes, publish)
    return publish()


def _check_work(work: Path, config: EffectiveConfig, names: Sequence[str], *, resume: bool) -> None:
    """Refuse to mix two runs in one folder; a resumed one has the settings that it was begun with."""
    note = work / "config.json"
    settings = json.loads(json.dumps(asdict(config)))
    if resume and note.exists():
        began = json.loads(note.read_text(encoding="utf-8"))
        changed = sorted(k for k in settings if settings[k] != began.get(k) and k != "jobs")
        if changed:
            raise ValueError(f"{work} was begun with other settings ({', '.join(changed)}); name an empty folder")
    if not resume:
        earlier = [name for name in names if (work / f"{name}.json").exists()]
        if earlier:
            raise ValueError(f"{work} holds an earlier run ({earlier[0]}.json); resume it or name an empty folder")
    write_json(note, settings)


def _run_processes(
    names: Sequence[str],
    jobs: int,
    config: EffectiveConfig,
    work: Path,
    deadline: float | None,
    codes: dict[str, int | None],
    publish: Any,
) -> None:
    """Run a process for each part, ``jobs`` at a time; processes alive at the deadline are killed."""
    context = multiprocessing.get_context("spawn")
    waiting = list(names)
    alive: dict[str, BaseProcess] = {}
    stamps: dict[str, float] = {}
    try:
        while waiting or alive:
            while waiting and len(alive) < jobs:
                name = waiting.pop(0)
                alive[name] = context.Process(target=_run_part, args=(name, config, work), name=name)
                alive[name].start()
            if deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(0.3)
            for name in [name for name, process in alive.items() if not process.is_alive()]:
                codes[name] = alive.pop(name).exitcode
            now = {name: path.stat().st_mtime for name in names if (path := work / f"{name}.json").exists()}
            if now != stamps:
                stamps = now
                publish()
    finally:
        for process in alive.values():
            process.kill()
            process.join()


def _run_part(name: str, config: EffectiveConfig, work: Path) -> None:
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, len(config.tasks))))
    part = Part(work / f"{name}.json", keys=KEYS)
    try:
        if name == TIMING:
            from papers.effective.timing import run_timing

            run_timing(config, part)
        else:
            from papers.effective.finetune import run_task

            run_task(name, config, part, work / f"run-{name}")
    except BaseException as error:
        traceback.print_exc()
        part.fact("failed", f"{type(error).__name__}: {error}")
        raise


def collect(config: EffectiveConfig, work: Path, names: Sequence[str]) -> dict[str, Any]:
    """The results of the rows that the parts have written so far, with the paper's numbers beside ours."""
    from papers.effective.tables import artefact_rows, paired_rows, summary_rows

    rows = gather({name: work / f"{name}.json" for name in names})
    tables = dict(rows.tables)
    if "table_2" in tables:
        tables["artefact"] = artefact_rows(tables["table_2"])
    if not config.finetune and "table_2_pretrained" in tables:
        tables["artefact"] = artefact_rows(tables["table_2_pretrained"])
    if "faithfulness" in tables:
        tables["faithfulness_summary"] = summary_rows(tables["faithfulness"])
        tables["faithfulness_paired"] = paired_rows(tables["faithfulness_differences"])
    # The paper has fine-tuned encoders only; where nothing is fine-tuned, its numbers lie beside the pretrained ones.
    apart = "" if config.finetune else "_pretrained"
    with_paper = {
        table: beside_paper(tables[table], results=NAME, table=table.removesuffix(apart), keys=KEYS[table])
        for table in KEYS
        if tables.get(table)
    }
    name = NAME if config.finetune else PRETRAINED
    return make_results(
        name, PAPER, with_paper, config=public_settings(config), seed=config.seed, rows_of=rows,
        keys=KEYS, notes=NOTES, parts=rows.facts,
    )  # fmt: skip


def public_settings(config: EffectiveConfig) -> dict[str, Any]:
    """The settings, with files by their names instead of their paths on this machine."""
    paths = ("data", "model", "tagger", "treebank", "classifier")
    return {k: Path(v).name if k in paths and v is not None else v for k, v in asdict(config).items()}


def _prepared(config: EffectiveConfig, work: Path, names: Sequence[str]) -> EffectiveConfig:
    """Train what all tasks share: the tagger, and the pattern classifier where the encoder has labelled maps."""
    if not set(names) & set(config.tasks):
        return config
    if config.tagger is None and config.treebank is not None:
        note("training the tagger")
        from papers.effective.tagger import read_conllu, train_tagger

        path = train_tagger(islice(read_conllu(config.treebank), config.sentences), epochs=3, keep=0.1).save(
            work / "tagger.json"
        )
        config = replace(config, tagger=str(path))
    if config.classifier is not None:
        return config
    from papers.effective.pattern_training import with_classifier

    return with_classifier(config, work)


def _jobs(tasks: int) -> int:
    import torch

    return tasks if torch.cuda.is_available() else 1
