"""``python -m papers value-aware``: Tables 1 and 2 and Figures 1 to 3 of Gupta and Berant (OVA).

Five trainings run at once, each in a process of its own: a masked LM continued at a greater length and, as the control,
at its own; and three causal LMs that differ in their kernel. Each then puts approximations in place of its attention.
Every row is on disk as soon as it is measured, so that finished rows are kept when time runs out.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from attnlab.progress import note
from attnlab.provenance import check_writable, write_json
from papers.common.folders import Experiment, add_out
from papers.common.row_store import Part, begin_work, read_results, write_results
from papers.common.row_store import collect as collect_parts
from papers.value_aware import PAPER
from papers.value_aware.config import (
    ARMS,
    CONFIGS,
    KEYS,
    LM_KEYS,
    LM_NAME,
    NAME,
    RealLmConfig,
    ValueAwareConfig,
)
from papers.value_aware.tables import collect, merged_with

__all__ = ["EXPERIMENTS", "Folders", "part_names", "reproduce", "run_part"]


@dataclass(frozen=True)
class Folders:
    """The token stores of ``wiki-corpus``, those of ``value-aware-words`` if needed, and the masked LM to continue."""

    corpus: Path
    model: Path
    words: Path | None = None


def part_names(config: ValueAwareConfig, only: str | None = None) -> list[str]:
    """The parts, each a process: mlm-long, mlm-short, lm-exp, ...; ``only`` is lm or mlm."""
    if only not in (None, "lm", "mlm"):
        raise ValueError(f"only must be lm or mlm, got {only!r}")
    names = [f"mlm-{arm}" for arm in ARMS] + [f"lm-{kernel}" for kernel in config.kernels]
    return [name for name in names if only is None or name.startswith(f"{only}-")]


def run_part(name: str, config: ValueAwareConfig, folders: Folders, work: Path) -> None:
    """One part from its training to its last row; its rows and its run are in ``work``."""
    import torch

    from papers.common.wiki_corpus import WikiCorpus
    from papers.value_aware.causal_lm import run_lm
    from papers.value_aware.masked_lm import run_mlm
    from papers.value_aware.training import PartRun, Rendezvous

    torch.set_num_threads(max(1, min(2, (os.cpu_count() or 1) // 5)))
    group, _, member = name.partition("-")
    by_words = group == "lm" and config.lm_vocabulary == "words"
    corpus = folders.words if by_words else folders.corpus
    assert corpus is not None
    rows = Part(work / f"{name}.json", keys=KEYS)
    run = PartRun(config, WikiCorpus(corpus), rows, Rendezvous(work, name), work / f"run-{name}")
    if group == "lm":
        run_lm(member, run)
    else:
        run_mlm(member, run, model=folders.model)


def reproduce(
    config: ValueAwareConfig,
    *,
    folders: Folders,
    out: Path | str,
    work: Path | str,
    only: str | None = None,
    seconds: float | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Run the parts at once and write ``out`` after every new row; parts that run longer than ``seconds`` are ended.

    ``work`` is an empty folder for the runs; with ``resume``, that of a run which was ended: trainings go on from their
    checkpoints, and its rows are kept. Rows that ``out`` held before and this run does not have stay in it, except
    those of masked LMs that are trained again.
    """
    out, work = Path(out), Path(work)
    names = part_names(config, only)
    if config.lm_vocabulary == "words" and folders.words is None and only != "mlm":
        raise ValueError("this config's causal LMs read whole words: name by --words the folder of value-aware-words")
    if not resume:
        _check_empty(work, names)
    work.mkdir(parents=True, exist_ok=True)
    before = read_results(out)
    context = multiprocessing.get_context("spawn")
    parts = {name: context.Process(target=run_part, args=(name, config, folders, work), name=name) for name in names}
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
                note(f"{sum(map(len, written.values()))} rows of {', '.join(names)}")
                write_results(out, merged_with(before, result))
            if seconds is not None and time.monotonic() - started > seconds:
                break
            time.sleep(0.5)
    finally:
        _end(parts.values())
    result = collect(config, work, names)
    result["unfinished"] = {name: part.exitcode for name, part in parts.items() if part.exitcode != 0}
    result["seconds"] = round(time.monotonic() - started, 1)
    write_results(out, merged_with(before, result))
    return result


def _check_empty(work: Path, names: Sequence[str]) -> None:
    earlier = [name for name in names if (work / f"{name}.json").exists()]
    if earlier:
        raise ValueError(f"{work} holds an earlier run ({earlier[0]}.json); resume it or name an empty folder")


def _end(parts: Iterable[BaseProcess]) -> None:
    for part in parts:
        if part.is_alive():
            part.kill()
        part.join()


