"""``python -m papers effective``: the tables and figures of Sun and Marasović (Effective), standard beside effective.

A pretrained encoder is fine-tuned on RTE, MRPC, SST-2 and STS-B, each in a process of its own, and read before and
after: patterns (Table 2, Figure 4), token types (Figures 1, 5, 6), what fine-tuning changed (Figure 3), the time it
takes (Table 3), the authors' own computation with padding inside V, and which reading is faithful. Every table is on
disk as soon as it is made, so that what is finished is kept when time runs out.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from attnlab.provenance import provenance, write_json
from papers.common.results import beside_paper, merge_results
from papers.common.row_store import gather
from papers.effective.config import EffectiveConfig, TaskPart

__all__ = ["KEYS", "NAME", "EffectiveConfig", "collect", "part_names", "run"]

NAME = "effective"
TIMING = "timing"
_KEYS = {
    "table_2": ["task", "attention"],
    "figure_4": ["task", "attention", "layer"],
    "token_types": ["task", "attention", "token"],
    "token_types_layers": ["task", "attention", "token", "layer"],
    "segments": ["task", "attention"],
    "to_token": ["task", "attention", "token"],
    "to_token_layers": ["task", "attention", "token", "layer"],
}
# What tells the rows of a table apart, and so which row of the paper's lies beside ours.
KEYS = {
    **_KEYS,
    **{f"{table}_pretrained": keys for table, keys in _KEYS.items()},
    "artefact": ["task", "pattern"],
    "finetuning": ["task", "attention", "layer"],
    "finetuning_heads": ["task", "attention", "layer", "head"],
    "timing": ["way"],
    "timing_models": ["model", "way"],
    "identity": ["text"],
    "short_inputs": ["length"],
    "alternative": ["text"],
    "scores": ["task"],
    "lengths": ["task"],
    "faithfulness": ["task", "layer", "against", "reading"],
    "faithfulness_differences": ["task", "layer", "against", "first", "second"],
    "faithfulness_summary": ["task", "against"],
    "faithfulness_paired": ["task", "against", "first", "second"],
}
NOTES = {
    "table_2": "Dev set, fine-tuned. effective is exact (V restricted to real tokens); authors is the computation of "
    "the paper's code: padding inside V, one rank and an absolute threshold, as the paper's effective rows were made.",
    "artefact": "Percentage points: change is what exact effective attention moves, authors_change what the authors' "
    "way moves, artefact the difference, which padding alone makes.",
    "segments": "Blocks without a classifier, where inputs have two segments: contrast is (a - c) / (a + c) with the "
    "mean weight a within segments and c across, [CLS], [SEP] and neighbours left out; blocks is the share of maps (%) "
    "where a is at least twice c.",
    "token_types": "When [CLS] is processed in the last layer; the largest weight among the tokens of a type, averaged "
    "over heads and dev inputs. Tags by a perceptron tagger trained on UD English EWT.",
    "finetuning": "Cosine of maps of the pretrained and the fine-tuned encoder, padding excluded.",
    "timing": "One evaluation batch of the paper's size, padded: eager with its maps, the same with every effective "
    "map and residual, and by a full SVD of every V. timing is BERT-base's size with random weights.",
    "identity": "residual is the largest over inputs, layers and heads; authors_residual the mean error of the output "
    "when it is made from the authors' maps. trivial_share: inputs with no more tokens than V has dimensions.",
    "short_inputs": "difference is |W_perp - W| with the rank of V as it is; difference_float32 with the threshold of "
    "float32, to which a square V is now and then singular (singular_share of the heads).",
    "lengths": "Dev inputs with no more tokens than a head is wide, where effective attention is standard attention: "
    "for this encoder, and for the paper's, whose heads are 64 wide.",
    "faithfulness": "Does a reading say what hiding a key changes? Means over texts of more tokens than a head is wide "
    "(on shorter ones effective attention is attention), with 95 % bootstrap intervals.",
    "faithfulness_summary": "Spearman, all layers: a head's output when a key is hidden from one query; the prediction "
    "when it is hidden from all of a layer, the others sharing its weight, or when its weight is set to zero.",
    "faithfulness_paired": "Differences of Spearman of two readings on the same texts, all layers, 95 % intervals.",
}


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


def run(
    config: EffectiveConfig,
    *,
    only: str | Sequence[str] | None = None,
    out: Path | str = "papers/results/effective.json",
    work: Path | str | None = None,
    seconds: float | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Run the parts and write ``out``, anew with every table; what is not done after ``seconds`` is ended.

    The timing goes first and alone. ``work`` is an empty folder for the runs; with ``resume``, that of a run which was
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
    before = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
    made_by = provenance()
    config = _prepared(config, work, names)
    codes: dict[str, int | None] = {}

    def publish() -> dict[str, Any]:
        found = collect(config, work, names) | made_by
        found["unfinished"] = {name: codes.get(name) for name in names if codes.get(name) != 0}
        found["seconds"] = round(time.monotonic() - started, 1)
        write_json(out, found if before is None else merge_results(before, found))
        return found

    deadline = None if seconds is None else started + seconds
    tasks = [name for name in names if name != TIMING]
    if TIMING in names:
        # A slow SVD must not cost the tasks their time.
        soon = None if seconds is None else started + seconds / 4
        _together([TIMING], 1, config, work, soon, codes, publish)
    if tasks:
        _together(tasks, config.jobs or _jobs(len(tasks)), config, work, deadline, codes, publish)
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


def _together(
    names: Sequence[str],
    jobs: int,
    config: EffectiveConfig,
    work: Path,
    deadline: float | None,
    codes: dict[str, int | None],
    publish: Any,
) -> None:
    """Run processes, ``jobs`` at a time; end what is alive at the deadline."""
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
    part = TaskPart(work / f"{name}.json")
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
    """What the parts have found so far, with the paper's numbers beside ours."""
    from papers.effective.tables import artefact_rows, paired_rows, summary_rows

    tables, facts = gather(work, names)
    if "table_2" in tables:
        tables["artefact"] = artefact_rows(tables["table_2"])
    if "faithfulness" in tables:
        tables["faithfulness_summary"] = summary_rows(tables["faithfulness"])
        tables["faithfulness_paired"] = paired_rows(tables["faithfulness_differences"])
    joined = {
        table: beside_paper(tables[table], results=NAME, table=table, keys=KEYS[table])
        for table in KEYS
        if tables.get(table)
    }
    return {
        "name": NAME,
        "paper": "Effective",
        "config": _public(config),
        "seed": config.seed,
        "keys": KEYS,
        "notes": NOTES,
        "parts": facts,
        "tables": joined,
    }


def _public(config: EffectiveConfig) -> dict[str, Any]:
    """The settings with files by their names: where they lay on this machine tells a reader nothing."""
    paths = ("data", "model", "tagger", "treebank", "classifier")
    return {k: Path(v).name if k in paths and v is not None else v for k, v in asdict(config).items()}


def _prepared(config: EffectiveConfig, work: Path, names: Sequence[str]) -> EffectiveConfig:
    """What all tasks share is made once: the tagger, and the classifier where the package ships none."""
    if not set(names) & set(config.tasks):
        return config
    if config.tagger is None and config.treebank is not None:
        from papers.effective.tagger import read_conllu, train_tagger

        path = train_tagger(read_conllu(config.treebank), epochs=3, keep=0.1).save(work / "tagger.json")
        config = replace(config, tagger=str(path))
    if config.classifier is None:
        from attnlab.reading.pattern_classifier import load_classifier
        from papers.effective.pattern_training import our_maps, save_classifier, train_classifier

        try:
            load_classifier()
        except ValueError:
            net = train_classifier(our_maps())
            config = replace(config, classifier=str(save_classifier(net, work / "classifier.safetensors")))
    return config


def _jobs(tasks: int) -> int:
    import torch

    return tasks if torch.cuda.is_available() else 1
