"""``python -m papers guidance`` and ``guidance-patterns``: attention guidance's experiments and its Figure 4."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from papers.common.folders import Experiment, add_out

if TYPE_CHECKING:
    from papers.guidance.one_arm import OneArm
    from papers.guidance.study import Places, StudyConfig
    from papers.guidance.table_11 import RunSizes

__all__ = ["EXPERIMENTS"]


def _study_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", default="a", help="parts in the order to run them, such as a,d: (a) to (g) (default: a)"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        default=["english-roberta-12-ag", "english-roberta-12-mlm"],
        help="rows of Table 11, with --config paper: oromo-roberta-8-mlm, ... (default: %(default)s)",
    )
    parser.add_argument("--corpus", type=Path, help="the folder that wiki-corpus wrote: for a, b, c, e, g and English")
    parser.add_argument("--glue", type=Path, help="the folder of GLUE's tasks: for b")
    parser.add_argument("--translation", type=Path, help="the folder that holds multi30k: for d")
    parser.add_argument("--oromo", type=Path, help="the Oromo news articles: for f and Oromo")
    parser.add_argument("--tagalog", type=Path, help="the Filipino lines: for f and Filipino")
    parser.add_argument("--work", type=Path, default=Path("runs/guidance"), help="the parts (default: %(default)s)")
    add_out(parser, "guidance")
    parser.add_argument("--steps", type=int, help="updates of each training, instead of the default")
    parser.add_argument("--seeds", type=int, nargs="+", help="some of the seeds (default: 0 1 2)")
    parser.add_argument("--lrs", type=float, nargs="+", help="some of the learning rates (default: 1e-3 5e-4)")
    parser.add_argument("--width", type=int, help="of the masked LMs and of ELECTRA's detector (default: 256)")
    parser.add_argument("--batch", type=int, help="their texts in a batch (default: 32)")
    parser.add_argument("--length", type=int, help="their tokens in a text (default: 128, with --config paper 512)")
    parser.add_argument(
        "--tasks", nargs="+", help="GLUE's tasks of b: MNLI QNLI QQP are Table 9's (default: SST-2 MRPC RTE)"
    )
    parser.add_argument("--depths", type=int, nargs="+", help="layers of (e)'s models (default: 8 16)")
    parser.add_argument("--seconds", type=float, help="stop after this long; what is finished is kept")
    parser.add_argument("--tables-only", action="store_true", help="train nothing; tables of the parts there are")
    parser.add_argument("--page", type=Path, help="also draw the figures on this page")


def _study(options: argparse.Namespace) -> Path:
    from attnlab.provenance import check_writable, write_atomic
    from papers.guidance.figures import figures_page
    from papers.guidance.study import Places, run_parts

    check_writable(options.out)
    places = Places(options.corpus, options.glue, options.translation, options.oromo, options.tagalog)
    if options.config == "paper":
        return _table_11(options, places)
    config = _study_config(options)
    only = [] if options.tables_only else options.only.split(",")
    result = run_parts(config, only, places=places, work=options.work, out=options.out, seconds=options.seconds)
    if options.page is not None:
        write_atomic(options.page, figures_page(result))
        print(f"wrote {options.page.resolve()}")
    return options.out


def _study_config(options: argparse.Namespace) -> StudyConfig:
    from papers.guidance.study import StudyConfig

    config = StudyConfig()
    mlm = replace(
        config.mlm,
        steps=options.steps or config.mlm.steps,
        width=options.width or config.mlm.width,
        batch=options.batch or config.mlm.batch,
        length=options.length or config.mlm.length,
    )
    translation = replace(config.translation, steps=options.steps or config.translation.steps)
    config = replace(config, mlm=mlm, electra=replace(config.electra, base=mlm), translation=translation)
    return replace(
        config,
        seeds=tuple(options.seeds or config.seeds),
        lrs=tuple(options.lrs or config.lrs),
        depths=tuple(options.depths or config.depths),
        tune=replace(config.tune, tasks=tuple(options.tasks or config.tune.tasks)),
    )


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of the parts, or those of the rows of Table 11."""
    if options.config != "paper":
        return asdict(_study_config(options))
    from papers.guidance.table_11 import settings_of

    return settings_of(options.rows, _sizes(options))


def _sizes(options: argparse.Namespace) -> RunSizes:
    from papers.guidance.config import PAPER_LENGTH
    from papers.guidance.table_11 import RunSizes

    return RunSizes(options.width, options.batch, options.length or PAPER_LENGTH, options.steps)


def _table_11(options: argparse.Namespace, places: Places) -> Path:
    """The rows of Table 11 that --rows names."""
    from papers.guidance.table_11 import run_settings

    seeds = options.seeds or [0]
    run_settings(options.rows, _sizes(options), places=places, work=options.work, out=options.out, seeds=seeds)
    return options.out


