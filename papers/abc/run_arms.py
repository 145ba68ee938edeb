"""``python -m papers abc-lm-arm`` and ``abc-mlm-arm``: rows of ABC's tables that are trained one at a time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from papers.abc import PAPER
from papers.abc.run import prepare_device
from papers.common.folders import Experiment, add_out, with_changes

if TYPE_CHECKING:
    from papers.abc.lm_arm import LmArm
    from papers.abc.mlm_arm import MlmArm
    from papers.common.row_store import Part

__all__ = ["EXPERIMENTS"]


def _lm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="ABC_MLP-64", help="a row: BASE-None, Linformer-64, ... (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=300_000_000, help="to learn from (default: %(default)s)")
    parser.add_argument("--patience", type=int, help="end after so many evaluations without a lower held-out loss")
    _shared(parser, "abc-lm")


def _shared(parser: argparse.ArgumentParser, results: str) -> None:
    parser.add_argument("--corpus", type=Path, required=True, help="the folder that wiki-corpus wrote")
    parser.add_argument("--work", type=Path, required=True, help="the folder of all arms; an ended arm goes on")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON", help="settings other than the defaults")
    parser.add_argument("--replace", action="store_true", help="put these results in the place of those of other sizes")
    add_out(parser, results)


def _lm_arm(options: argparse.Namespace) -> LmArm:
    from papers.abc.lm_arm import LmArm
    from papers.abc.lm_config import CONFIGS

    config = with_changes(CONFIGS["arm"], options.set)
    return LmArm(options.model, config, seed=options.seed, tokens=options.tokens, patience=options.patience)


def _lm(options: argparse.Namespace) -> Path:
    from attnlab.provenance import check_writable
    from papers.abc import lm
    from papers.abc.lm_arm import run_arm

    check_writable(options.out)
    arm = _lm_arm(options)
    part = _begun(options, lm, arm.as_dict(), arm.name, seed=arm.seed)
    run_arm(arm, corpus=options.corpus, work=options.work, part=part)
    return _collected(options, lm)


def _begun(options: argparse.Namespace, module: Any, config: dict[str, Any], name: str, *, seed: int) -> Part:
    """The part that an arm writes into, once it is known that it may stand beside the others."""
    from papers.abc.arms import check_same_sizes
    from papers.common.row_store import Part, begin_work

    check_same_sizes(config, options.work, options.out, replaces=options.replace)
    prepare_device()
    begin_work(options.work, config, seed=seed)
    return Part(options.work / f"part-{name}.json", keys=module.KEYS)


def _collected(options: argparse.Namespace, module: Any, *, kept: Sequence[str] = ()) -> Path:
    """The results file with the rows of all arms; with --replace only the tables ``kept`` stay of an earlier one."""
    from papers.abc.arms import keep_tables
    from papers.common.row_store import collect

    if options.replace:
        keep_tables(options.out, kept)
    collect(
        module.NAME, PAPER, [options.work], options.out, keys=module.KEYS, notes=module.NOTES, derived=module.derived
    )
    return options.out


def _lm_settings(options: argparse.Namespace) -> dict[str, Any]:
    arm = _lm_arm(options)
    return {**arm.as_dict(), "row": arm.key, "steps": arm.steps, "tables": list(arm.tables)}


def _mlm_arguments(parser: argparse.ArgumentParser) -> None:
    rows = "a row: RoBERTa-Ours-None, Linformer-128, ... (default: %(default)s)"
    parser.add_argument("--row", default="ABC_MLP-128", help=rows)
    parser.add_argument("--tokens", type=int, default=74_000_000, help="to continue on (default: %(default)s)")
    parser.add_argument("--as-converted", action="store_true", help="fine-tune the row without continuing it first")
    parser.add_argument("--glue", type=Path, required=True, help="the folder of GLUE's tasks")
    parser.add_argument("--model", type=Path, help="a BERT masked LM (default: the shipped one)")
    _shared(parser, "abc-mlm")


def _mlm_arm(options: argparse.Namespace) -> MlmArm:
    from papers.abc.mlm import CONFIGS
    from papers.abc.mlm_arm import MlmArm

    config = with_changes(CONFIGS["small"], options.set)
    return MlmArm(options.row, config, tokens=options.tokens, continued=not options.as_converted)


def _mlm(options: argparse.Namespace) -> Path:
    from attnlab.adapters.load import SHIPPED
    from attnlab.provenance import check_writable
    from papers.abc import mlm
    from papers.abc.mlm_arm import KEPT, run_arm

    check_writable(options.out)
    arm = _mlm_arm(options)
    part = _begun(options, mlm, arm.as_dict(), arm.name, seed=arm.config.seed)
    model = options.model or SHIPPED
    run_arm(arm, corpus=options.corpus, glue=options.glue, model=model, work=options.work, part=part)
    return _collected(options, mlm, kept=KEPT)


def _mlm_settings(options: argparse.Namespace) -> dict[str, Any]:
    arm = _mlm_arm(options)
    epochs = {task: arm.config.epochs_of(task) for task in arm.config.tasks}
    return {**arm.as_dict(), "row": arm.name, "steps": arm.steps, "epochs": epochs}


EXPERIMENTS: dict[str, Experiment] = {
    "abc-mlm-arm": Experiment(
        "ABC's Table 4: one row, converted, continued alone and fine-tuned for whole epochs; an ended run goes on.",
        _mlm_arguments,
        _mlm,
        "--row ABC_MLP-128 --corpus runs/wiki --glue data/glue --work runs/abc-mlm-arm",
        more={
            "as it was converted": "--row ABC_MLP-128 --as-converted --corpus runs/wiki --glue data/glue "
            "--work runs/abc-mlm-arm"
        },
        settings=_mlm_settings,
        quick={
            "row": "RoBERTa-Ours-None",
            "tokens": 2048,
            "set": ["batch=2", "eval_batches=1", "tune_limit=8", 'tasks=["RTE"]', "seeds=[0]", 'epochs={"RTE": 1}'],
        },
    ),
    "abc-lm-arm": Experiment(
        "ABC's Table 2: one row with one seed, of six layers x 512, trained alone; an ended run goes on.",
        _lm_arguments,
        _lm,
        "--model ABC_MLP-64 --seed 0 --corpus runs/wiki --work runs/abc-lm-arm",
        more={
            "softmax attention": "--model BASE-None --seed 0 --corpus runs/wiki --work runs/abc-lm-arm",
            "T2R from the trained BASE": "--model T2R-pretrained-64 --corpus runs/wiki --work runs/abc-lm-arm",
        },
        settings=_lm_settings,
        quick={
            "model": "BASE-None",
            "tokens": 4096,
            "set": ["batch=2", "layers=1", "deep_layers=1", "width=64", "heads=1", "eval_rows=4"],
        },
    ),
}
