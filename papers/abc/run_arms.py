"""``python -m papers abc-lm-arm``: rows of ABC's tables that are trained one at a time."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from papers.abc import PAPER
from papers.abc.options import prepare_device, with_changes
from papers.common.folders import Experiment, add_out

if TYPE_CHECKING:
    from papers.abc.lm_arm import LmArm

__all__ = ["EXPERIMENTS"]


def _lm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="ABC_MLP-64", help="a row: BASE-None, Linformer-64, ... (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=300_000_000, help="to learn from (default: %(default)s)")
    parser.add_argument("--patience", type=int, help="end after so many evaluations without a lower held-out loss")
    parser.add_argument("--corpus", type=Path, required=True, help="the folder that wiki-corpus wrote")
    parser.add_argument("--work", type=Path, required=True, help="the folder of all arms; an ended arm goes on")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON", help="settings other than the defaults")
    parser.add_argument("--replace", action="store_true", help="put these results in the place of those of other sizes")
    add_out(parser, "abc-lm")


def _lm_arm(options: argparse.Namespace) -> LmArm:
    from papers.abc.lm_arm import LmArm
    from papers.abc.lm_config import CONFIGS

    config = with_changes(CONFIGS["arm"], options.set)
    return LmArm(options.model, config, seed=options.seed, tokens=options.tokens, patience=options.patience)


def _lm(options: argparse.Namespace) -> Path:
    from attnlab.provenance import check_writable
    from papers.abc import lm
    from papers.abc.lm_arm import check_same_sizes, run_arm
    from papers.common.row_store import Part, begin_work, collect

    check_writable(options.out)
    arm = _lm_arm(options)
    check_same_sizes(arm, options.work, options.out, replaces=options.replace)
    prepare_device()
    begin_work(options.work, arm.as_dict(), seed=arm.seed)
    part = Part(options.work / f"part-{arm.name}.json", keys=lm.KEYS)
    run_arm(arm, corpus=options.corpus, work=options.work, part=part)
    if options.replace:
        options.out.unlink(missing_ok=True)
    collect(lm.NAME, PAPER, [options.work], options.out, keys=lm.KEYS, notes=lm.NOTES, derived=lm.derived)
    return options.out


def _lm_settings(options: argparse.Namespace) -> dict[str, Any]:
    arm = _lm_arm(options)
    return {**arm.as_dict(), "row": arm.key, "steps": arm.steps, "tables": list(arm.tables)}


EXPERIMENTS: dict[str, Experiment] = {
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
