"""``python -m papers``: the experiments of the papers by name, each with its own arguments; alone it lists them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from attnlab.cli import run_reporting
from papers.experiments import EXPERIMENTS

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one experiment; the exit code is 0, 2 for something the user can mend, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m papers", description="The papers' experiments.")
    names = parser.add_subparsers(dest="experiment", metavar="EXPERIMENT")
    for name, experiment in EXPERIMENTS.items():
        sub = names.add_parser(name, help=experiment.summary, description=experiment.summary)
        experiment.arguments(sub)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(argv)
    if options.experiment is None:
        for name, experiment in EXPERIMENTS.items():
            print(f"{name:<24}{experiment.summary}")
        return 0
    return run_reporting(EXPERIMENTS[options.experiment].run, options, program="python -m papers")


if __name__ == "__main__":
    sys.exit(main())