def _arm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--guided", action="store_true", help="with the guidance loss (default: without)")
    parser.add_argument("--lr", type=float, default=1e-3, help="the learning rate (default: %(default)s)")
    parser.add_argument("--norm", choices=("post", "pre"), default="post", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=16_000, help="updates of 32,768 tokens (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32_768, help="of a batch (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="(default: %(default)s)")
    languages = ("english", "oromo", "tagalog")
    parser.add_argument("--language", choices=languages, default="english", help="(default: %(default)s)")
    parser.add_argument(
        "--corpus", type=Path, required=True, help="the folder that wiki-corpus wrote, or that of the other language"
    )
    parser.add_argument("--glue", type=Path, help="the folder of GLUE's tasks (default: no fine-tuning)")
    parser.add_argument("--tune-epochs", type=float, help="over every task's training set (default: 3 to 8)")
    parser.add_argument(
        "--work", type=Path, required=True, help="the folder of all arms; an arm that was ended goes on"
    )
    add_out(parser, "guidance-arm")


def _arm(options: argparse.Namespace) -> Path:
    from attnlab.provenance import check_writable
    from papers.common.row_store import Part, begin_work, collect
    from papers.guidance import PAPER
    from papers.guidance.one_arm import ARM_KEYS, ARM_NAME, train_arm, tune_arm
    from papers.guidance.one_arm_tables import ARM_NOTES, derived
    from papers.guidance.study import Places, StudyConfig, low_resource_stores, wiki_stores

    check_writable(options.out)
    arm = _one_arm(options)
    if arm.language == "english":
        tokeniser, stores = wiki_stores(Places(corpus=options.corpus), ARM_NAME)
    elif options.glue is not None:
        raise ValueError(f"GLUE's tasks are English, and the model is not ({arm.language}); leave out --glue")
    else:
        tokeniser, stores = low_resource_stores(options.corpus, arm.language, StudyConfig().low_resource_vocab)
    begin_work(options.work, asdict(arm), seed=arm.seed)
    part = Part(options.work / f"part-{arm.name}.json", keys=ARM_KEYS)
    model = train_arm(arm, tokeniser=tokeniser, stores=stores, run_dir=options.work / "runs" / arm.name, part=part)
    if options.glue is not None:
        tune_arm(arm, model, tokeniser=tokeniser, glue=options.glue, part=part)
    collect(ARM_NAME, PAPER, [options.work], options.out, keys=ARM_KEYS, notes=ARM_NOTES, derived=derived)
    return options.out


def _one_arm(options: argparse.Namespace) -> OneArm:
    from papers.guidance.one_arm import LITTLE_TEXT, OneArm

    names = ("guided", "lr", "norm", "seed", "steps", "tokens", "width", "layers", "language")
    arm = OneArm(**{name: getattr(options, name) for name in names})
    if arm.language != "english":
        arm = replace(arm, **LITTLE_TEXT)
    if options.tune_epochs is None:
        return arm
    return replace(arm, tune_epochs=tuple((task, options.tune_epochs) for task in arm.tasks))


def _arm_settings(options: argparse.Namespace) -> dict[str, Any]:
    return asdict(_one_arm(options))


def _patterns_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", help="a sentence (default: that of Figure 4)")
    parser.add_argument("--model", type=Path, help="a model's folder, whose tokenizer cuts the text")
    parser.add_argument("--out", type=Path, default=Path("patterns.html"), help="the page (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the maps as JSON")


def _patterns(options: argparse.Namespace) -> None:
    from attnlab.provenance import check_writable
    from papers.guidance.figure4 import SENTENCE, write_patterns_page

    check_writable(options.out)
    tokenizer = None
    if options.model is not None:
        from attnlab.adapters import load_model

        tokenizer = load_model(options.model).tokenizer
    maps = write_patterns_page(options.out, text=options.text or SENTENCE, tokenizer=tokenizer)
    print(json.dumps(maps) if options.json else f"wrote {options.out.resolve()}")


EXPERIMENTS: dict[str, Experiment] = {
    "guidance": Experiment(
        "Attention guidance: masked LMs, ELECTRA and translation with and without it, in parts (a) to (g).",
        _study_arguments,
        _study,
        "--only a,b,c,d,e,f,g --corpus runs/wiki --glue data/glue --translation data --oromo data/oromo "
        "--tagalog data/tagalog --work runs/guidance",
        more={
            "rows of Table 11": "--config paper --rows english-roberta-12-ag english-roberta-12-mlm oromo-roberta-8-ag "
            "--corpus runs/wiki --oromo data/oromo --work runs/guidance-11",
        },
        paper="rows of Tables 10 and 11 (--rows), for days",
        settings=_settings,
        quick={"steps": 10, "seeds": [0], "lrs": [1e-3], "width": 64, "batch": 8, "length": 64, "seconds": 25.0},
    ),
    "guidance-arm": Experiment(
        "Attention guidance: one masked LM of 12 layers, guided or not, alone and until its curve is flat.",
        _arm_arguments,
        _arm,
        "--guided --corpus runs/wiki --glue data/glue --work runs/guidance-arm",
        more={
            "the arm without guidance": "--corpus runs/wiki --glue data/glue --work runs/guidance-arm",
            "little text": "--guided --language oromo --steps 3000 --corpus data/oromo --work runs/guidance-arm",
            "pre-norm": "--guided --norm pre --corpus runs/wiki --glue data/glue --work runs/guidance-arm",
        },
        settings=_arm_settings,
        quick={"steps": 4, "tokens": 512, "width": 32, "layers": 3, "tune_epochs": 0.01},
    ),
    "guidance-patterns": Experiment(
        "Attention guidance: Figure 4, its patterns over a sentence.",
        _patterns_arguments,
        _patterns,
        "--out patterns.html",
    ),
}
