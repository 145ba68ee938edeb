"""Shared by several commands: the options of a comparison, how its result is shown, JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnlab.evaluation.compare import CompareConfig

__all__ = ["check_mechanisms", "comparison_arguments", "comparison_config", "print_json", "show_comparison"]


def comparison_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that demo and compare share: the mechanisms, and how much text is read."""
    parser.add_argument("-m", "--mechanism", action="append", metavar="SPEC", help="a mechanism; repeat for more")
    parser.add_argument("--length", type=int, help="tokens in a window (default: 256, or what the model can take)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the text to read (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="windows in a batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which tokens are masked (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")


def comparison_config(options: argparse.Namespace) -> CompareConfig:
    """The settings from the options of ``comparison_arguments``."""
    from attnlab.evaluation.compare import DEFAULT_MECHANISMS, CompareConfig

    specs = tuple(options.mechanism or DEFAULT_MECHANISMS)
    check_mechanisms(specs)
    return CompareConfig(
        mechanisms=specs, length=options.length, tokens=options.tokens, batch=options.batch, seed=options.seed
    )


def check_mechanisms(specs: Sequence[str]) -> None:
    """Raise the error of a misspelt mechanism now, before a large model is loaded."""
    from attnlab.registry import mechanism

    for spec in specs:
        mechanism(spec)


def show_comparison(result: dict[str, Any], options: argparse.Namespace, *, written: Sequence[Path]) -> None:
    """The tables of a comparison, or its JSON, and the files that were written."""
    from attnlab.evaluation.compare import table_lines
    from attnlab.evaluation.recommend import recommend_lines
    from attnlab.evaluation.sweep import sweep_lines

    if options.json:
        print_json(result)
    else:
        print("\n".join(table_lines(result)))
        if "sweeps" in result:
            print("", *sweep_lines(result), sep="\n")
        if "recommendation" in result:
            print("", *recommend_lines(result["recommendation"]), sep="\n")
    for path in written:
        print(f"wrote {path.resolve()}", file=sys.stderr if options.json else sys.stdout)


def print_json(result: Any) -> None:
    """A result as ``--json`` prints it."""
    print(json.dumps(result, indent=1, ensure_ascii=False))
