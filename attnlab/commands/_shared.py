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


def check_mechanisms(specs: Sequence[str]) -> None:
    """Raise the error of a misspelt mechanism now, before a large model is loaded."""
    from attnlab.registry import mechanism

    for spec in specs:
        mechanism(spec)


def print_json(result: Any) -> None:
    """A result as ``--json`` prints it."""
    print(json.dumps(result, indent=1, ensure_ascii=False))
