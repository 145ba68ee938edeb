"""Tokenise once into memory-mapped arrays, named by a hash of the file and the tokeniser; then only map them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from attnlab.data.malformed import Malformed
from attnlab.data.readers import Unit, texts
from attnlab.data.tokenisers import Tokeniser, as_tokeniser
from attnlab.provenance import file_sha256, sync_folder, write_json
from attnlab.summaries import short_repr

__all__ = ["TokenStore", "load_store", "tokenise", "undamaged", "write_store"]

# Characters encoded at a time: enough to keep every core busy, small beside any machine's memory.
CHUNK = 1 << 20
LAYOUT = 2


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Documents as token ids: document i is ``tokens[offsets[i]:offsets[i + 1]]``, without special tokens.

    >>> store = TokenStore(np.array([5, 6, 7, 8], np.uint16), np.array([0, 3, 4]))
    >>> len(store), store[0].tolist(), store.lengths.tolist()
    (2, [5, 6, 7], [3, 1])
    """

    tokens: np.ndarray
    offsets: np.ndarray
    meta: dict[str, Any] = field(default_factory=dict, repr=False)

    __repr__ = short_repr

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document."""
        return np.diff(self.offsets)

    def checksum(self) -> str:
        """A hash of all tokens and offsets; one pass over the arrays."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.tokens, self.offsets):
            digest.update(f"{array.dtype.str} {len(array)}".encode())
            for start in range(0, len(array), CHUNK):
                digest.update(np.ascontiguousarray(array[start : start + CHUNK]).data)
        return digest.hexdigest()


def tokenise(
    path: Path | str,
    tokenizer: Any,
    *,
    cache: Path | str | None = None,
    unit: Unit = "line",
    column: str = "text",
    malformed: Malformed | None = None,
    sha256: str | None = None,
) -> TokenStore:
    """The file's documents (see ``texts``) as token ids; a second call with the same content only maps the arrays.

    They are in ``cache`` (default ``~/.cache/attnlab``) under a hash of the file's bytes, the tokeniser and the
    way of reading; damaged ones are made anew. Memory does not grow with the file. Of several processes one does the
    work and the others wait. With ``sha256``, the checksum of the file's content, the file is needed only where its
    tokens are not in the cache, and another content is refused.
    """
    tokeniser = as_tokeniser(tokenizer)
    malformed = malformed or Malformed("fail")
    path, cache = Path(path), _cache_folder(cache)
    content = sha256 or file_sha256(path)
    reading = {"unit": unit, "column": column, "malformed": malformed.action, "layout": LAYOUT}
    key = _key(content, tokeniser.fingerprint(), json.dumps(reading, sort_keys=True))
    folder = cache / f"{path.name}-{key}"
    with _locked(cache / f".{folder.name}.lock"):
        if folder.exists() and not undamaged(folder):
            shutil.rmtree(folder)
        if not folder.exists():
            if sha256 is not None and file_sha256(path) != sha256:
                raise ValueError(f"{path} is not the text that was meant: its checksum is not {sha256}")
            # A count for this file alone: the caller's may already hold lines of another file.
            of_file = Malformed(malformed.action)
            documents = texts(path, unit=unit, column=column, malformed=of_file)
            write_store(folder, documents, tokeniser, malformed=of_file, source=path.name)
    store = load_store(folder)
    malformed.count += store.meta["malformed"]["count"]
    malformed.lines.extend((name, line, why) for name, line, why in store.meta["malformed"]["lines"])
    return store


