"""One experiment of a paper as ``python -m papers`` offers it; a paper's run.py lists its own in ``EXPERIMENTS``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from papers.common.discovery import folders, modules

__all__ = [
    "Experiment",
    "add_out",
    "add_picture_folders",
    "command_of",
    "experiments_in",
    "experiments_in_markdown",
    "experiments_like",
    "list_of_experiments",
]


@dataclass(frozen=True)
class Experiment:
    """One experiment: what it makes, its arguments, the function that runs it, and the arguments of a complete call.

    ``run`` returns the results file that it wrote, or None: the claims on that file are judged when it ends.
    """

    summary: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Path | None]
    example: str = ""


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    """The option that names the results file."""
    out = Path(f"papers/results/{name}.json")
    parser.add_argument("--out", type=Path, default=out, help="the results file (default: %(default)s)")


def add_picture_folders(parser: argparse.ArgumentParser) -> None:
    """The options of an experiment that draws pictures: the folder of the results and that of the pictures."""
    parser.add_argument("--results", type=Path, default=Path("papers/results"), help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the pictures (svg)")


def command_of(name: str, experiment: Experiment) -> str:
    """The experiment's full command line."""
    return f"python -m papers {name} {experiment.example}".rstrip()


def experiments_in(folder: str) -> dict[str, Experiment]:
    """The experiments that a paper's run.py declares, by name; the names begin with the folder's."""
    declared: dict[str, Experiment] = {}
    for module in modules(folder, "run"):
        declared |= getattr(module, "EXPERIMENTS", {})
    stray = [name for name in declared if folder != "common" and not _belongs(name, folder)]
    if stray:
        raise ValueError(f"papers/{folder}/run.py declares {stray[0]}; its experiments begin with {_prefix(folder)}")
    return declared


def experiments_like(name: str | None) -> dict[str, Experiment]:
    """The experiments of the folder that ``name`` belongs to, and the common ones; all of them without a name."""
    chosen = [folder for folder in folders() if name is None or folder == "common" or _belongs(name, folder)]
    return {other: experiment for folder in chosen for other, experiment in experiments_in(folder).items()}


def list_of_experiments(experiments: Mapping[str, Experiment]) -> str:
    """Each experiment with its summary and its full command line."""
    about = "The papers' experiments. data/ is the folder of the data sets; papers/README.md says what is in it."
    lines = [about, ""]
    for name, experiment in experiments.items():
        lines += [f"{name}: {experiment.summary}", f"    $ {command_of(name, experiment)}", ""]
    return "\n".join([*lines, "python -m papers NAME --help lists the options of one."])


def experiments_in_markdown(folder: str) -> str:
    """The experiments of a folder as its README.md lists them: summary, results file and full command line."""
    lines = []
    for name, experiment in experiments_in(folder).items():
        parser = argparse.ArgumentParser()
        experiment.arguments(parser)
        out = parser.get_default("out")
        results = f" Results: `{out.as_posix()}`." if out is not None and out.suffix == ".json" else ""
        lines += [f"- **{name}**: {experiment.summary}{results}", f"  `{command_of(name, experiment)}`"]
    return "\n".join(lines)


def _prefix(folder: str) -> str:
    return folder.replace("_", "-")


def _belongs(name: str, folder: str) -> bool:
    return name == _prefix(folder) or name.startswith(f"{_prefix(folder)}-")