def _plan_together(parts: Mapping[str, BaseProcess], config: ValueAwareConfig, work: Path) -> None:
    """Let the parts measure their speeds at the same time, then write the number of steps for them."""
    alive = [name for name, part in parts.items() if part.is_alive()]
    if all((work / f"{name}.ready").exists() for name in alive):
        (work / "go").touch()
    if (work / "steps.json").exists() or not all((work / f"{name}.rate").exists() for name in alive):
        return
    rates = {name: json.loads((work / f"{name}.rate").read_text()) for name in alive}
    share = {"lm": config.lm_share, "mlm": 1 - config.lm_share}
    from papers.value_aware.training import plan_steps

    write_json(work / "steps.json", plan_steps(rates, seconds=config.train_seconds, share=share))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", type=Path, required=True, help="the folder that wiki-corpus wrote")
    parser.add_argument("--words", type=Path, help="the folder that value-aware-words wrote, for --config paper")
    parser.add_argument("--model", type=Path, help="the masked LM to continue (default of small: the shipped one)")
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--work", type=Path, help="an empty folder for the runs")
    work.add_argument("--resume", type=Path, metavar="DIR", help="go on with the runs in this folder")
    add_out(parser, NAME)
    parser.add_argument("--only", choices=("lm", "mlm"), help="one half; the other's results are kept")
    parser.add_argument("--seconds", type=float, help="stop after this long; what is finished is kept")
    kernels = ValueAwareConfig().kernels
    parser.add_argument("--kernels", nargs="+", choices=kernels, help="of the causal LMs (default: all three at once)")
    parser.add_argument("--lm-steps", type=int, help="updates of the causal LMs (default: what the time allows)")
    parser.add_argument("--seed", type=int, help="of the trainings (default: that of the config)")


def _config(options: argparse.Namespace) -> ValueAwareConfig:
    chosen = {"kernels": options.kernels and tuple(options.kernels), "lm_steps": options.lm_steps, "seed": options.seed}
    return replace(CONFIGS[options.config], **{name: value for name, value in chosen.items() if value is not None})


def _run(options: argparse.Namespace) -> Path:
    from attnlab.adapters.load import SHIPPED

    check_writable(options.out)
    if options.config == "paper" and options.model is None and options.only != "lm":
        raise ValueError(
            "--config paper continues a pretrained masked LM: name it by --model, with a corpus of its tokens, or run "
            "the causal LMs alone by --only lm; the shipped model has a vocabulary of 8k pieces"
        )
    reproduce(
        _config(options),
        folders=Folders(options.corpus, options.model or SHIPPED, options.words),
        out=options.out,
        work=options.resume or options.work,
        only=options.only,
        seconds=options.seconds,
        resume=options.resume is not None,
    )
    return options.out


def _words_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wikitext", type=Path, required=True, help="the folder of WikiText-103's three files")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the token stores")
    parser.add_argument("--articles", type=int, help="only the first so many of each file (default: all)")


def _words(options: argparse.Namespace) -> None:
    from papers.value_aware.words import prepare_words

    print(json.dumps(prepare_words(options.wikitext, options.out, limit=options.articles), indent=1))


def _lm_arguments(parser: argparse.ArgumentParser) -> None:
    config = RealLmConfig()
    parser.add_argument(
        "--model", default="smollm2", help="a causal LM: a folder or a short name (default: %(default)s)"
    )
    parser.add_argument("--text", type=Path, required=True, help="a text file, as a reader would have it")
    parser.add_argument("--work", type=Path, required=True, help="a folder; a run that was ended goes on there")
    parser.add_argument("--windows", type=int, default=config.windows, help="(default: %(default)s)")
    parser.add_argument("--length", type=int, default=config.length, help="tokens of a window (default: %(default)s)")
    parser.add_argument(
        "--search-windows", type=int, default=config.search_windows,
        help="windows for value-aware keys between 1 and d + 1, which are searched for (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--search-length", type=int, default=config.search_length, help="tokens of these (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin nothing after so long (default: no limit)"
    )
    parser.add_argument("--device", help="(default: a GPU, if there is one)")
    add_out(parser, LM_NAME)


def _lm(options: argparse.Namespace) -> Path:
    from attnlab.devices import best_device
    from papers.value_aware.real_lm import measure
    from papers.value_aware.real_lm_tables import NOTES, derived

    check_writable(options.out)
    names = ("windows", "length", "search_windows", "search_length")
    config = replace(RealLmConfig(), **{name: getattr(options, name) for name in names})
    begin_work(options.work, asdict(config))
    part = Part(options.work / "part-lm.json", keys=LM_KEYS)
    device = options.device or str(best_device())
    measure(config, options.model, options.text, part, device=device, seconds=options.seconds)
    collect_parts(LM_NAME, PAPER, [options.work], options.out, keys=LM_KEYS, notes=NOTES, derived=derived)
    return options.out


EXPERIMENTS: dict[str, Experiment] = {
    "value-aware-words": Experiment(
        "Value-aware approximation: WikiText-103 by whole words, the vocabulary of the paper's causal LMs.",
        _words_arguments,
        _words,
        "--wikitext data/wikitext-103 --out runs/wiki-words",
        quick={"articles": 30},
    ),
    "value-aware": Experiment(
        "Value-aware approximation: its Tables 1 and 2 and Figures 1 to 3.",
        _arguments,
        _run,
        "--corpus runs/wiki --work runs/value-aware",
        more={
            "one kernel and one seed of Table 2": "--only lm --kernels exp --seed 0 --lm-steps 10000 "
            "--corpus runs/wiki --work runs/value-aware-exp-0",
        },
        paper="A.2 and Table 4, for days; needs --words, and --model or --only lm",
        settings=lambda options: asdict(_config(options)),
        quick={"config": "smoke", "seconds": 55.0},
    ),
    "value-aware-lm": Experiment(
        "Value-aware approximation on a pretrained language model: perplexity against the keys of a query.",
        _lm_arguments,
        _lm,
        "--text wikitext103-test.txt --work runs/value-aware-lm",
        quick={"windows": 2, "length": 32, "search_windows": 2, "search_length": 8, "seconds": 40.0},
    ),
}
