"""``attnlab completion``: a script by which a shell completes what is typed after ``attnlab``.

The script asks this command again at every tab, and the answer comes from the parsers, so that it is never out of date.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence

from attnlab.commands._output import Answer
from attnlab.commands._sources import MECHANISMS, POLICIES, READINGS, Sources
from attnlab.commands.table import COMMANDS, make_parser, parser_of
from attnlab.commands.train import MODEL_NAMES

__all__ = ["arguments", "completions", "run"]

SCRIPTS = {
    "bash": r"""# attnlab's completion for bash: put  eval "$(attnlab completion bash)"  into ~/.bashrc
_attnlab() {
    local IFS=$'\n' typed="${COMP_LINE:0:COMP_POINT}" word prefix breaks answer
    word="${typed##*[[:space:]]}"
    # Readline replaces what follows the last of these characters, not the whole word.
    breaks="${COMP_WORDBREAKS//[^:=]/}"
    [[ -n $breaks ]] && prefix="${word%"${word##*[$breaks]}"}"
    COMPREPLY=()
    for answer in $(attnlab completion bash --line "$typed" 2>/dev/null); do
        case "$answer" in
            :files) COMPREPLY+=($(compgen -f -- "${word#"$prefix"}")); compopt -o filenames ;;
            :folders) COMPREPLY+=($(compgen -d -- "${word#"$prefix"}")); compopt -o filenames ;;
            *) answer="${answer#"$prefix"}"; COMPREPLY+=("${answer// /\\ }") ;;
        esac
    done
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[:=] ]] && compopt -o nospace
}
complete -F _attnlab attnlab
""",
    "zsh": r"""#compdef attnlab
