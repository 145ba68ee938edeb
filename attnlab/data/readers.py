"""Text out of files (plain, jsonl, csv, tsv; as they are or in .gz, .xz, .bz2, .zip) and out of HF ``datasets``."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from attnlab.data.malformed import Malformed

__all__ = ["hf_texts", "numbered_lines", "open_bytes", "read_text", "records", "texts"]

COMPRESSED = (".gz", ".xz", ".bz2", ".zip")
Unit = Literal["line", "paragraph", "file"]


@contextmanager
def open_bytes(path: Path | str) -> Iterator[IO[bytes]]:
    """The file's bytes as a stream, decompressed as its name says; a .zip must hold one file."""
    path = Path(path)
    try:
        with _opened(path) as file:
            yield file
    except (EOFError, OSError, lzma.LZMAError, zipfile.BadZipFile, zlib.error) as error:
        # Errors of the operating system have a number; those of gzip and bz2 about bad data have none.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path} is not a whole {path.suffix} file: {error}") from error


def read_text(path: Path | str) -> str:
    """The whole file as text; empty, binary or not UTF-8 is a ValueError of one line."""
    with open_bytes(path) as file:
        data = file.read()
    if not data.strip():
        raise ValueError(f"{path} is empty: expected a text file")
    if b"\0" in data:
        raise ValueError(f"{path} looks binary (a NUL byte at {data.index(0)}): expected a UTF-8 text file")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({_undecodable(error)}): convert it with iconv -t UTF-8") from None


def numbered_lines(path: Path | str, *, malformed: Malformed | None = None) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end), one at a time; a line that is not UTF-8 text is malformed."""
    malformed = malformed or Malformed("fail")
    with open_bytes(path) as file:
        for number, raw in enumerate(file, start=1):
            if b"\0" in raw:
                malformed.add(path, number, "looks binary (a NUL byte)")
                continue
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                malformed.add(path, number, f"not UTF-8 ({_undecodable(error)})")
                continue
            yield number, line.rstrip("\r\n")


def texts(
    path: Path | str, *, unit: Unit = "line", column: str = "text", malformed: Malformed | None = None
) -> Iterator[str]:
    """Stream a file's documents: ``column`` of a jsonl, csv or tsv; lines, paragraphs or the whole of a plain file.

    An empty line ends a paragraph and is no document.
    """
    if unit not in ("line", "paragraph", "file"):
        raise ValueError(f"unit must be 'line', 'paragraph' or 'file', got {unit!r}")
    if _format(path) != "plain":
        for _, record in records(path, columns=[column], malformed=malformed):
            yield record[column]
    elif unit == "file":
        yield read_text(path)
    elif unit == "line":
        yield from (line for _, line in numbered_lines(path, malformed=malformed) if line.strip())
    else:
        yield from _paragraphs(line for _, line in numbered_lines(path, malformed=malformed))


def records(
    path: Path | str,
    *,
    columns: Sequence[str],
    header: Sequence[str] | None = None,
    malformed: Malformed | None = None,
) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, the named columns) of a .jsonl, .csv or .tsv; ``header`` names the columns of a file without names.

    A line that is not JSON, lacks a column, or has too many or too few fields is malformed. A tsv knows no quoting.
    """
    malformed = malformed or Malformed("fail")
    kind = _format(path)
    if kind == "plain":
        raise ValueError(f"{path} has no columns: expected .jsonl, .csv or .tsv, perhaps compressed")
    rows = _json_rows(path, malformed) if kind == "jsonl" else _table_rows(path, kind, columns, header, malformed)
    for number, row in rows:
        absent = [name for name in columns if name not in row]
        if absent:
            malformed.add(path, number, f"no {absent[0]!r} among {sorted(row)}")
            continue
        yield number, {name: value if isinstance(value := row[name], str) else json.dumps(value) for name in columns}


def hf_texts(name: str, *, split: str = "train", config: str | None = None, column: str = "text") -> Iterator[str]:
    """One column of a Hugging Face dataset, streamed; needs the ``datasets`` package and a connection."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError("Hugging Face datasets is not installed: pip install datasets") from None
    try:
        data = load_dataset(name, config, split=split, streaming=True)
    except (OSError, ConnectionError) as error:
        raise ValueError(
            f"cannot load the dataset {name!r} ({type(error).__name__}): are you online? Local files go to texts(path)"
        ) from error
    for row in data:
        if column not in row:
            raise ValueError(f"the dataset {name!r} has no column {column!r}; it has {sorted(row)}")
        yield row[column]


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    suffix = path.suffix.lower()
    if suffix != ".zip":
        opener: Any = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}.get(suffix, open)
        with opener(path, "rb") as file:
            yield file
        return
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if len(names) != 1:
            raise ValueError(f"{path} must hold one file, holds {len(names)}: {names[:5]}")
        with archive.open(names[0]) as file:
            yield file


def _format(path: Path | str) -> Literal["plain", "jsonl", "csv", "tsv"]:
    suffixes = [s.lower() for s in Path(path).suffixes if s.lower() not in COMPRESSED]
    last = suffixes[-1] if suffixes else ""
    return {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv"}.get(last, "plain")  # type: ignore[return-value]


def _json_rows(path: Path | str, malformed: Malformed) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in numbered_lines(path, malformed=malformed):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            malformed.add(path, number, f"not JSON ({error.msg} at column {error.colno})")
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            malformed.add(path, number, f"expected an object, got {type(row).__name__}")


def _table_rows(
    path: Path | str, kind: str, columns: Sequence[str], header: Sequence[str] | None, malformed: Malformed
) -> Iterator[tuple[int, dict[str, str]]]:
    rows: Iterator[tuple[int, list[str]]]
    if kind == "tsv":
        rows = ((number, line.split("\t")) for number, line in numbered_lines(path, malformed=malformed) if line)
    else:
        rows = _csv_rows(path, malformed)
    names = list(header) if header else next(rows, (0, []))[1]
    absent = [name for name in columns if name not in names]
    if absent:
        raise ValueError(f"{path} has no column {absent[0]!r}; it has {names}; its first line must name the columns")
    for number, row in rows:
        if len(row) == len(names):
            yield number, dict(zip(names, row, strict=True))
        else:
            malformed.add(path, number, f"expected {len(names)} fields, got {len(row)}")


def _csv_rows(path: Path | str, malformed: Malformed) -> Iterator[tuple[int, list[str]]]:
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for number, line in numbered_lines(path, malformed=malformed):  # noqa: B007
            # The end of the line is put back, since a quoted field may contain line ends.
            yield line + "\n"

    reader = csv.reader(lines())
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            malformed.add(path, number, f"not csv ({error})")
            continue
        if row:
            yield number, row


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    held: list[str] = []
    for line in lines:
        if line.strip():
            held.append(line)
        elif held:
            yield "\n".join(held)
            held = []
    if held:
        yield "\n".join(held)


def _undecodable(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} at {error.start}"
