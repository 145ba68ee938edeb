"""``attnlab diagnose``: before any training, is word translation learnable from a corpus' co-occurrence counts?"""

from __future__ import annotations

import argparse
from pathlib import Path

from attnlab.commands._output import Answer
from attnlab.progress import note, showing

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("source", type=Path, metavar="SOURCE", help="sentences, one a line; or a tsv of pairs")
    parser.add_argument("target", type=Path, nargs="?", metavar="TARGET", help="their translations, line by line")
    parser.add_argument("--lines", type=int, metavar="N", help="read only the first so many pairs")
    parser.add_argument(
        "--seed", type=int, metavar="N", default=0, help="seed of the random pairings (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> Answer:
    """Diagnose the corpus."""
    from attnlab.evaluation.diagnose import diagnose_files, diagnosis_lines

    with showing("diagnosing", at_once=False):
        note("reading the corpus")
        diagnosis = diagnose_files(options.source, options.target, lines=options.lines, seed=options.seed)
    return Answer(diagnosis, diagnosis_lines(diagnosis))
