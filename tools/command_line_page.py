"""Writes docs/command-line.md from the parsers: `python -m tools.command_line_page`; a test fails where it is stale."""

from __future__ import annotations

import argparse
from pathlib import Path

from attnlab.commands.table import COMMANDS, parser_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "command-line.md"
# Every command has them, so that they are described once.
COMMON = ("--help", "--json", "--debug")
BEGINNING = """\
<!-- Written by `python -m tools.command_line_page` from the parsers; edit attnlab/commands instead. -->
# The command line

**Which command does it, and which options has it?** `attnlab` alone lists the commands, `attnlab COMMAND --help` says
what stands here.

- Every command takes `--json`: its result is then one JSON object on standard output, and nothing else is there.
  Files that were written are listed under `written`; a number that is not finite is `null`. `--debug` shows the
  traceback of an error.
- Without `--json` the paths of written files come last, one a line, after `wrote`.
- Progress, with the time that is left, and messages go to standard error: a bar on a terminal, a line now and then
  elsewhere.
- Exit codes: 0, 2 for what you can correct (one line says what and how, and nothing is left half written), 130 for
  Ctrl-C; `audit` has 1 for a change, `doctor` 1 for a core that does not work.
- Colours are for terminals alone; `NO_COLOR=1` turns them off there too.
- Completion of commands, options, mechanisms, policies and models: `eval "$(attnlab completion bash)"` in ~/.bashrc,
  the same with zsh in ~/.zshrc after compinit, `attnlab completion fish | source` in fish's config.fish.

A MECHANISM is a spec such as `top-r:r=16`, a POLICY one such as `snapkv:window=32`
([mechanisms](your-own-mechanism.md), [policies](cache.md)); `attnlab explore --list-readings` lists every READING. A
MODEL is a folder, a GGUF file, a hub name, `smollm2`, or one that comes with attnlab: `shipped-mlm`, `shipped-lm` or
`shipped-lm-bounded`.
"""
END = """
## When not to use this

Where one model goes through many settings, call attnlab from Python: the model is loaded once ([Hugging Face
models](huggingface.md)).
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")


def page() -> str:
    """The page as it must be."""
    return "\n".join([BEGINNING, *(section(name) for name in COMMANDS)]) + END


def section(name: str) -> str:
    """One command: what it does, its examples, and a table of its options."""
    command, parser = COMMANDS[name], parser_of(name)
    lines = [f"## {name}", "", command.summary, "", "```", *command.examples, "```", ""]
    rows = [row(parser, action) for action in parser._actions if not set(COMMON) & set(action.option_strings)]
    return "\n".join([*lines, *(["| option | what |", "| --- | --- |", *rows, ""] if rows else [])])


def row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """One line of the table."""
    formatter = parser._get_formatter()
    if action.option_strings:
        value = formatter._format_args(action, action.dest.upper()) if action.nargs != 0 else ""
        shown = f"{', '.join(action.option_strings)} {value}".strip()
    else:
        shown = str(formatter._format_args(action, action.dest))
    explanation = formatter._expand_help(action)
    required = " (required)" if action.required and action.option_strings else ""
    return f"| `{escaped(shown)}` | {escaped(explanation)}{required} |"


def escaped(text: str) -> str:
    """A cell's text, whose bars would end the cell."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
