"""Laws over all commands: one style of help, examples that work, JSON alone on standard output, paths said last."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import attnlab
from attnlab.caches.registry import key_score
from attnlab.cli import main
from attnlab.commands.completion import NAMES, SHELLS_OWN, SPECS
from attnlab.commands.table import COMMANDS, make_parser, parser_of
from attnlab.progress import Progress
from tests.commands.bad_input import GOOD, good_call

# The words for what an option takes, beside those that a shell completes.
PLAIN_KINDS = {"TEXT", "N", "NUMBER", "SHARE", "LIST", "NAME", "SHELL", "LAYER.HEAD:FROM-TO"}
KINDS = PLAIN_KINDS | set(NAMES) | set(SPECS) | set(SHELLS_OWN)
EXAMPLES = [(command, example) for command, entry in COMMANDS.items() for example in entry.examples]

# Commands that end at once, and what progress looks like in the others.
AT_ONCE = {"completion", "fetch"}
PROGRESS = re.compile(r"step \d+/\d+ |[a-z]+: ")


def actions(command: str) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser_of(command)._actions:
        yield f"{command} {(action.option_strings or [action.dest])[-1]}", action


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_of_one_style(command: str) -> None:
    for name, action in actions(command):
        explanation = action.help or ""
        assert re.match(r"[a-z0-9(]|[A-Z]{3}", explanation), f"{name}: begin in lower case: {explanation!r}"
        assert not explanation.endswith("."), f"{name}: no full stop"
        assert len(re.sub(r"\(default.*", "", explanation).split()) >= 2, f"{name} says too little"
        if action.nargs == 0:
            continue
        assert action.choices or action.metavar in KINDS, f"{name}: {action.metavar} is no kind of value"
        if action.default not in (None, []):
            assert "default: " in explanation, f"{name} does not say its default"
    for word in ("--json", "--debug"):
        assert [a for _, a in actions(command) if word in a.option_strings], f"{command} has no {word}"


@pytest.mark.parametrize(("command", "example"), EXAMPLES)
def test_every_example_is_a_call_with_names_that_exist(command: str, example: str) -> None:
    program, *words = shlex.split(example)
    assert program == "attnlab"
    options = make_parser(words).parse_args(words)
    assert options.command == command
    for _, action in actions(command):
        value = getattr(options, action.dest, None)
        for one in [] if value is None else value if isinstance(value, list) else [value]:
            if action.metavar == "MECHANISM":
                attnlab.mechanism(one)
            elif action.metavar == "POLICY":
                attnlab.cache_policy(one) if "budget" in one else key_score(one)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_the_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    examples = [f"  {example}" for example in COMMANDS[command].examples]
    assert lines[-len(examples) - 1 :] == ["examples:", *examples]


def strict(text: str) -> dict[str, Any]:
    """The one JSON object of a text; NaN and infinity are no JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    result = json.loads(text, parse_constant=refuse)
    assert isinstance(result, dict)
    return result


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def is_said(path: Path, said: list[str]) -> bool:
    return any(Path(one) in (path, *path.parents) for one in said)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("as_json", [False, True], ids=["lines", "json"])
def test_the_result_alone_is_on_standard_output_progress_is_not_and_written_paths_come_last(
    command: str,
    as_json: bool,
    files: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = tmp_path / "own"
    words = good_call(command, files, own)
    monkeypatch.chdir(own)
    # Without a terminal progress is shown after some seconds; here it comes at once.
    monkeypatch.setattr("attnlab.progress.QUIET", 0.0)
    assert main([*words, *(["--json"] if as_json else [])]) == 0
    out, err = capfd.readouterr()
    lines = (err if as_json else out).splitlines()
    # What follows the last line of another kind.
    said: list[str] = []
    while lines and lines[-1].startswith("wrote "):
        said.insert(0, lines.pop().removeprefix("wrote "))
    assert not [line for line in lines if line.startswith("wrote ")]
    if as_json:
        assert strict(out)["written"] == said
    assert command in AT_ONCE or any(PROGRESS.match(line) for line in err.splitlines()), err
    assert all(is_said(path, said) for path in files_in(own)), files_in(own)
    assert all(Path(one).exists() for one in said)
    assert "\x1b" not in out + err


def test_a_line_of_progress_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("attnlab.progress.time", SimpleNamespace(monotonic=lambda: now))
    progress = Progress("timing", plain=True)
    # Reading a model takes a minute, which is no part of a step.
    now = 160.0
    progress.expect(4)
    for seconds in (5.0, 10.0, 15.0, 20.0):
        now = 160 + seconds
        progress.step()
        progress.finished("a part")
    assert capsys.readouterr().err.splitlines() == [
        "timing: a part, about 00:15 left",
        "timing: a part, about 00:10 left",
        "timing: a part, about 00:05 left",
        "timing: a part",
    ]


def test_a_long_stage_is_not_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr("attnlab.progress.time", SimpleNamespace(monotonic=lambda: now))
    progress = Progress("planning", plain=True)
    progress.expect(10)
    progress.stage("candidates")
    for _ in range(10):
        now += 4
        progress.step()
    assert capsys.readouterr().err.splitlines() == [
        "planning: candidates, about 00:28 left",
        "planning: candidates, about 00:16 left",
        "planning: candidates, about 00:04 left",
    ]


def test_every_command_has_a_good_call() -> None:
    assert set(GOOD) == set(COMMANDS)


def test_readings_are_listed_as_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--list-readings", "--json"]) == 0
    assert set(strict(capsys.readouterr().out)["readings"]) == set(attnlab.reading_names())


def test_what_libraries_print_does_not_mix_with_the_json(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def talkative(*_: Any, **__: Any) -> dict[str, Any]:
        print("downloading")
        return {"bits": float("nan"), "nested": [float("inf"), 1.5]}

    monkeypatch.setattr("attnlab.evaluation.diagnose.diagnose_files", talkative)
    monkeypatch.setattr("attnlab.evaluation.diagnose.diagnosis_lines", lambda _: [])
    assert main(["diagnose", str(files / "text.txt"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert strict(out) == {"bits": None, "nested": [None, 1.5], "written": []}
    assert err == "downloading\n"


def test_an_evaluation_page_on_standard_output_needs_a_file_for_its_answers(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("evaluate", "judge"):
        assert main([command, str(files / "llama"), "-o", "/dev/stdout"]) == 2
        assert "name a file for the answers too: --answers FILE" in capsys.readouterr().err


def on_a_terminal(words: list[str], **variables: str) -> str:
    """What a command writes to a terminal."""
    leader, follower = pty.openpty()
    environment = {**{k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM")}, "TERM": "xterm"}
    command = [sys.executable, "-m", "attnlab", *words]
    with subprocess.Popen(command, stdout=follower, stderr=follower, env={**environment, **variables}) as process:
        os.close(follower)
        shown = b""
        try:
            while part := os.read(leader, 65536):
                shown += part
        # How Linux says that the other end is closed.
        except OSError:
            pass
        finally:
            os.close(leader)
    assert process.returncode == 0
    return shown.decode()


@pytest.mark.parametrize("words", [[], ["--help"], ["report", "--help"]], ids=" ".join)
def test_colours_are_for_terminals_alone(words: list[str]) -> None:
    assert "\x1b[1m" in on_a_terminal(words)
    assert "\x1b" not in on_a_terminal(words, NO_COLOR="1")
    assert "\x1b" not in on_a_terminal(words, TERM="dumb")
    piped = subprocess.run([sys.executable, "-m", "attnlab", *words], capture_output=True, text=True, check=True)
    assert "\x1b" not in piped.stdout + piped.stderr
