"""The command line: a command's name -> the function that does it. What a user can mend is one line, exit code 2."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab import __version__

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True)
class Command:
    """One command: what it does, an example, its arguments, and the function that runs it."""

    summary: str
    example: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 2 for something the user can mend, 130 for Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        print(_overview())
        return 0
    try:
        COMMANDS[options.command].run(options)
    except KeyboardInterrupt as stopped:
        print(f"attnlab: {stopped or 'interrupted'}", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if options.debug:
            traceback.print_exc()
        else:
            print(f"attnlab: {_one_line(error)}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attnlab", description="A laboratory for attention.")
    parser.add_argument("--version", action="version", version=f"attnlab {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name, help=command.summary, description=f"{command.summary} Example: {command.example}"
        )
        command.arguments(sub)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _overview() -> str:
    lines = [f"attnlab {__version__}: a laboratory for attention. What one can do:", ""]
    for name, command in COMMANDS.items():
        lines += [f"  {name:<10} {command.summary}", f"             $ {command.example}", ""]
    return "\n".join([*lines, "attnlab COMMAND --help lists a command's options."])


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _comparison_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--mechanism", action="append", metavar="SPEC", help="a mechanism; repeat for more")
    parser.add_argument("--length", type=int, help="tokens in a window (default: 256, or what the model can take)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the text to read (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="windows in a batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which tokens are masked (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder or a hub name")
    parser.add_argument("--text", type=Path, help="a UTF-8 text file (default: the text shipped with attnlab)")
    _comparison_arguments(parser)
    parser.add_argument("-o", "--out", type=Path, default=Path("compare.html"), help="the page (default: %(default)s)")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run")


def _compare(options: argparse.Namespace) -> None:
    from attnlab.data import bundled_text, read_text
    from attnlab.experiments.compare import compare
    from attnlab.hf import load_model
    from attnlab.provenance import check_writable, write_atomic
    from attnlab.reports import compare_page

    check_writable(options.out)
    config = _compare_config(options)
    text = bundled_text() if options.text is None else read_text(options.text)
    loaded = load_model(options.model, trust_remote_code=options.trust_remote_code)
    text_name = "shipped" if options.text is None else options.text.name
    result = compare(loaded, text, config=config, model_name=Path(options.model).name, text_name=text_name)
    write_atomic(options.out, compare_page(result))
    _show(result, options, written=[options.out])


def _compare_config(options: argparse.Namespace) -> Any:
    from attnlab.experiments.compare import DEFAULT_MECHANISMS, CompareConfig
    from attnlab.registry import mechanism

    specs = tuple(options.mechanism or DEFAULT_MECHANISMS)
    for spec in specs:
        # A misspelt mechanism is told before a large model is loaded.
        mechanism(spec)
    return CompareConfig(
        mechanisms=specs, length=options.length, tokens=options.tokens, batch=options.batch, seed=options.seed
    )


def _show(result: dict[str, Any], options: argparse.Namespace, *, written: Sequence[Path]) -> None:
    from attnlab.experiments.compare import table_lines

    if options.json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        print("\n".join(table_lines(result)))
    for path in written:
        print(f"wrote {path.resolve()}", file=sys.stderr if options.json else sys.stdout)


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    _comparison_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="the folder to write (default: %(default)s)")


def _demo(options: argparse.Namespace) -> None:
    from attnlab.experiments.demo import demo
    from attnlab.provenance import check_writable, write_atomic, write_json
    from attnlab.reports import compare_page

    options.out.mkdir(parents=True, exist_ok=True)
    page, numbers = options.out / "index.html", options.out / "results.json"
    check_writable(page)
    result, maps = demo(_compare_config(options))
    write_json(numbers, result)
    write_atomic(page, compare_page(result | maps))
    _show(result, options, written=[page, numbers])


COMMANDS: dict[str, Command] = {
    "demo": Command(
        "Compare approximations of attention on the small model that is shipped with attnlab, and write a page.",
        "attnlab demo",
        _demo_arguments,
        _demo,
    ),
    "compare": Command(
        "Put mechanisms in place of a model's attention: its quality, their error, time and memory.",
        "attnlab compare ./my-model --text book.txt -m top-r:r=16 -m value-aware:r=16",
        _compare_arguments,
        _compare,
    ),
}
