"""``python -m papers effective``: the tables and figures of Sun and Marasović (Effective), standard beside effective.

A pretrained encoder is fine-tuned on RTE, MRPC, SST-2 and STS-B, each in a process of its own, and read before and
after: patterns (Table 2, Figure 4), token types (Figures 1, 5, 6), what fine-tuning changed (Figure 3), the time it
takes (Table 3), the authors' own computation with padding inside V, and which reading is faithful. Every table is on
disk as soon as it is made, so that finished tables are kept when time runs out.
"""

from __future__ import annotations

import argparse
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
from attnlab.provenance import check_writable, write_atomic, write_json
from papers.common.folders import Experiment, add_figures, add_out, beside_paper
from papers.common.row_store import Part, gather, make_results, read_results, write_results
from papers.effective import PAPER
from papers.effective.config import CONFIGS, KEYS, NAME, NOTES, PRETRAINED, EffectiveConfig

__all__ = ["EXPERIMENTS", "collect", "part_names", "run"]

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


def run(
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
        name, PAPER, with_paper, config=_public(config), seed=config.seed, rows_of=rows,
        keys=KEYS, notes=NOTES, parts=rows.facts,
    )  # fmt: skip


def _public(config: EffectiveConfig) -> dict[str, Any]:
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


def _study_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, help="the folder of GLUE's tasks")
    parser.add_argument("--model", help="a pretrained encoder's folder (default: the shipped masked LM)")
    tags = parser.add_mutually_exclusive_group(required=True)
    tags.add_argument("--treebank", help="a CoNLL-U file to learn part-of-speech tags from")
    tags.add_argument("--tagger", help="a saved tagger")
    parser.add_argument(
        "--classifier-maps",
        choices=("own", "all"),
        default="own",
        help="whose labelled maps the pattern classifier learns from: the encoder's own, where there are any, or those "
        "of four models, as the shipped one (default: %(default)s)",
    )
    parser.add_argument("--pretrained", action="store_true", help="read the encoder as it is, without fine-tuning")
    parser.add_argument("--dev-limit", type=int, help="dev examples of a task whose maps are read")
    parser.add_argument("--jobs", type=int, help="tasks at once (default: all on a GPU, one elsewhere)")
    parser.add_argument("--sentences", type=int, help="only the treebank's first so many (default: all)")
    add_out(parser, NAME)
    parser.add_argument("--page", type=Path, help="also draw the figures on this page")
    parser.add_argument("--only", help="parts, such as STS-B,timing; the others' results are kept")
    work = parser.add_mutually_exclusive_group()
    work.add_argument("--work", type=Path, help="an empty folder for the runs (default: a temporary one)")
    work.add_argument("--resume", type=Path, metavar="DIR", help="go on with the runs in this folder")
    parser.add_argument("--seconds", type=float, help="stop after this long; what is finished is kept")


def _config(options: argparse.Namespace) -> EffectiveConfig:
    config = CONFIGS[options.config]
    return replace(
        config,
        finetune=not options.pretrained,
        dev_limit=config.dev_limit if options.dev_limit is None else options.dev_limit,
        jobs=options.jobs,
        data=options.data,
        model=options.model,
        treebank=options.treebank,
        tagger=options.tagger,
        sentences=options.sentences,
        classifier_maps=options.classifier_maps,
    )


def _study(options: argparse.Namespace) -> Path:
    from papers.effective.figures import figures_page

    check_writable(options.out)
    if options.page is not None:
        check_writable(options.page)
    if options.config == "paper" and options.model is None:
        raise ValueError("--config paper fine-tunes BERT-base: name its folder by --model")
    config = _config(options)
    only = options.only.split(",") if options.only else None
    run(
        config,
        only=only,
        out=options.out,
        work=options.resume or options.work,
        seconds=options.seconds,
        resume=options.resume is not None,
    )
    if options.page is not None:
        write_atomic(options.page, figures_page(json.loads(options.out.read_text(encoding="utf-8"))))
        print(f"wrote {options.page.resolve()}")
    return options.out


def _patterns_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="an encoder's folder (default: the shipped masked LM)")
    parser.add_argument("--texts", type=Path, required=True, help="a text a line, or two with a tab between them")
    parser.add_argument("--limit", type=int, help="the first lines only")
    parser.add_argument("--out", type=Path, default=Path("patterns.json"), help="(default: %(default)s)")
    parser.add_argument("--page", type=Path, help="also draw the figure on this page")


