"""Texts out of files and folders as one stream of tokens on the disk, without passages that evaluation texts share."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attnlab.data.overlap import Passages
from attnlab.data.readers import COMPRESSED, numbered_lines, texts
from attnlab.data.store import TokenStore, load_store, undamaged, write_store
from attnlab.data.tokenisers import as_tokeniser
from attnlab.provenance import file_sha256

__all__ = ["stream_of_texts", "text_files", "token_stream"]

PLAIN = (".txt", ".md", ".text")
COLUMNS = (".jsonl", ".ndjson", ".csv", ".tsv")
# Characters of a text that are tokenised together, and the most of a paragraph that is compared as one.
PIECE = 1 << 14
# Part of the stream's name: another way of reading makes another.
READING = 1


def text_files(paths: Sequence[Path | str]) -> list[Path]:
    """The files that are named, and in folders those with a text's ending, in the order of their names."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) in (*PLAIN, *COLUMNS))
            if not inside:
                raise ValueError(f"{path} holds no text: no file in it ends in {', '.join((*PLAIN, *COLUMNS))}")
            files += inside
        elif path.exists() and not path.is_file():
            raise ValueError(f"{path} is no regular file; the text is read several times, so save it as a file")
        else:
            files.append(path)
    if not files:
        raise ValueError("name at least one file or folder with text")
    return list(dict.fromkeys(files))


def token_stream(
    files: Sequence[Path], tokenizer: Any, *, cache: Path, leave_out: Sequence[Path] = ()
) -> tuple[TokenStore, dict[str, str]]:
    """(the files' tokens, the SHA-256 of each file by its number); what is in ``cache`` is only mapped.

    A document ends with the tokenizer's end token. Memory does not grow with the files.
    """
    tokeniser, end = as_tokeniser(tokenizer), getattr(tokenizer, "eos_token", None) or ""
    sums = {str(i): file_sha256(file) for i, file in enumerate(files)}
    sums |= {f"left out {i}": file_sha256(file) for i, file in enumerate(leave_out)}
    described = [str(READING), tokeniser.fingerprint(), end, *(f"{name} {value}" for name, value in sums.items())]
    folder = cache / f"text-{hashlib.blake2b(' '.join(described).encode(), digest_size=12).hexdigest()}"
    if folder.exists() and not undamaged(folder):
        shutil.rmtree(folder)
    if not folder.exists():
        passages = Passages(text for file in leave_out for text in texts(file, unit="paragraph")) if leave_out else None
        write_store(folder, stream_of_texts(files, end=end, leave_out=passages), tokeniser, source="the text")
    return load_store(folder), sums


def stream_of_texts(files: Iterable[Path], *, end: str = "", leave_out: Passages | None = None) -> Iterator[str]:
    """The files' text in pieces that follow one another; ``end`` stands after each file, or after each of its records.

    Paragraphs that share a passage with ``leave_out`` are left out.
    """
    for file in files:
        if _kind(file) in COLUMNS:
            yield from (text + end for text in texts(file) if leave_out is None or not leave_out.shared(text))
            continue
        held, size = [], 0
        for paragraph in _paragraphs(line for _, line in numbered_lines(file)):
            if leave_out is not None and leave_out.shared(paragraph):
                continue
            held.append(paragraph)
            size += len(paragraph)
            if size >= PIECE:
                yield "".join(held)
                held, size = [], 0
        yield "".join(held).rstrip("\n") + end


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Lines up to the next empty one, with all line ends; long ones are cut between lines, or else between words."""
    held, size = [], 0
    for line in lines:
        for part in _cut(line + "\n"):
            held.append(part)
            size += len(part)
            if size >= PIECE or not line.strip():
                yield "".join(held)
                held, size = [], 0
    if held:
        yield "".join(held)


def _cut(line: str) -> Iterator[str]:
    start = 0
    while len(line) - start > PIECE:
        end = line.rfind(" ", start + 1, start + PIECE)
        end = end if end > start else start + PIECE
        yield line[start:end]
        start = end
    yield line[start:]


def _kind(file: Path) -> str:
    """The ending of a file's name, without that of its compression."""
    return next((s.lower() for s in reversed(file.suffixes) if s.lower() not in COMPRESSED), "")
