"""Shared by several commands: JSON on the terminal, and specs that are checked before a model is loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

__all__ = ["check_mechanisms", "check_page", "notices", "print_json"]


def check_page(out: Path, *, json: bool) -> None:
    """Raise now if the page cannot be written, or would be mixed with the JSON on standard output."""
    from attnlab.provenance import check_writable

    check_writable(out)
    if json and notices(out) is sys.stderr:
        raise ValueError(f"{out} and --json would both be standard output; write the page to a file")


def notices(out: Path) -> TextIO:
    """Where a command says what it did: standard output, unless the page itself goes there."""
    return sys.stderr if str(out) in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1") else sys.stdout


# The laws that take well under a second, and without which no number of a mechanism means much.
QUICK_LAWS = ("output_is_weights_times_values", "hidden_keys_get_no_weight")


def check_mechanisms(specs: Sequence[str]) -> None:
    """Raise the error of a misspelt mechanism now, before a large model is loaded.

    One from a user's own file is tried on small calls, and a warning says if it looks at keys that a query may not see.
    """
    from attnlab.registry import FILE_SPEC, mechanism

    for spec in specs:
        mech = mechanism(spec)
        if FILE_SPEC.fullmatch(spec):
            from attnlab.conformance.check import check

            for broken in check(mech, laws=QUICK_LAWS).failed:
                print(f"attnlab: warning: {spec} breaks the law {broken.law}: {broken.reason}", file=sys.stderr)


def print_json(result: Any) -> None:
    """A result as ``--json`` prints it."""
    print(json.dumps(result, indent=1, ensure_ascii=False))
