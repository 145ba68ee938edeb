"""The command line: it runs one command of ``attnlab.commands``. An error a user can correct is one line."""

from __future__ import annotations

import argparse
import functools
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from attnlab.commands._output import in_one_line, run_and_show
from attnlab.commands.table import command_module, make_parser, overview
from attnlab.errors import first_line, is_out_of_memory, problem_of

__all__ = ["main", "run_reporting", "until_nobody_reads"]

# What a shell reports for a program that a closed pipe ended.
CLOSED_PIPE = 141


def until_nobody_reads(main: Callable[..., int]) -> Callable[..., int]:
    """A ``main`` that ends silently when the reader of its output, such as ``head``, has read enough."""

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        # The name of a file may hold what the terminal cannot show.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            try:
                return main(argv)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            # Python flushes stdout once more when it ends, which must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return CLOSED_PIPE

    return run


@until_nobody_reads
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 or the command's own, 2 for an error the user can correct, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Loading a command's module and its options may fail too, for want of memory.
    return run_reporting(_run_command, argparse.Namespace(words=words, debug="--debug" in words), program="attnlab")


def _run_command(call: argparse.Namespace) -> int:
    options = make_parser(call.words).parse_args(call.words)
    if options.command is None:
        print(overview())
        return 0
    return run_and_show(command_module(options.command).run, options)


def run_reporting(run: Any, options: argparse.Namespace, *, program: str) -> int:
    """Call ``run(options)``, which may return an exit code; an error the user can correct is one line on stderr."""
    try:
        code = run(options)
    except KeyboardInterrupt as stopped:
        print(f"{program}: {str(stopped) or 'interrupted'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        sentence = _what_the_user_can_correct(error)
        if sentence is None:
            raise
        if options.debug:
            traceback.print_exc()
        else:
            print(f"{program}: {sentence}", file=sys.stderr)
        return 2
    return code or 0


def _what_the_user_can_correct(error: Exception) -> str | None:
    """One line about an error that the user can correct; None for one that is a defect of the program."""
    if is_out_of_memory(error):
        detail = "" if isinstance(error, MemoryError) else f" ({_allocation(error)})"
        return f"there is not enough memory for this{detail}; ask for less, or use a machine with more"
    if isinstance(error, OSError) and error.filename is not None:
        return in_one_line(f"{error.filename}: {error.strerror}")
    if isinstance(error, (ValueError, OSError, ImportError)) or _is_run_error(error):
        return in_one_line(problem_of(error)) or type(error).__name__
    return None


def _is_run_error(error: Exception) -> bool:
    # It imports torch: where nothing has done so yet, no run has failed.
    if "attnlab.training" not in sys.modules:
        return False
    from attnlab.training import RunError

    return isinstance(error, RunError)


def _allocation(error: Exception) -> str:
    """What torch tried to allocate, without the place in its source."""
    return first_line(error).rpartition("DefaultCPUAllocator: ")[2]


if __name__ == "__main__":
    sys.exit(main())
