"""``python -m papers ktiw-permutations``, ``ktiw-multihead`` and others: KTIW's toy tasks, which need no data."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from papers.common.folders import Experiment, add_out
from papers.ktiw.run import SAME, Arguments, WriteResults, add_page, results_of

if TYPE_CHECKING:
    from papers.ktiw.config import PermutationsConfig

__all__ = ["EXPERIMENTS"]


def _toy_arguments(name: str) -> Arguments:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, help="models of each setting, instead of the paper's")
        parser.add_argument("--steps", type=int, help="updates of each training, instead of the default")
        add_out(parser, name)
        add_page(parser)

    return arguments


def _copying_arguments(name: str) -> Arguments:
    def arguments(parser: argparse.ArgumentParser) -> None:
        _toy_arguments(name)(parser)
        models = "literal: Eqs. 1 and 2; projected: with a bias in attention and a linear layer on the context"
        parser.add_argument("--model", choices=("literal", "projected"), default="literal", help=models)
        if name == "ktiw-multihead":
            parser.add_argument("--candidates", type=int, help="initialisations that are tried (default: 64)")
            parser.add_argument("--base", type=int, help="the seed of all but the heads (default: 0)")
            parser.add_argument("--tables-only", action="store_true", help="train nothing; areas of the file's curves")

    return arguments


def _toy(name: str) -> WriteResults:
    def write(options: argparse.Namespace) -> dict[str, Any]:
        from papers.ktiw.assemble import compute_areas, run_toy

        if getattr(options, "tables_only", False):
            return compute_areas(options.out)
        return run_toy(name, options.out, _changes(name, options))

    return write


def _changes(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The settings of a toy experiment that options change."""
    changes = {"seeds": options.seeds, "steps": options.steps}
    if name != "ktiw-local":
        trainings = ("head_steps", "figure_6_steps", "permute_steps")
        changes |= {"literal": options.model == "literal", **dict.fromkeys(trainings, options.steps)}
    if name == "ktiw-multihead":
        changes |= {"candidates": options.candidates, "base": options.base}
    return {key: value for key, value in changes.items() if value is not None}


def _toy_settings(name: str) -> Callable[[argparse.Namespace], dict[str, Any]]:
    def settings(options: argparse.Namespace) -> dict[str, Any]:
        from papers.ktiw.config import LocalConfig, PermutationsConfig

        config = LocalConfig() if name == "ktiw-local" else PermutationsConfig()
        return asdict(replace(config, **_changes(name, options)))

    return settings


def _bases_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bases", type=int, nargs="+", default=[0, 1, 4, 6, 8], help="seeds of all but the head")
    parser.add_argument("--heads", type=int, default=4, help="initialisations of the head (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="updates of each training (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="examples of an update (default: %(default)s)")
    add_out(parser, "ktiw-bases")


def _bases(options: argparse.Namespace) -> Path:
    from attnlab.provenance import check_writable
    from papers.ktiw.bases import write_bases

    check_writable(options.out)
    write_bases(options.out, config=_bases_config(options), bases=options.bases, heads=range(options.heads))
    return options.out


def _bases_config(options: argparse.Namespace) -> PermutationsConfig:
    from papers.ktiw.config import PermutationsConfig

    return PermutationsConfig(head_steps=options.steps, batch=options.batch)


def _bases_settings(options: argparse.Namespace) -> dict[str, Any]:
    return {**asdict(_bases_config(options)), "bases": options.bases, "heads": options.heads}


QUICK_TOY = {"steps": 10, "seeds": 1}
EXPERIMENTS: dict[str, Experiment] = {
    "ktiw-permutations": Experiment(
        "KTIW: Figure 3, copying permutations, where single words cannot be learned.",
        _copying_arguments("ktiw-permutations"),
        results_of(_toy("ktiw-permutations")),
        **SAME,
        settings=_toy_settings("ktiw-permutations"),
        quick=QUICK_TOY,
    ),
    "ktiw-multihead": Experiment(
        "KTIW: Figure 6, good and bad initialisations of eight heads.",
        _copying_arguments("ktiw-multihead"),
        results_of(_toy("ktiw-multihead")),
        more={
            "on a base where heads fail alone": "--base 1",
            "with a bias and a projection": "--model projected --out papers/results/ktiw-multihead-projected.json",
        },
        **SAME,
        settings=_toy_settings("ktiw-multihead"),
        quick={**QUICK_TOY, "candidates": 1},
    ),
    "ktiw-local": Experiment(
        "KTIW: Figure 7, where the knowledge of a keyword lies.",
        _toy_arguments("ktiw-local"),
        results_of(_toy("ktiw-local")),
        **SAME,
        settings=_toy_settings("ktiw-local"),
        quick=QUICK_TOY,
    ),
    "ktiw-permute-function": Experiment(
        "KTIW: section 6.2, copying against a fixed permutation of positions.",
        _copying_arguments("ktiw-permute-function"),
        results_of(_toy("ktiw-permute-function")),
        **SAME,
        settings=_toy_settings("ktiw-permute-function"),
        quick=QUICK_TOY,
    ),
    "ktiw-bases": Experiment(
        "Ours: whether Figure 6's heads decide, or the rest of the model: every head alone on several bases.",
        _bases_arguments,
        _bases,
        settings=_bases_settings,
        quick={"bases": [0, 4], "heads": 1, "steps": 4, "batch": 8},
    ),
}