# attnlab's completion for zsh: put  eval "$(attnlab completion zsh)"  into ~/.zshrc, after compinit
_attnlab() {
    local answer shown
    local -a names descriptions
    for answer in "${(@f)$(attnlab completion zsh --line "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}"; do
        case "$answer" in
            "") ;;
            :files) _files ;;
            :folders) _files -/ ;;
            *) shown="${answer//$'\t'/  }"; names+=("${answer%%$'\t'*}"); descriptions+=("$shown") ;;
        esac
    done
    if [[ ${#names} -eq 1 && ${names[1]} == *[:=] ]]; then
        compadd -S '' -d descriptions -a names
    else
        compadd -l -d descriptions -a names
    fi
}
compdef _attnlab attnlab
""",
    "fish": r"""# attnlab's completion for fish: put  attnlab completion fish | source  into ~/.config/fish/config.fish
function __attnlab_complete
    for answer in (attnlab completion fish --line (commandline -cp) 2>/dev/null)
        switch $answer
            case :files
                __fish_complete_path (commandline -ct)
            case :folders
                __fish_complete_directories (commandline -ct)
            case '*'
                echo $answer
        end
    end
end
complete -c attnlab -f -a '(__attnlab_complete)'
""",
}
# The words in the help for what the shell itself completes.
SHELLS_OWN = {
    **dict.fromkeys(("FILE", "PATH", "SOURCE", "TARGET", "MODEL"), ":files"),
    **dict.fromkeys(("FOLDER", "RUN"), ":folders"),
}
# The short names of models, and the tasks, repeated here so that a tab need not import torch; tests compare them.
NAMED_MODELS = ("smollm2", "shipped-mlm", "shipped-lm", "shipped-lm-bounded")
TASKS = (
    *("loss", "lambada", "needle", "needle-multikey", "needle-multivalue", "needle-multiquery"),
    *("variables", "common-words", "frequent-words"),
)
DEVICES = ("cpu", "cuda")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "shell",
        choices=tuple(SCRIPTS),
        metavar="SHELL",
        help=f"{', '.join(SCRIPTS)}; the script's first line says where to put it",
    )
    parser.add_argument(
        "--line", metavar="TEXT", help="print what can follow this line instead, one a line: what the script asks"
    )


def run(options: argparse.Namespace) -> Answer:
    """The script, or what can follow a line."""
    if options.line is None:
        script = SCRIPTS[options.shell]
        return Answer({"shell": options.shell, "script": script}, script.splitlines())
    answers = list(completions(options.line))
    # Bash shows a candidate as it is, without a description.
    lines = [word if options.shell == "bash" or not about else f"{word}\t{about}" for word, about in answers]
    return Answer({"shell": options.shell, "completions": [word for word, _ in answers]}, lines)


def completions(line: str) -> Iterator[tuple[str, str]]:
    """(word, description) of what the last word of a command line can become; ``:files`` is any file.

    >>> [word for word, _ in completions("attnlab comp")]
    ['compare', 'completion']
    """
    *before, word = _words(line)[1:] or [""]
    command = next((one for one in before if not one.startswith("-")), None)
    if command is None:
        names = {name: entry.summary for name, entry in COMMANDS.items()} if word[:1] != "-" else {}
        yield from _beginning(word, {**names, **_options(make_parser([]), word)})
    elif command in COMMANDS:
        yield from _of_command(parser_of(command), before[before.index(command) + 1 :], word)


def _words(line: str) -> list[str]:
    """The words of a line as a shell splits it; the last one may have no end yet, not even of its quotes."""
    for end in ("", '"', "'"):
        try:
            words = shlex.split(line + end)
        except ValueError:
            continue
        return [*words, ""] if not end and (not line or line[-1:].isspace()) else words
    return line.split()


def _of_command(parser: argparse.ArgumentParser, before: list[str], word: str) -> Iterator[tuple[str, str]]:
    """What a word after a command and some words of its own can become."""
    by_name = _by_name(parser)
    option, equals, value = word.partition("=")
    if equals and option in by_name:
        for candidate, about in _values(by_name[option], value):
            yield candidate if candidate.startswith(":") else f"{option}={candidate}", about
        return
    if word.startswith("-"):
        yield from _beginning(word, _options(parser, word))
    else:
        for action in _awaited(parser, before):
            yield from _values(action, word)


def _awaited(parser: argparse.ArgumentParser, before: list[str]) -> list[argparse.Action]:
    """The option or argument, or both, that the next word without a dash can be given to."""
    by_name = _by_name(parser)
    option, taken, places = None, 0, 0
    for one in before:
        if one in by_name:
            option, taken = by_name[one], 0
        elif option is not None and _takes_more(option, taken):
            taken += 1
        else:
            option, places = None, places + 1
    awaited = [option] if option is not None and _takes_more(option, taken) else []
    if awaited and awaited[0].nargs in (None, "+") and taken == 0:
        return awaited
    positional = [action for action in parser._actions if not action.option_strings]
    # The last argument may be several words.
    repeated = [action for action in positional[-1:] if action.nargs in ("*", "+")]
    return [*awaited, *(positional[places : places + 1] or repeated)]


def _by_name(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {name: action for action in parser._actions for name in action.option_strings}


def _takes_more(action: argparse.Action, taken: int) -> bool:
    return action.nargs in ("*", "+") or (action.nargs in (None, "?") and taken == 0)


def _options(parser: argparse.ArgumentParser, word: str) -> dict[str, str]:
    """The options of a parser and their help; those of one letter where only a dash is typed."""
    formatter = parser._get_formatter()
    return {
        name: formatter._expand_help(action)
        for action in parser._actions
        for name in action.option_strings
        if word[:1] == "-" and (name.startswith("--") or word == "-")
    }


def _values(action: argparse.Action, word: str) -> Iterator[tuple[str, str]]:
    """What an option or argument can be given."""
    kind = action.metavar if isinstance(action.metavar, str) else ""
    if action.choices is not None:
        yield from _beginning(word, dict.fromkeys(map(str, action.choices), ""))
    elif kind in SPECS:
        yield from _spec(word, SPECS[kind])
    elif kind in NAMES:
        yield from _beginning(word, dict.fromkeys(NAMES[kind](), ""))
    if kind in SHELLS_OWN:
        yield SHELLS_OWN[kind], ""


def _beginning(word: str, candidates: dict[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, about) for name, about in candidates.items() if name.startswith(word))


def _spec(word: str, sources: Sources) -> Iterator[tuple[str, str]]:
    """The names that a spec can begin with, or after the name and a colon its settings."""
    name, colon, given = word.partition(":")
    if not colon:
        yield from _beginning(word, dict.fromkeys(sources.names(), ""))
    else:
        done = given[: given.rfind(",") + 1]
        used = {part.partition("=")[0] for part in done.split(",")}
        fields = [one for one in sources.settings(name) if one not in used]
        yield from _beginning(word, {f"{name}:{done}{field}=": "" for field in fields})


# What an option takes, by the word for it in the help: names, and specs, which are names with settings after a colon.
NAMES: dict[str, Callable[[], Sequence[str]]] = {
    "READING": READINGS.names,
    "MODEL": lambda: NAMED_MODELS,
    "ARCHITECTURE": lambda: MODEL_NAMES,
    "TASK": lambda: TASKS,
    "DEVICE": lambda: DEVICES,
}
SPECS = {"MECHANISM": MECHANISMS, "POLICY": POLICIES}
