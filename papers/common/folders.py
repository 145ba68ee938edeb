"""A paper's folder: its experiments (run.py), its claims (claims*.py), the paper's own numbers (paper_tables.json).

Folders and modules are found by their names. An experiment is what ``python -m papers NAME`` runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import papers
from attnlab.pages.tables import PAPER

__all__ = [
    "RESULTS",
    "Experiment",
    "add_figures",
    "add_out",
    "beside_paper",
    "command_of",
    "described_columns",
    "experiments_in",
    "experiments_in_markdown",
    "experiments_like",
    "folder_of",
    "folders",
    "further_commands",
    "list_of_experiments",
    "load_results",
    "modules",
    "paper_table",
    "result_folder",
    "with_changes",
]

# Where the results of the papers lie in the repository.
RESULTS = Path(__file__).resolve().parent.parent / "results"
# The folders in the order in which their experiments are listed; others follow by name.
ORDER = ("common", "value_aware", "effective", "abc", "guidance", "ktiw")
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Experiment:
    """One experiment: what it makes, its arguments, the function that runs it, and the arguments of a complete call.

    ``run`` returns the results file that it wrote, or None. The claims on that file are judged when it ends: those of
    the module ``claims`` of the paper's folder, or of all its modules whose names begin so. ``more`` are further
    complete calls by what they make. ``quick`` are the options of --config smoke, by name; none where the experiment
    trains nothing and is over soon. ``paper`` says what --config paper is, where the experiment has the paper's own
    settings. ``settings`` are those that options ask for, as --dry-run prints them.
    """

    summary: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Path | None]
    example: str = ""
    claims: str = "claims"
    quick: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, str] = field(default_factory=dict)
    paper: str | None = None
    settings: Callable[[argparse.Namespace], Mapping[str, Any]] | None = None

    @property
    def configs(self) -> tuple[str, ...]:
        """The names that --config takes."""
        smoke, paper = (("smoke",) if self.quick else ()), (("paper",) if self.paper is not None else ())
        return ("small", *smoke, *paper) if smoke or paper else ()


def folders() -> list[str]:
    """The names of the papers' folders, ``common`` among them."""
    names = [module.name for module in pkgutil.iter_modules(papers.__path__) if module.ispkg]
    return sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def modules(folder: str, prefix: str) -> Iterator[ModuleType]:
    """The modules of a folder whose names begin with ``prefix``, by name; they are imported."""
    for module in sorted(pkgutil.iter_modules([str(_path_of(folder))]), key=lambda module: module.name):
        if module.name.startswith(prefix) and not module.ispkg:
            yield importlib.import_module(f"papers.{folder}.{module.name}")


def folder_of(experiment: str) -> str | None:
    """The folder whose name an experiment's name begins with."""
    return next((folder for folder in folders() if _belongs(experiment, folder)), None)


def result_folder(results: str) -> str | None:
    """The folder whose experiments write a results file, by the file's name."""
    written = {"pattern_classifier": "effective", "shipped_mlm": "common", "shipped_lm": "common"}
    return written.get(results, folder_of(results))


def _path_of(folder: str) -> Path:
    package = importlib.util.find_spec(f"papers.{folder}")
    if package is None or not package.submodule_search_locations:
        raise ValueError(f"there is no paper's folder {folder!r}; there are {', '.join(folders())}")
    return Path(package.submodule_search_locations[0])


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    """The option that names the results file."""
    out = Path(f"papers/results/{name}.json")
    parser.add_argument("--out", type=Path, default=out, help="the results file (default: %(default)s)")


