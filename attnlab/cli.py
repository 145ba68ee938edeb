"""The command line: a command's name -> its module, loaded when called. An error a user can correct is one line."""

from __future__ import annotations

import argparse
import functools
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from attnlab import __version__
from attnlab.errors import first_line, is_out_of_memory, problem_of

__all__ = ["COMMANDS", "Command", "main", "run_reporting", "until_nobody_reads"]

# What a shell reports for a program that a closed pipe ended.
CLOSED_PIPE = 141
# The most characters of an error; the list of all mechanisms is shorter.
LONGEST = 1400


@dataclass(frozen=True)
class Command:
    """One command: what it does, and an example. Its module in ``attnlab.commands`` has ``arguments`` and ``run``."""

    summary: str
    example: str


COMMANDS: dict[str, Command] = {
    "demo": Command(
        "Compare approximations of attention on the small model that is shipped with attnlab, and write a page.",
        "attnlab demo",
    ),
    "compare": Command(
        "Put mechanisms in place of a model's attention: its quality, their error, time and memory.",
        "attnlab compare ./my-model --text book.txt -m top-r:r=16 -m value-aware:r=1",
    ),
    "explore": Command(
        "Look at a model's attention over a text, or at a run's over training: one offline page.",
        'attnlab explore ./my-model "The old ferry stayed in the harbour." --all -o page.html',
    ),
    "evaluate": Command(
        "A language model's loss, LAMBADA, needles and lm-eval's tasks under other kinds of attention, with intervals.",
        "attnlab evaluate smollm2 -m window:r=124,sinks=4 -m top-r:r=64",
    ),
    "judge": Command(
        "Judge key/value cache policies beside the full cache: needles, tracking, words and loss, bytes and times.",
        "attnlab judge smollm2 --policies snapkv h2o streaming-llm --budgets 0.5 0.25 --lengths 512 1024",
    ),
    "convert": Command(
        "Give a pretrained language model another attention for good, and let it learn from the model it was.",
        "attnlab convert smollm2 --budget 0.25 --text corpus/ --minutes 15 --out runs/quarter",
    ),
    "audit": Command(
        "Check what every head of a model does on a text; a change since an earlier audit is exit code 1, for CI.",
        "attnlab audit ./my-model --text book.txt --baseline audit/audit.json",
    ),
    "train": Command(
        "Train a masked or causal language model, with any mechanism as its attention, on your text.",
        "attnlab train --text corpus.txt --model attnlab-lm --task causal --attention kernel:elu --out runs/elu",
    ),
    "report": Command(
        "Turn run folders into one page of learning curves and tables.",
        "attnlab report runs/seed-0 runs/seed-1 -o report.html",
    ),
    "bench": Command(
        "Time and peak memory of mechanisms against torch's SDPA, over lengths, as ratios in one run.",
        "attnlab bench -m kernel:elu --lengths 4096 8192",
    ),
    "diagnose": Command(
        "Say before training whether word translation can be learned from a parallel corpus' co-occurrence counts.",
        "attnlab diagnose train.en train.de",
    ),
}


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


def _run_command(call: argparse.Namespace) -> int | None:
    options = make_parser(call.words).parse_args(call.words)
    if options.command is None:
        print(_overview())
        return 0
    code: int | None = command_module(options.command).run(options)
    return code


def command_module(name: str) -> Any:
    """The module of a command, imported now."""
    return importlib.import_module(f"attnlab.commands.{name}")


def make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for these words; only the command they name, the first word without a dash, gets its options."""
    named = next((word for word in words if not word.startswith("-")), None)
    parser = _Parser(prog="attnlab", description="A laboratory for attention.")
    parser.add_argument("--version", action="version", version=f"attnlab {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name, help=command.summary, description=f"{command.summary} Example: {command.example}"
        )
        if name == named:
            command_module(name).arguments(sub)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are short and can be printed, whatever was typed."""

    def error(self, message: str) -> NoReturn:
        super().error(_in_one_line(message))


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


def _overview() -> str:
    lines = [f"attnlab {__version__}: a laboratory for attention. What one can do:", ""]
    for name, command in COMMANDS.items():
        lines += [f"  {name:<10} {command.summary}", f"             $ {command.example}", ""]
    return "\n".join([*lines, "attnlab COMMAND --help lists a command's options."])


def _what_the_user_can_correct(error: Exception) -> str | None:
    """One line about an error that the user can correct; None for one that is a defect of the program."""
    if is_out_of_memory(error):
        detail = "" if isinstance(error, MemoryError) else f" ({_allocation(error)})"
        return f"there is not enough memory for this{detail}; ask for less, or use a machine with more"
    if isinstance(error, OSError) and error.filename is not None:
        return _in_one_line(f"{error.filename}: {error.strerror}")
    if isinstance(error, (ValueError, OSError, ImportError)) or _is_run_error(error):
        return _in_one_line(problem_of(error)) or type(error).__name__
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


def _in_one_line(text: str) -> str:
    """The text without line ends, cut in its middle where it is very long, and without what cannot be printed."""
    line = "; ".join(line.strip() for line in text.splitlines() if line.strip())
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
    return line.encode(errors="backslashreplace").decode()


if __name__ == "__main__":
    sys.exit(main())
