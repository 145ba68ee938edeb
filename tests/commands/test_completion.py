"""``attnlab completion``: in a real bash, zsh and fish, and as lists that cannot go stale."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import attnlab
from attnlab import registry
from attnlab.adapters.named_models import NAMED_MODELS, SHIPPED_MODELS
from attnlab.caches.registry import entry_of
from attnlab.cli import main
from attnlab.commands import completion
from attnlab.commands._sources import MECHANISMS, POLICIES, READINGS
from attnlab.commands.completion import completions
from attnlab.commands.table import COMMANDS, parser_of
from attnlab.evaluation.judge_cases import JUDGE_TASKS
from attnlab.registry import settings_of

# (what is typed, some of what it can become, some of what it cannot)
TYPED = [
    ("attnlab comp", {"compare", "completion"}, {"convert"}),
    ("attnlab ", set(COMMANDS), {"--help"}),
    ("attnlab judge --po", {"--policies"}, {"--tasks"}),
    ("attnlab compare m -m to", {"top-r"}, {"softmax"}),
    ("attnlab compare m -m top-r:", {"top-r:r=", "top-r:kernel="}, {"top-r"}),
    ("attnlab compare m -m top-r:r=4,", {"top-r:r=4,kernel="}, {"top-r:r=4,r="}),
    ("attnlab compare m --mechanism=top", {"--mechanism=top-r"}, {"top-r"}),
    ("attnlab judge m --policies h2o s", {"snapkv", "streaming-llm"}, {"h2o"}),
    ("attnlab evaluate m --policy snapkv:b", {"snapkv:budget="}, {"snapkv:window="}),
    ("attnlab evaluate m --tasks loss needle-", {"needle-multikey"}, {"needle"}),
    ("attnlab judge smol", {"smollm2"}, {"snapkv"}),
    ("attnlab train --model attnlab-", {"attnlab-lm", "attnlab-mlm"}, {"roberta-base"}),
    ("attnlab train --task ", {"mlm", "causal"}, {"attnlab-lm"}),
    ("attnlab explore m --reading eff", {"effective", "effective norm"}, {"entropy"}),
    ('attnlab explore m "an open quote', set(), {"smollm2"}),
    ("attnlab completion ", {"bash", "zsh", "fish"}, {"tcsh"}),
    ("attnlab nonsense ", set(), {"smollm2"}),
]


@pytest.mark.parametrize(("line", "some", "not_these"), TYPED)
def test_what_a_line_can_become(line: str, some: set[str], not_these: set[str]) -> None:
    words = [word for word, _ in completions(line)]
    assert some <= set(words)
    assert not not_these & set(words)
    assert len(words) == len(set(words))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_every_command_is_completed(command: str) -> None:
    options = {name for action in parser_of(command)._actions for name in action.option_strings}
    assert options == {word for word, _ in completions(f"attnlab {command} -")}


def test_names_from_the_sources_are_those_of_the_registries() -> None:
    assert MECHANISMS.names() == attnlab.mechanism_names()
    assert POLICIES.names() == attnlab.cache_policy_names()
    assert READINGS.names() == sorted(attnlab.reading_names())
    for name, entry in registry._load().items():
        assert MECHANISMS.settings(name) == [field.name for field in settings_of(entry.cls)], name
    common = [field.name for field in settings_of(attnlab.KVPolicy) if field.name != "by"]
    for name in POLICIES.names():
        assert POLICIES.settings(name) == [*(f.name for f in settings_of(entry_of(name)[0].cls)), *common], name
    assert set(completion.NAMED_MODELS) == {*NAMED_MODELS, *SHIPPED_MODELS}
    assert set(completion.TASKS) == set(JUDGE_TASKS)


def test_a_tab_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from attnlab.commands.completion import completions\n"
        "for line in ('attnlab ', 'attnlab judge x --policies ', 'attnlab compare x -m t', 'attnlab compare x -m top-r:', 'attnlab explore x --r'):\n"
        "    assert list(completions(line))\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A PATH whose ``attnlab`` is this one, and a home without files."""
    program = tmp_path / "bin" / "attnlab"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m attnlab "$@"\n')
    program.chmod(0o755)
    (tmp_path / "home" / "books").mkdir(parents=True)
    (tmp_path / "home" / "book.txt").touch()
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(tmp_path / "home"), "TERM": "dumb", "PS1": "$ "}


def type_into(shell: list[str], keys: list[tuple[str, str]], environment: dict[str, str]) -> None:
    """Type keys into a shell on a terminal; each must be followed by the text beside it within two minutes: a busy machine is slow."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(environment["HOME"])
        os.execvpe(shell[0], shell, environment)
    try:
        for key, expected in keys:
            os.write(terminal, key.encode())
            shown, until = "", time.monotonic() + 120
            while expected not in shown:
                assert select.select([terminal], [], [], max(0, until - time.monotonic()))[0], (key, expected, shown)
                shown += os.read(terminal, 65536).decode(errors="replace")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("attnlab doc", "doctor"),
        ("attnlab judge smol", "smollm2"),
        ("attnlab judge --poli", "--policies"),
        ("attnlab compare m -m value-a", "value-aware"),
        ("attnlab compare m -m window:si", "sinks="),
        ("attnlab evaluate m --policy snapkv:wi", "window="),
        ("attnlab explore m --reading 'effective", "effective\\ norm"),
        ("attnlab compare m --text bo", "book.txt"),
        ("attnlab audit m --out bo", "books"),
    ],
)
def test_bash_completes(typed: str, expected: str, environment: dict[str, str]) -> None:
    """The function that bash calls at a tab, with the variables that bash sets."""
    script = (
        'eval "$(attnlab completion bash)"; complete -p attnlab >/dev/null || exit 1\n'
        "compopt() { :; }\n"
        'COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; _attnlab; printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    ran = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", typed],
        env=environment,
        cwd=environment["HOME"],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert ran.stderr == ""
    assert expected in ran.stdout.splitlines()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes_at_the_tab_key(environment: dict[str, str]) -> None:
    keys = [
        ('eval "$(attnlab completion bash)"; echo rea""dy\n', "ready"),
        ("attnlab judge m --policies snap\t", "snapkv "),
        ("\b:win\t", "window="),
    ]
    type_into(["bash", "--norc", "-i"], keys, environment)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
def test_zsh_completes_at_the_tab_key(environment: dict[str, str]) -> None:
    start = 'autoload -U compinit; compinit -u; eval "$(attnlab completion zsh)"; echo rea""dy\n'
    keys = [(start, "ready"), ("attnlab judge m --policies snap\t", "snapkv"), ("\b:win\t", "window=")]
    type_into(["zsh", "-f", "-i"], keys, environment)


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish here")
def test_fish_completes(environment: dict[str, str]) -> None:
    script = 'attnlab completion fish | source; complete -C "attnlab judge m --policies snap"; complete -C "attnlab do"'
    ran = subprocess.run(["fish", "-c", script], env=environment, capture_output=True, text=True, timeout=240)
    assert ran.stdout.splitlines() == ["snapkv", f"doctor\t{COMMANDS['doctor'].summary}"]


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["completion", "tcsh"])
    assert stopped.value.code == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
