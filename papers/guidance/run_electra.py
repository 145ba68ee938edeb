"""``python -m papers guidance-electra-arm``: one ELECTRA at a time."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from papers.common.folders import Experiment, add_out

if TYPE_CHECKING:
    from papers.guidance.electra_arm import ElectraArm

__all__ = ["EXPERIMENTS"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--guided", action="store_true", help="with the guidance loss (default: without)")
    parser.add_argument("--lr", type=float, default=5e-4, help="the learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=16_000, help="updates (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32_768, help="of a batch (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the detector (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument("--corpus", type=Path, required=True, help="the folder that wiki-corpus wrote")
    parser.add_argument("--work", type=Path, required=True, help="the folder of all arms; an ended arm goes on")
    add_out(parser, "guidance-electra")


def _arm(options: argparse.Namespace) -> ElectraArm:
    from papers.guidance.electra_arm import ElectraArm

    names = ("guided", "lr", "seed", "steps", "tokens", "width", "layers")
    return ElectraArm(**{name: getattr(options, name) for name in names})


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return asdict(_arm(options))


def _run(options: argparse.Namespace) -> Path:
    from attnlab.provenance import check_writable
    from papers.common.row_store import Part, begin_work, collect
    from papers.guidance import PAPER
    from papers.guidance.electra_arm import ELECTRA_KEYS, ELECTRA_NAME, ELECTRA_NOTES, train_electra
    from papers.guidance.study import Places, wiki_stores

    check_writable(options.out)
    arm = _arm(options)
    tokeniser, stores = wiki_stores(Places(corpus=options.corpus), ELECTRA_NAME)
    begin_work(options.work, asdict(arm), seed=arm.seed)
    part = Part(options.work / f"part-{arm.name}.json", keys=ELECTRA_KEYS)
    train_electra(arm, tokeniser=tokeniser, stores=stores, run_dir=options.work / "runs" / arm.name, part=part)
    collect(ELECTRA_NAME, PAPER, [options.work], options.out, keys=ELECTRA_KEYS, notes=ELECTRA_NOTES)
    return options.out


EXPERIMENTS: dict[str, Experiment] = {
    "guidance-electra-arm": Experiment(
        "Attention guidance: one ELECTRA, guided or not, alone, and when it leaves its plateau (Figure 6).",
        _arguments,
        _run,
        "--guided --corpus runs/wiki --work runs/guidance-electra",
        more={"the arm without guidance": "--corpus runs/wiki --work runs/guidance-electra"},
        settings=_settings,
        quick={"steps": 4, "tokens": 512, "width": 32, "layers": 3},
    ),
}
