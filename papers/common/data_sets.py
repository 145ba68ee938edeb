"""``python -m papers data``: the data sets of the papers, and what of them a folder holds.

papers/data_sets.json lists them: address, licence, which paper uses them, the names of the files that are read (of each
group one), and size and checksum of the files that our results were made with, uncompressed. DATA.md is made from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attnlab.progress import each

__all__ = ["DataSet", "check_folder", "data_sets", "data_sets_in_markdown", "reports_in_words"]

LIST = Path(__file__).resolve().parent.parent / "data_sets.json"
# Endings with which a file may be packed.
PACKED = ("", ".xz", ".gz")


@dataclass(frozen=True)
class DataSet:
    """A data set: its folder, where it is published, and the files of it that are read."""

    folder: str
    title: str
    address: tuple[str, ...]
    licence: str
    used_by: tuple[str, ...]
    # Of each group of names one must be there.
    needs: tuple[tuple[str, ...], ...]
    # Where ours is only a part: what we have, and what to do with the whole.
    subset: str
    note: str
    # Ours: name, bytes and sha256, uncompressed.
    files: tuple[dict[str, Any], ...]
    # Files of ours that are read where the folder has them: without them, results are of less.
    also: tuple[str, ...] = ()


@cache
def data_sets() -> tuple[DataSet, ...]:
    """The data sets in the order of the list."""
    listed = json.loads(LIST.read_text(encoding="utf-8"))
    return tuple(DataSet(**{name: _frozen(value) for name, value in one.items()}) for one in listed)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value


def check_folder(root: Path) -> list[dict[str, Any]]:
    """For each data set what the folder holds of it: files as ours, other files, and what is missing."""
    if not root.is_dir():
        raise ValueError(f"{root} is no folder; name the one that holds a folder for each data set")
    return [_check(one, root / one.folder) for one in each(list(data_sets()), lambda one: one.folder)]


def _check(one: DataSet, folder: Path) -> dict[str, Any]:
    ours = {file["name"]: file["sha256"] for file in one.files}
    same: list[str] = []
    other: list[str] = []
    missing: list[str] = []
    without: list[str] = []
    for names in (*one.needs, *((name,) for name in one.also)):
        found = next(((name, path) for name in names if (path := _found(folder, name)) is not None), None)
        if found is None:
            (missing if names in one.needs else without).append(" or ".join(names))
        else:
            name, path = found
            (same if _has(path, ours.get(name)) else other).append(name)
    state = "missing" if len(missing) == len(one.needs) else "incomplete" if missing else "complete"
    return {
        "folder": one.folder, "state": state, "as_ours": same, "other": other, "missing": missing, "without": without,
        "part": bool(same and one.subset), "address": list(one.address),
    }  # fmt: skip


def _has(path: Path, sha256: str | None) -> bool:
    """Whether the file has the content of that checksum."""
    return sha256 is not None and path.is_file() and _sha256(path) == sha256


def _found(folder: Path, name: str) -> Path | None:
    """A file of this name, packed or not, or a folder."""
    return next((path for end in PACKED if (path := folder / f"{name}{end}").exists()), None)


def _sha256(path: Path) -> str:
    """Of the content, uncompressed."""
    # It brings torch, which pages that list data sets do not need.
    from attnlab.data.readers import open_bytes

    digest = hashlib.sha256()
    with open_bytes(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def reports_in_words(reports: Sequence[dict[str, Any]]) -> str:
    """What ``check_folder`` found, a data set a line, with the address of what is missing."""
    lines = []
    for report in reports:
        parts = [f"{report['folder']}: {report['state']}"]
        if report["as_ours"]:
            part = ", a part of what is published (papers/DATA.md)" if report["part"] else ""
            parts.append(f"as ours{part}: {', '.join(report['as_ours'])}")
        if report["other"]:
            parts.append(f"other files than ours: {', '.join(report['other'])}")
        if report["missing"]:
            parts.append(f"missing: {', '.join(report['missing'])} ({report['address'][0]})")
        if report["without"] and report["state"] != "missing":
            parts.append(f"not there, but read for our results: {', '.join(report['without'])}")
        lines.append("; ".join(parts))
    return "\n".join(lines)


def data_sets_in_markdown() -> str:
    """The list as DATA.md shows it."""
    return "\n\n".join("\n".join(_in_markdown(one)) for one in data_sets())


def _in_markdown(one: DataSet) -> Iterator[str]:
    yield f"### {one.folder}"
    yield ""
    yield f"{one.title}. For {', '.join(one.used_by)}. Licence: {one.licence}."
    yield ""
    yield from (f"- {address if ' ' in address else f'<{address}>'}" for address in one.address)
    for text in (one.subset, one.note):
        if text:
            yield ""
            yield text
    yield ""
    if not one.files:
        return
    yield "| file of ours, uncompressed | bytes | sha256 |"
    yield "| --- | ---: | --- |"
    for file in one.files:
        yield f"| {file['name']} | {file['bytes']:,} | `{file['sha256']}` |"
