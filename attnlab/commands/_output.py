"""What a command gives back, and the one place that prints it: for people, or with ``--json`` for programs."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Answer", "StoppedEarly", "in_one_line", "is_standard_output", "run_and_show", "styled"]

# The most characters of an error; the list of all mechanisms is shorter.
LONGEST = 1400
STYLES = {"bold": "1", "green": "32", "yellow": "33", "red": "31"}


@dataclass(frozen=True)
class Answer:
    """The result as ``--json`` prints it, the same as lines for people, the files that were written, the exit code."""

    result: Mapping[str, Any]
    lines: Sequence[str] = ()
    written: Sequence[Path] = ()
    code: int = 0


class StoppedEarly(KeyboardInterrupt):
    """Ctrl-C in a command that has something to show all the same."""

    def __init__(self, sentence: str, answer: Answer) -> None:
        super().__init__(sentence)
        self.answer = answer


def run_and_show(run: Any, options: argparse.Namespace) -> int:
    """Call a command's ``run(options)`` and print its answer; the exit code.

    Where standard output is for JSON, or for the page itself, what else is printed meanwhile goes to standard error.
    """
    reserved = options.json or is_standard_output(getattr(options, "out", None))
    try:
        with redirect_stdout(sys.stderr) if reserved else nullcontext():
            answer: Answer = run(options)
    except StoppedEarly as stopped:
        _show(stopped.answer, as_json=options.json, notices=sys.stderr if reserved else sys.stdout)
        raise
    _show(answer, as_json=options.json, notices=sys.stderr if reserved else sys.stdout)
    return answer.code


def _show(answer: Answer, *, as_json: bool, notices: TextIO) -> None:
    """The result, and last the paths of what was written."""
    paths = [str(path.resolve()) for path in answer.written]
    if as_json:
        print(json.dumps(_as_json({**answer.result, "written": paths}), indent=1, ensure_ascii=False), flush=True)
    elif answer.lines:
        print("\n".join(answer.lines), file=notices, flush=True)
    for path in paths:
        print(f"wrote {path}", file=notices)


def _as_json(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _as_json(one) for key, one in value.items()}
    return [_as_json(one) for one in value] if isinstance(value, (list, tuple)) else value


def is_standard_output(path: Path | str | None) -> bool:
    """Whether a path names standard output."""
    return str(path) in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


def styled(text: str, style: str) -> str:
    """The text in a style where standard output is a terminal that shows it; https://no-color.org is honoured."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return text if plain else f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def in_one_line(text: str) -> str:
    """The text without line ends, cut in its middle where it is very long, and without what cannot be printed."""
    line = "; ".join(line.strip() for line in text.splitlines() if line.strip())
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
    return line.encode(errors="backslashreplace").decode()