def _patterns(options: argparse.Namespace) -> Path:
    from attnlab.adapters import load_model
    from attnlab.adapters.load import SHIPPED
    from papers.effective.patterns import patterns_of_texts

    check_writable(options.out)
    if options.page is not None:
        check_writable(options.page)
    folder = options.model or SHIPPED
    lines = [line for line in options.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    result = patterns_of_texts(
        load_model(folder), lines[: options.limit], name=Path(folder).name, out=options.out, page=options.page
    )
    for row in result["tables"]["table_2"]:
        print(json.dumps(row))
    return options.out


def _classifier_arguments(parser: argparse.ArgumentParser) -> None:
    add_out(parser, "pattern_classifier")
    parser.add_argument("--maps", type=Path, help="a folder of labelled maps (default: the shipped ones)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each split (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=450, help="of each training (default: %(default)s)")
    parser.add_argument("--generated", type=int, default=4000, help="maps to learn from (default: %(default)s)")
    parser.add_argument("--members", type=int, default=5, help="networks that answer together (default: %(default)s)")


def _classifier(options: argparse.Namespace) -> Path:
    from papers.effective.labelled_maps import load_labelled
    from papers.effective.pattern_training import our_maps
    from papers.effective.patterns import evaluate_classifier

    check_writable(options.out)
    maps = our_maps() if options.maps is None else load_labelled(options.maps)
    evaluate_classifier(
        maps,
        options.out,
        seeds=options.seeds,
        steps=options.steps,
        generated=options.generated,
        members=options.members,
    )
    return options.out


def _maps_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="an encoder's folder (default: the shipped masked LM)")
    parser.add_argument("--text", required=True, help="a sentence")
    parser.add_argument("--pair", help="a second sentence")
    parser.add_argument("--layer", type=int, help="the layer drawn large (default: the last)")
    parser.add_argument("--head", type=int, default=0, help="the head drawn large (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("maps.html"), help="the page (default: %(default)s)")


def _maps(options: argparse.Namespace) -> None:
    from attnlab.adapters import load_model
    from attnlab.adapters.load import SHIPPED
    from papers.effective.maps import write_maps_page

    check_writable(options.out)
    loaded = load_model(options.model or SHIPPED)
    write_maps_page(loaded, options.text, options.out, pair=options.pair, layer=options.layer, head=options.head)
    print(f"wrote {options.out.resolve()}")


def _figures(options: argparse.Namespace) -> None:
    from papers.common.pictures import draw_results
    from papers.effective.drawings import PICTURES

    for path in draw_results(PICTURES, options.results, options.out):
        print(f"wrote {path.resolve()}")


EXPERIMENTS: dict[str, Experiment] = {
    "effective": Experiment(
        "Effective attention: its tables and figures, standard beside effective, on fine-tuned encoders.",
        _study_arguments,
        _study,
        "--data data/glue --treebank data/ud-english-ewt/en_ewt-ud-train.conllu --work runs/effective",
        more={
            "the encoder of our results": "--model models/all-MiniLM-L6-v2 --data data/glue --treebank "
            "data/ud-english-ewt/en_ewt-ud-train.conllu --work runs/effective-minilm",
            "an encoder with heads of 64, as it was pretrained": "--pretrained --model models/all-mpnet-base-v2 "
            "--only RTE,MRPC,SST-2,STS-B,QNLI --data data/glue --treebank "
            "data/ud-english-ewt/en_ewt-ud-train.conllu --work runs/effective-mpnet "
            "--out papers/results/effective-pretrained.json",
        },
        paper="BERT-base, named by --model, on whole training and dev sets",
        settings=lambda options: _public(_config(options)),
        quick={"seconds": 40.0, "only": "RTE", "sentences": 200, "classifier_maps": "all"},
    ),
    "effective-patterns": Experiment(
        "Effective attention: Table 2 and Figure 4 for any encoder and text file.",
        _patterns_arguments,
        _patterns,
        "--texts texts.txt --out patterns.json",
        quick={"limit": 16},
    ),
    "effective-classifier": Experiment(
        "Effective attention: the pattern classifier, held out from models and from maps.",
        _classifier_arguments,
        _classifier,
        quick={"seeds": 1, "steps": 4, "generated": 200, "members": 1},
    ),
    "effective-maps": Experiment(
        "Effective attention: Figures 2 and 7, the maps of one sentence and head, standard and effective.",
        _maps_arguments,
        _maps,
        '--text "The cat sat on the mat." --out maps.html',
    ),
    "effective-figures": Experiment(
        "Effective attention: Figures 1 and 3 to 6 by head as pictures, from the results files.",
        add_figures,
        _figures,
        "--out figures",
    ),
}