def write_store(
    folder: Path | str,
    documents: Iterable[str],
    tokenizer: Any,
    *,
    malformed: Malformed | None = None,
    source: str | None = None,
) -> TokenStore:
    """Tokenise a stream of documents into ``folder``, which exists only once it is complete."""
    tokeniser, folder = as_tokeniser(tokenizer), Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists; load it with load_store, or remove it to write it anew")
    # Under the lock of ``tokenise`` a folder of this name was left by a killed process.
    unfinished = folder.parent / f".{folder.name}.tmp"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    dtype = np.dtype(np.uint16 if tokeniser.vocab_size <= 1 << 16 else np.uint32)
    try:
        counts = _write_arrays(unfinished, documents, tokeniser, dtype)
        if counts["tokens"] == 0:
            raise ValueError(f"{source or 'the corpus'} holds no tokens in {counts['documents']} documents")
        meta = {
            "layout": LAYOUT,
            "source": source,
            "vocab_size": tokeniser.vocab_size,
            "tokeniser": tokeniser.fingerprint(),
            **counts,
            "malformed": {"count": malformed.count if malformed else 0, "lines": malformed.lines if malformed else []},
        }
        write_json(unfinished / "meta.json", meta | {"checksum": _mapped(unfinished, meta).checksum()})
        os.rename(unfinished, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return load_store(folder)


def load_store(folder: Path | str) -> TokenStore:
    """Map the arrays that ``write_store`` wrote; an unknown layout, or other sizes than meta.json says, are errors."""
    folder = Path(folder)
    try:
        meta = json.loads((folder / "meta.json").read_text())
        # Layout 1 lacks the checksum alone.
        if meta["layout"] not in (1, LAYOUT):
            raise ValueError(f"meta.json says layout {meta['layout']}, and this attnlab reads layouts 1 and {LAYOUT}")
        store = _mapped(folder, meta)
        sizes, expected = (len(store.tokens), len(store)), (meta["tokens"], meta["documents"])
        if not isinstance(meta["malformed"]["count"], int) or not isinstance(meta["malformed"]["lines"], list):
            raise ValueError("meta.json does not say what was malformed")
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder} is no token store ({error}); remove it and tokenise again") from error
    if sizes != expected:
        raise ValueError(
            f"{folder} is damaged: {sizes[0]} tokens in {sizes[1]} documents, expected {expected[0]} in "
            f"{expected[1]}; remove it and tokenise again"
        )
    return store


def _mapped(folder: Path, meta: dict[str, Any]) -> TokenStore:
    tokens, offsets = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "offsets"))
    if tokens.ndim != 1 or offsets.ndim != 1:
        raise ValueError("its arrays must have one axis")
    return TokenStore(tokens, offsets, meta)


def undamaged(folder: Path) -> bool:
    """Whether the arrays are those that were written."""
    try:
        store = load_store(folder)
    except ValueError:
        return False
    return store.meta.get("checksum") == store.checksum()


def _write_arrays(folder: Path, documents: Iterable[str], tokeniser: Tokeniser, dtype: np.dtype) -> dict[str, int]:
    n_tokens = n_documents = 0
    with open(folder / "tokens.npy", "wb") as tokens, open(folder / "offsets.npy", "wb") as offsets:
        _header(tokens, dtype, 0)
        _header(offsets, np.dtype(np.int64), 0)
        offsets.write(np.zeros(1, np.int64).tobytes())
        for ids in _encoded(documents, tokeniser):
            ends = n_tokens + np.cumsum([len(document) for document in ids], dtype=np.int64)
            tokens.write(np.fromiter(chain.from_iterable(ids), dtype, count=int(ends[-1]) - n_tokens).tobytes())
            offsets.write(ends.tobytes())
            n_tokens, n_documents = int(ends[-1]), n_documents + len(ids)
        # numpy pads the header so that the length along the first axis can be filled in later.
        _header(tokens, dtype, n_tokens)
        _header(offsets, np.dtype(np.int64), n_documents + 1)
        for file in (tokens, offsets):
            file.flush()
            os.fsync(file.fileno())
    return {"tokens": n_tokens, "documents": n_documents}


def _encoded(documents: Iterable[str], tokeniser: Tokeniser) -> Iterator[list[list[int]]]:
    """The ids of each chunk in order; while one is encoded, without Python's lock, another is turned into lists."""
    waiting: deque[Future[list[list[int]]]] = deque()
    with ThreadPoolExecutor(2) as workers:
        for chunk in _chunks(documents):
            waiting.append(workers.submit(tokeniser.encode_batch, chunk))
            if len(waiting) > 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _chunks(documents: Iterable[str]) -> Iterator[list[str]]:
    held: list[str] = []
    size = 0
    from tqdm import tqdm

    # Silent when it is short or not on a terminal.
    for document in tqdm(documents, desc="tokenising", unit=" documents", delay=2, disable=None):
        held.append(document)
        size += len(document)
        if size >= CHUNK:
            yield held
            held, size = [], 0
    if held:
        yield held


def _header(file: IO[bytes], dtype: np.dtype, length: int) -> None:
    file.seek(0)
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, description)


def _key(*settings: str) -> str:
    return hashlib.blake2b("\n".join(settings).encode(), digest_size=12).hexdigest()


def _cache_folder(cache: Path | str | None) -> Path:
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnlab" / "tokens"
    folder = Path(cache)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:
        # Without file locks (Windows) two processes may both do the work; the second rename fails loudly.
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
