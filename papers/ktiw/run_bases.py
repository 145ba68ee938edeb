"""``python -m papers ktiw-bases``: heads of Figure 6, each alone, on several base models."""

from __future__ import annotations

import argparse
from pathlib import Path

from papers.common.folders import Experiment, add_out

__all__ = ["EXPERIMENTS"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bases", type=int, nargs="+", default=[0, 1, 4, 6, 8], help="seeds of all but the head")
    parser.add_argument("--heads", type=int, default=4, help="initialisations of the head (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="updates of each training (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="examples of an update (default: %(default)s)")
    add_out(parser, "ktiw-bases")


def _run(options: argparse.Namespace) -> Path:
    from attnlab.provenance import check_writable
    from papers.ktiw.bases import write_bases
    from papers.ktiw.config import PermutationsConfig

    check_writable(options.out)
    config = PermutationsConfig(head_steps=options.steps, batch=options.batch)
    write_bases(options.out, config=config, bases=options.bases, heads=range(options.heads))
    return options.out


EXPERIMENTS: dict[str, Experiment] = {
    "ktiw-bases": Experiment(
        "Ours: whether Figure 6's heads decide, or the rest of the model: every head alone on several bases.",
        _arguments,
        _run,
        quick={"bases": [0, 4], "heads": 1, "steps": 4, "batch": 8},
    ),
}
