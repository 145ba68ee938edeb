"""docs/command-line.md is what the parsers say."""

from __future__ import annotations

from attnlab.commands.table import COMMANDS, parser_of
from tools.command_line_page import PAGE, page


def test_the_page_is_written_from_the_parsers() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.command_line_page"


def test_the_page_has_every_command_option_and_example() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, command in COMMANDS.items():
        assert f"\n## {name}\n" in text
        assert all(f"\n{example}\n" in text for example in command.examples)
        assert all(option in text for action in parser_of(name)._actions for option in action.option_strings[-1:])