def add_figures(parser: argparse.ArgumentParser) -> None:
    """The options of a command that draws results as pictures."""
    parser.add_argument("--results", type=Path, default=Path("papers/results"), help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the pictures (svg)")


def with_changes(config: Any, changes: list[str]) -> Any:
    """The config with KEY=JSON changes; ``recipe.lr=1`` changes a setting of a setting."""
    for change in changes:
        key, _, text = change.partition("=")
        outer, dot, inner = key.partition(".")
        known = [f.name for f in fields(config)]
        if outer not in known:
            raise ValueError(f"{type(config).__name__} has no setting {outer!r}; it has {', '.join(known)}")
        if dot:
            config = replace(config, **{outer: with_changes(getattr(config, outer), [f"{inner}={text}"])})
            continue
        value = json.loads(text)
        config = replace(config, **{outer: tuple(value) if isinstance(value, list) else value})
    return config


def command_of(name: str, experiment: Experiment) -> str:
    """The experiment's full command line."""
    return f"python -m papers {name} {experiment.example}".rstrip()


def further_commands(name: str, experiment: Experiment) -> dict[str, str]:
    """The experiment's further full command lines, by what they make."""
    return {what: f"python -m papers {name} {example}" for what, example in experiment.more.items()}


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
    """The experiments of the folder that ``name`` belongs to; without a name, or with an unknown one, all of them."""
    common = experiments_in("common") if name is not None and folder_of(name) is None else {}
    if name in common:
        return common
    folder = None if name is None else folder_of(name)
    chosen = folders() if folder is None else [folder]
    return {other: experiment for folder in chosen for other, experiment in experiments_in(folder).items()}


def list_of_experiments(experiments: Mapping[str, Experiment]) -> str:
    """Each experiment with its summary and its full command line."""
    about = "The papers' experiments. data/ is the folder of the data sets; papers/README.md says what is in it."
    lines = [about, ""]
    for name, experiment in experiments.items():
        commands = [command_of(name, experiment), *further_commands(name, experiment).values()]
        lines += [f"{name}: {experiment.summary}", *(f"    $ {command}" for command in commands), ""]
    return "\n".join([*lines, "python -m papers NAME --help lists the options of one."])


def experiments_in_markdown(folder: str) -> str:
    """The experiments of a folder as its README.md lists them: summary, results file and full command line."""
    lines = []
    for name, experiment in experiments_in(folder).items():
        parser = argparse.ArgumentParser()
        experiment.arguments(parser)
        out = parser.get_default("out")
        results = f" Results: `{out.as_posix()}`." if out is not None and out.suffix == ".json" else ""
        configs = f" `--config` {', '.join(experiment.configs)}." if experiment.configs else ""
        lines += [f"- **{name}**: {experiment.summary}{results}{configs}", f"  `{command_of(name, experiment)}`"]
        lines += [f"  - {what}: `{command}`" for what, command in further_commands(name, experiment).items()]
    return "\n".join(lines)


def _prefix(folder: str) -> str:
    return folder.replace("_", "-")


def _belongs(name: str, folder: str) -> bool:
    return name == _prefix(folder) or name.startswith(f"{_prefix(folder)}-")


def load_results(folder: Path | str = RESULTS) -> dict[str, dict[str, Any]]:
    """Every results/<name>.json by name; a file that is no JSON object is an error that names it."""
    results = {}
    for path in sorted(Path(folder).glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"{path} is not readable JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
        if content.get("quick"):
            raise ValueError(f"{path} is of a --config smoke run, which is no evidence; take it out of {folder}")
        results[path.stem] = content
    return results


@cache
def _tables() -> dict[str, dict[str, dict[str, Any]]]:
    """{results: {table: {"columns": text, "paper": the paper's rows}}}, from the paper_tables.json of every folder."""
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for folder in folders():
        path = _path_of(folder) / "paper_tables.json"
        if path.exists():
            tables |= json.loads(path.read_text(encoding="utf-8"))
    return tables


def described_columns() -> dict[str, dict[str, str]]:
    """The columns of our tables in words: {results: {table: text}}."""
    return {
        results: {name: table["columns"] for name, table in tables.items() if "columns" in table}
        for results, tables in _tables().items()
    }


def paper_table(results: str, table: str) -> Rows:
    """A paper's table in the columns of ours: ``paper_table("value-aware", "table_1")``; empty if it has no numbers.

    >>> paper_table("value-aware", "table_1")[2]
    {'mechanism': 'top-r:r=d+1', 'mlm_error': 43.5}
    """
    return [dict(row) for row in _tables().get(results, {}).get(table, {}).get("paper", [])]


def beside_paper(rows: Sequence[Mapping[str, Any]], *, results: str, table: str, keys: Sequence[str]) -> Rows:
    """Our rows with the paper's numbers for the same settings under ``<column>_paper``.

    >>> beside_paper([{"mechanism": "softmax", "mlm_error": 30.1}], results="value-aware", table="table_1",
    ...              keys=["mechanism"])
    [{'mechanism': 'softmax', 'mlm_error': 30.1, 'mlm_error_paper': 24.2}]
    """
    known = {tuple(row.get(key) for key in keys): row for row in paper_table(results, table)}
    joined = []
    for row in rows:
        theirs = known.get(tuple(row.get(key) for key in keys), {})
        extra = {f"{key}{PAPER}": value for key, value in theirs.items() if key not in keys and key in row}
        joined.append({**row, **extra})
    return joined
