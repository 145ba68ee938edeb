"""The one store of an experiment's rows: on disk as they are found, gathered from several processes, merged by key.

A process appends to a ``Part``, a file of its own. ``gather`` reads the parts of several processes, ``make_results``
makes the content of a results file from them, and ``write_results`` writes it, with the rows of an earlier file that
the new one does not have.

A results file says of every row what made it. ``sources`` lists commits and commands; ``made_by`` has for each table a
place in that list, or one place for each row. Tables that are computed from other tables are not in ``made_by``.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from attnlab.pages.tables import PAPER
from attnlab.progress import note
from attnlab.provenance import command_line, commit, provenance, write_json
from papers.common.folders import beside_paper

__all__ = [
    "Gathered",
    "Part",
    "begin_work",
    "choose_rows",
    "collect",
    "gather",
    "make_results",
    "merge_results",
    "note_seconds",
    "read_results",
    "write_results",
]

Row = dict[str, Any]
Rows = list[Row]
Keys = Mapping[str, Sequence[str]]
# What made rows: a commit and a command.
Source = dict[str, str | None]
# What made a folder of parts.
RUN = "run.json"
PROVENANCE = ("config", "seed", "versions", "python", "device", "commit", "command", "writer", "unknown", "edited_in")
# What is said of one writing of a file, and not of the next.
OF_ONE_WRITING = ("writer", "unknown", "edited_in", "seconds")


def this_process() -> Source:
    """The source of the rows that this process makes."""
    return {"commit": commit(), "command": command_line()}


class Part:
    """The rows and facts of one process, written to its file after every row: a kill loses only the row under way.

    ``keys`` names, table by table, the columns that identify a row: a new row replaces the row with the same values. In
    a table without keys all rows are kept. A file that is there already is continued.
    """

    def __init__(self, path: Path, *, keys: Keys | None = None) -> None:
        self.path = path
        self.keys = dict(keys or {})
        self.content: dict[str, Any] = {"tables": {}, "facts": {}, "sources": [], "made_by": {}}
        if path.exists():
            self.content |= json.loads(path.read_text(encoding="utf-8"))
        self._source = _place(self.content["sources"], this_process())

    def has(self, table: str, **labels: Any) -> bool:
        """Whether there is a row with these labels; without labels, whether the table was made, even if it is empty."""
        tables = self.content["tables"]
        if not labels:
            return table in tables
        return any(all(row.get(name) == value for name, value in labels.items()) for row in tables.get(table, []))

    def row(self, table: str, **values: Any) -> None:
        """Add a row to a table."""
        self.extend(table, [values])

    def extend(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to a table; the file is written once."""
        with tqdm.external_write_mode():
            for row in rows:
                print(f"{self.path.stem}: {table} {json.dumps(row)}", flush=True)
        self._add(table, rows)
        self._write()
        note(f"{table}: {len(self.content['tables'][table])} rows")

    def add_tables(self, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Add rows to several tables; the file is written once."""
        for table, rows in tables.items():
            self._add(table, rows)
        self._write()
        with tqdm.external_write_mode():
            print(f"{self.path.stem}: {', '.join(tables)}", flush=True)
        note(", ".join(tables))

    def rows(self, table: str, wanted: Mapping[str, Row], measure: Callable[[str], Row]) -> None:
        """Add ``measure(spec)`` for each of ``wanted``, {spec: its labels}, that is not there yet.

        An error is noted as a fact, and the other rows are measured.
        """
        for spec, labels in wanted.items():
            if self.has(table, **labels):
                continue
            with self.step(f"{table} {spec}"):
                self.row(table, **labels, **measure(spec))

    def fact(self, name: str, value: Any) -> None:
        """Note something that is no table: sizes, speeds."""
        self.content["facts"][name] = value
        self._write()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Inside, an error is noted as the fact ``failed: name`` and does not end the process."""
        try:
            yield
            if self.content["facts"].pop(f"failed: {name}", None) is not None:
                self._write()
        except (RuntimeError, ValueError, AssertionError) as error:
            traceback.print_exc()
            self.fact(f"failed: {name}", str(error).strip().partition("\n")[0])

    def _add(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        kept = self.content["tables"].setdefault(table, [])
        made_by = self.content["made_by"].setdefault(table, [None] * len(kept))
        keys = self.keys.get(table)
        for row in rows:
            same = [i for i, other in enumerate(kept) if all(other.get(k) == row.get(k) for k in keys)] if keys else []
            for i in reversed(same):
                del kept[i], made_by[i]
            kept.append({name: _storable(value) for name, value in row.items()})
            made_by.append(self._source)

    def _write(self) -> None:
        write_json(self.path, self.content)


@dataclass
class Gathered:
    """The rows of every table and the facts of every part, with the source of each row."""

    tables: dict[str, Rows] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    # For each table as many places in ``sources`` as it has rows.
    made_by: dict[str, list[int | None]] = field(default_factory=dict)

    def add(
        self,
        tables: Mapping[str, Sequence[Row]],
        *,
        sources: Sequence[Source],
        made_by: Mapping[str, Sequence[int | None]],
        keys: Keys | None = None,
    ) -> None:
        """Add rows with their sources; with ``keys``, a row replaces the earlier one of the same settings, in place."""
        places = [_place(self.sources, source) for source in sources]
        for table, rows in tables.items():
            kept, kept_by = self.tables.setdefault(table, []), self.made_by.setdefault(table, [])
            known = made_by.get(table) or [None] * len(rows)
            columns = (keys or {}).get(table)
            # Without keys of its own, a table that is new is taken as it is.
            merging = keys is not None and (columns is not None or bool(kept))
            at = {_settings(row, columns): i for i, row in enumerate(kept)} if merging else {}
            for row, source in zip(rows, known, strict=True):
                place = None if source is None else places[source]
                i = at.setdefault(_settings(row, columns), len(kept)) if merging else len(kept)
                if i == len(kept):
                    kept.append(dict(row))
                    kept_by.append(place)
                else:
                    kept[i], kept_by[i] = dict(row), place

    def add_results(self, result: Mapping[str, Any], tables: Mapping[str, Rows], *, keys: Keys) -> None:
        """Add tables of a results file, with the sources that it names."""
        self.add(tables, sources=_sources(result), made_by=_by_row(result, tables), keys=keys)

    def compact_sources(self) -> dict[str, Any]:
        """``made_by`` as a results file has it, for the tables whose sources are known."""
        known = {table: by for table, by in self.made_by.items() if any(place is not None for place in by)}
        return {table: by[0] if len(set(by)) == 1 else by for table, by in known.items()}

    def made_here(self, tables: Mapping[str, Sequence[Row]]) -> None:
        """Put tables that this process made in place of those of the same names."""
        for table in tables:
            self.tables.pop(table, None)
            self.made_by.pop(table, None)
        self.add(tables, sources=[this_process()], made_by={name: [0] * len(rows) for name, rows in tables.items()})


def gather(parts: Mapping[str, Path], *, keys: Keys | None = None) -> Gathered:
    """The rows of parts, {name: file}, one after the other; parts without a file are left out."""
    gathered = Gathered()
    for name, path in parts.items():
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            tables = content.get("tables", {})
            gathered.facts[name] = content.get("facts", {})
            gathered.add(tables, sources=content.get("sources", []), made_by=content.get("made_by", {}), keys=keys)
    return gathered


def make_results(
    name: str,
    paper: str | None,
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    config: Mapping[str, Any],
    seed: int | None = 0,
    rows_of: Gathered | None = None,
    made: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The content of a results file, with everything that is needed to make it again.

    ``rows_of`` has the sources of those ``tables`` that have its rows in its order; without it, this process made all
    rows. ``made`` has the versions, device, commit and command of another process, instead of those of this one.
    ``more`` are further fields, such as keys and notes.
    """
    now = {**provenance(), "command": command_line()}
    # A run that did not note its command has that of the process that writes its results.
    process = (
        now
        if made is None
        else {key: made.get(key) for key in now} | {"command": made.get("command") or now["command"]}
    )
    result = {"name": name, "paper": paper, "config": dict(config), "seed": seed, **process, **more}
    if paper is None:
        del result["paper"]
    result["tables"] = {table: [dict(row) for row in rows] for table, rows in tables.items()}
    if rows_of is None:
        source = {"commit": process["commit"], "command": process["command"]}
        return result | {"sources": [source], "made_by": dict.fromkeys(tables, 0)}
    changed = [table for table in tables if len(tables[table]) != len(rows_of.tables.get(table, tables[table]))]
    assert not changed, f"tables {changed} have not the rows that were gathered, so their sources are not known"
    own = {table: by for table, by in rows_of.compact_sources().items() if table in tables}
    return result | {"sources": rows_of.sources, "made_by": own}


def merge_results(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Both results: a row of ``new`` replaces the row of ``old`` with the same settings, other rows stay.

    The settings of a row are the columns that ``keys: {table: [columns]}`` names, or else all its columns but floats.
    The older results' provenance is kept under ``earlier``.
    """
    if old.get("name") != new.get("name"):
        raise ValueError(f"results of {old.get('name')!r} and {new.get('name')!r} cannot be merged: names differ")
    keys = {**(old.get("keys") or {}), **(new.get("keys") or {})}
    rows = Gathered()
    for one in (old, new):
        rows.add_results(one, one.get("tables") or {}, keys=keys)
    kept = {name: value for name, value in old.items() if name not in OF_ONE_WRITING}
    merged = {**kept, **new, "tables": rows.tables}
    if keys:
        merged["keys"] = keys
    if "sources" in old or "sources" in new:
        merged |= {"sources": rows.sources, "made_by": rows.compact_sources()}
    merged["earlier"] = [*(old.get("earlier") or []), *_earlier(old, new)]
    return merged if merged["earlier"] else {k: v for k, v in merged.items() if k != "earlier"}


def choose_rows(result: Mapping[str, Any], choose: Callable[[str, Rows], Sequence[int]]) -> dict[str, Any]:
    """The results with some rows, or with rows in another order: ``choose(table, rows)`` names their places."""
    tables, made_by = {}, dict(result.get("made_by") or {})
    for table, rows in result["tables"].items():
        places = choose(table, rows)
        tables[table] = [rows[i] for i in places]
        if isinstance(made_by.get(table), list):
            made_by[table] = [made_by[table][i] for i in places]
    return {**result, "tables": tables} | ({"made_by": made_by} if made_by else {})


def read_results(path: Path | str) -> dict[str, Any] | None:
    """The content of a results file, None if there is no such file."""
    path = Path(path)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def write_results(
    out: Path | str, result: Mapping[str, Any], *, before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write a results file; rows of ``before``, an earlier content of it, that ``result`` does not have are kept."""
    merged = dict(result) if before is None else merge_results(before, result)
    write_json(out, merged)
    return merged


def note_seconds(path: Path, seconds: float) -> None:
    """Say in a results file how long the command took that wrote it, unless it says so itself."""
    result = read_results(path)
    if result is not None and "seconds" not in result:
        write_json(path, {**result, "seconds": round(seconds, 1)})


def begin_work(work: Path, config: Mapping[str, Any], *, seed: int = 0) -> None:
    """Note in a folder of parts what makes them: results may be collected on another machine."""
    work.mkdir(parents=True, exist_ok=True)
    made = {"config": dict(config), "seed": seed, **provenance(), "command": command_line()}
    write_json(work / RUN, made)


def collect(
    name: str,
    paper: str,
    works: Sequence[Path],
    out: Path,
    *,
    keys: Keys,
    notes: Mapping[str, str],
    made: Mapping[Path, Mapping[str, Rows]] | None = None,
    derived: Callable[[dict[str, Rows]], dict[str, Rows]] | None = None,
    curves: Keys | None = None,
) -> dict[str, Any]:
    """Merge the parts (part-*.json) of folders, and the tables ``made`` from a folder, into ``out``; later ones win.

    ``derived`` makes further tables from all of them. ``curves`` names tables with many rows of a training, and the
    columns that say which: of a training that was run again no earlier row stays, however many it has now.
    """
    result = read_results(out)
    for work in works:
        new = _results_of_work(name, paper, work, keys, notes, (made or {}).get(work, {}))
        result = new if result is None else merge_results(_without_curves_of(new, result, curves or {}), new)
    if result is None:
        raise ValueError("no folder of runs is named; name at least one")
    if derived is not None:
        computed = derived(result["tables"])
        result["tables"] |= computed
        result["made_by"] = {table: by for table, by in result["made_by"].items() if table not in computed}
    out.parent.mkdir(parents=True, exist_ok=True)
    return write_results(out, result)


def _without_curves_of(new: Mapping[str, Any], old: Mapping[str, Any], curves: Keys) -> Mapping[str, Any]:
    """The old results without the curves of trainings that the new ones have."""
    again = {table: {_settings(row, curves[table]) for row in new["tables"].get(table, [])} for table in curves}

    def others(table: str, rows: Rows) -> list[int]:
        return [i for i, row in enumerate(rows) if _settings(row, curves.get(table)) not in again.get(table, ())]

    return choose_rows(old, others) if again else old


def _results_of_work(
    name: str, paper: str, work: Path, keys: Keys, notes: Mapping[str, str], made: Mapping[str, Rows]
) -> dict[str, Any]:
    """The results of one folder of parts, with the paper's numbers beside ours."""
    rows = gather({path.stem.removeprefix("part-"): path for path in sorted(work.glob("part-*.json"))})
    rows.made_here({table: new for table, new in made.items() if new})
    run = json.loads((work / RUN).read_text(encoding="utf-8"))
    tables = {}
    for table, own in rows.tables.items():
        shared = [key for key in keys.get(table, ()) if key != "seed"]
        tables[table] = beside_paper(own, results=name, table=table, keys=shared) if shared else own
    return make_results(
        name, paper, tables, config=run["config"], seed=run["seed"], rows_of=rows, made=run,
        keys={table: list(columns) for table, columns in keys.items()}, notes=dict(notes), parts=rows.facts,
    )  # fmt: skip


def _settings(row: Mapping[str, Any], keys: Sequence[str] | None) -> str:
    if keys:
        return json.dumps([row.get(key) for key in keys], default=str)
    labels = {k: v for k, v in row.items() if not isinstance(v, float) and not k.endswith(PAPER)}
    return json.dumps(labels, sort_keys=True, default=str)


def _storable(value: Any) -> Any:
    # JSON has no NaN and no infinity.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _place(sources: list[Source], source: Source) -> int:
    """Where a source stands in the list; it is added if it is new."""
    if source not in sources:
        sources.append(dict(source))
    return sources.index(source)


def _sources(result: Mapping[str, Any]) -> list[Source]:
    """The sources of a results file; an older file has one, the commit of the whole file."""
    if "sources" in result:
        return result["sources"]
    return [{"commit": result["commit"], "command": None}] if result.get("commit") else []


def _by_row(result: Mapping[str, Any], tables: Mapping[str, Rows]) -> dict[str, list[int | None]]:
    """A place in the sources for each row of each table."""
    places: dict[str, list[int | None]] = {}
    whole = 0 if "sources" not in result and _sources(result) else None
    for table, rows in tables.items():
        by = result.get("made_by", {}).get(table, whole)
        places[table] = list(by) if isinstance(by, list) else [by] * len(rows)
    return places


def _earlier(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    before, after = ({name: one[name] for name in PROVENANCE if name in one} for one in (old, new))
    # The command differs with every run.
    same = {k: v for k, v in before.items() if k != "command"} == {k: v for k, v in after.items() if k != "command"}
    return [before] if before and not same else []
