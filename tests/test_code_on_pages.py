"""No block of code on a page escapes: Python runs or says why not, commands are understood by the programs they call."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from attnlab.commands.table import COMMANDS, make_parser
from papers.__main__ import _parser as papers_parser
from papers.common.folders import experiments_like
from tests.opened_pages import ROOT, Block, blocks_of, page_blocks
from tests.test_docs import ALL_PAGES, NOT_RUN, RUNNABLE

# Fenced as ``py``, only compiled: why such a page's block cannot run in the tests.
ONLY_COMPILED = {
    "docs/evaluate.md": "it reads SmolLM2 for minutes; tests/evaluation/test_evaluate.py calls it on a small model",
    "docs/guidance.md": "the trainer is the reader's; tests/guidance/test_trainer.py does the same",
    "docs/huggingface.md": "lm-eval's task wants a download",
    "docs/judge.md": "it reads SmolLM2 for minutes; tests/evaluation/test_judge.py calls it on a small model",
    "docs/kernels.md": "its tensors lie on a GPU; tests/kernels calls the same functions",
    "notes/corpora.md": "the corpora are downloads",
    "notes/results-and-claims.md": "a claim as it stands in a paper's folder, which its tests read",
}
# Blocks without a language that hold no commands, by how they begin: what they are.
NO_COMMANDS = {
    "cli -> commands": "the arrows between the rooms",
    "papers/        one folder": "the drawing of the rooms",
    ">>> report = al.check": "what a report looks like, compared by tests/test_docs.py",
}
# Fenced in these languages a block is no code that could run.
NO_CODE = {"math", "toml"}
# Programs that are not ours; their lines must only be well formed.
OTHERS = {"accelerate", "pip", "source"}
COMMAND = re.compile(r"(?:\.venv/bin/)?(\w+)(?: |$)")


class UnknownWordsError(Exception):
    """A command that its parser does not understand."""


def parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """What the parser makes of the words; options that it wants and a page leaves out are no mistake."""

    def refuse(message: str) -> NoReturn:
        raise UnknownWordsError(message)

    for one in [parser, *subparsers(parser)]:
        one.error = refuse  # type: ignore[method-assign]
        for action in one._actions:
            if not isinstance(action, argparse._SubParsersAction):
                action.required = False
        for group in one._mutually_exclusive_groups:
            group.required = False
    return parser.parse_args(words)


def subparsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    return [sub for a in parser._actions if isinstance(a, argparse._SubParsersAction) for sub in a.choices.values()]


def check_attnlab(words: list[str]) -> None:
    if words and words != ["--version"] and not words[0].isupper():
        assert parsed(make_parser(words), words).command == words[0]


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {word for word in words if "=" not in word} <= set(targets), words


def check_python(words: list[str]) -> None:
    if words[:2] == ["-m", "papers"]:
        if words[2:] and "--help" not in words and not words[2].isupper():
            parsed(papers_parser(experiments_like(words[2])), words[2:])
    elif words[0] == "-m":
        module = ROOT / words[1].replace(".", "/")
        ours = words[1].split(".")[0] in ("attnlab", "benchmarks", "papers", "tests", "tools")
        assert not ours or module.is_dir() or module.with_suffix(".py").is_file(), words[1]
    else:
        assert (ROOT / words[0]).is_file(), words[0]


CHECKS: dict[str, Callable[[list[str]], Any]] = {
    "attnlab": check_attnlab,
    "make": check_make,
    "python": check_python,
    **dict.fromkeys(OTHERS, lambda _: None),
}


def commands(block: Block) -> list[str]:
    """The commands of a block, one a line unless a line ends with a backslash."""
    lines = block.source.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def check_command(line: str) -> None:
    """Every word must be one that the program knows; the commands are about a reader's own files, so none is run."""
    for one in re.split(r" && | \| ", line):
        match = COMMAND.match(one)
        assert match, f"{one!r} is no command"
        check = CHECKS.get(match.group(1))
        assert check, f"{match.group(1)} is no program that this test knows"
        check(shlex.split(one, comments=True)[1:])


def is_shell(block: Block) -> bool:
    shown = block.source.lstrip().startswith(tuple(NO_COMMANDS))
    return block.language in ("", "bash") and not shown and "<!-- " not in block.source


SHELL = [(page, block) for page in ALL_PAGES for block in page_blocks(page) if is_shell(block)]


@pytest.mark.parametrize(("page", "block"), SHELL, ids=[f"{page}:{block.line}" for page, block in SHELL])
def test_commands_of_blocks_are_understood(page: str, block: Block) -> None:
    for line in commands(block):
        check_command(line)


def spans(page: str) -> list[str]:
    """Commands of ours inside sentences and tables: code that names a program and at least one more word."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in page_blocks(page):
        text = text.replace(block.source, "")
    return re.findall(r"`((?:attnlab [a-z]|make [a-z]|python -m |python [a-z]+/)[^`]*)`", text)


@pytest.mark.parametrize("page", [page for page in ALL_PAGES if page != "CHANGELOG.md" and spans(page)])
def test_commands_in_sentences_are_understood(page: str) -> None:
    for line in spans(page):
        # "..." and FILE stand for what a reader puts there.
        check_command(line.replace(" ...", ""))


def test_every_python_block_runs_somewhere() -> None:
    pages = {page for page in ALL_PAGES for block in page_blocks(page) if block.language == "python"}
    assert pages == set(RUNNABLE) | set(NOT_RUN)


def test_python_that_is_only_compiled_is_listed_with_a_reason() -> None:
    shown = [(page, block) for page in ALL_PAGES for block in page_blocks(page) if block.language == "py"]
    assert {page for page, _ in shown} == set(ONLY_COMPILED)
    for page, block in shown:
        compile(block.source, page, "exec", dont_inherit=True)


@pytest.mark.parametrize("page", ALL_PAGES)
def test_blocks_are_of_a_known_language_and_hide_no_python(page: str) -> None:
    for block in page_blocks(page):
        assert block.language in {"python", "py", "", "bash", *NO_CODE}, f"{page}:{block.line}"
        if block.language == "python":
            commented = re.findall(r"^\s*# (.*)$", block.source, flags=re.MULTILINE)
            assert not [line for line in commented if is_statement(line)], f"{page}:{block.line}: run it or say py"


def is_statement(text: str) -> bool:
    """Whether a comment is code that was taken out: an assignment of, or a call to, something."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Call) for statement in body for node in ast.walk(statement))


@pytest.mark.parametrize(
    "wrong",
    [
        "attnlab compare ./m --no-such-option",
        "attnlab no-such-command",
        "make no-such-target",
        "python benchmarks/no_such_file.py",
        "python -m tools.no_such_module",
        "python -m papers value-aware --no-such-option",
        "no-such-program --help",
    ],
)
def test_a_wrong_command_is_found(wrong: str) -> None:
    with pytest.raises((AssertionError, UnknownWordsError)):
        check_command(wrong)


def test_a_block_after_python_is_found() -> None:
    text = "```python\n1\n```\n\nText.\n\n```\nattnlab demo\n```\n"
    assert [commands(block) for block in blocks_of(text) if is_shell(block)] == [["attnlab demo"]]


def test_every_command_is_on_a_page() -> None:
    lines = [line.split() for page, block in SHELL for line in commands(block)]
    assert set(COMMANDS) <= {words[1] for words in lines if words[0].endswith("attnlab") and len(words) > 1}
