"""``attnlab diagnose``: before any training, is word translation learnable from a corpus' co-occurrence counts?"""

from __future__ import annotations

import argparse
from pathlib import Path

from attnlab.commands._shared import print_json

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("source", type=Path, metavar="SOURCE", help="sentences, one a line; or a tsv of pairs")
    parser.add_argument("target", type=Path, nargs="?", metavar="TARGET", help="their translations, line by line")
    parser.add_argument("--lines", type=int, help="read only the first so many pairs")
    parser.add_argument("--seed", type=int, default=0, help="of the random pairings (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(options: argparse.Namespace) -> None:
    """Diagnose the corpus and print the verdict."""
    from attnlab.evaluation.diagnose import diagnose_files, diagnosis_lines

    diagnosis = diagnose_files(options.source, options.target, lines=options.lines, seed=options.seed)
    if options.json:
        print_json(diagnosis)
    else:
        print("\n".join(diagnosis_lines(diagnosis)))
