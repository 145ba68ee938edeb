"""A parallel corpus of word ids in flat arrays, and sparse tables over the word pairs that co-occur in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnlab.shapes import Float, Int
from attnlab.summaries import short_repr

__all__ = ["NULL", "Bitext", "PairTable", "bitext", "count_table"]

# The id of the empty source word that IBM Model 1 may align an output word to.
NULL = -1
# Links (source position, target position) laid out at once.
LINKS = 1 << 22


@dataclass(frozen=True)
class Bitext:
    """Sentence m is ``source[source_at[m] : source_at[m + 1]]`` and the same of target; made by ``bitext``."""

    source: Int[np.ndarray, " words"]
    source_at: Int[np.ndarray, " sentences"]
    target: Int[np.ndarray, " target_words"]
    target_at: Int[np.ndarray, " sentences"]
    null: bool = False

    __repr__ = short_repr

    def __len__(self) -> int:
        return len(self.source_at) - 1


def bitext(sources: Sequence[Any], targets: Sequence[Any], *, null: bool = False) -> Bitext:
    """Sentences of non-negative ids (lists, arrays, tensors), as many on both sides; ``null`` adds NULL to each source.

    An empty sentence is kept, and links to nothing.

    >>> bitext([[3, 1], [2]], [[5], [5, 6]], null=True).source.tolist()
    [-1, 3, 1, -1, 2]
    """
    if len(sources) != len(targets):
        first = min(len(sources), len(targets)) + 1
        longer = "source" if len(sources) > len(targets) else "target"
        raise ValueError(
            f"source has {len(sources)} sentences and target {len(targets)}: sentence {first} is on the {longer} "
            "side only; give every sentence its translation"
        )
    source, source_at = _flat(sources, "source", [NULL] if null else [])
    target, target_at = _flat(targets, "target", [])
    return Bitext(source, source_at, target, target_at, null)


@dataclass(frozen=True)
class PairTable:
    """A number for each (source, target) word pair that co-occurs; every other pair has 0. Sorted by source, target."""

    source: Int[np.ndarray, " pairs"]
    target: Int[np.ndarray, " pairs"]
    value: Float[np.ndarray, " pairs"]

    __repr__ = short_repr

    def __len__(self) -> int:
        return len(self.value)

    def find(self, source: Any, target: Any) -> np.ndarray:
        """The index of each pair in the table, -1 for one that never co-occurs; source and target broadcast."""
        source, target = np.broadcast_arrays(np.asarray(source, np.int64), np.asarray(target, np.int64))
        if not len(self):
            return np.full(source.shape, -1)
        width = int(self.target.max()) + 1
        keys = (self.source + 1) * width + self.target
        wanted = (source + 1) * width + target
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where((keys[at] == wanted) & (target >= 0) & (target < width), at, -1)

    def get(self, source: Any, target: Any) -> np.ndarray:
        """The value of each pair; source and target broadcast, and an unseen word has 0 with everything.

        >>> table = count_table(bitext([[3, 1]], [[5]]))
        >>> table.get([3, 1, 9], 5).tolist()
        [0.5, 0.5, 0.0]
        """
        at = self.find(source, target)
        return np.where(at < 0, 0.0, self.value[at]) if len(self) else np.zeros(at.shape)

    def dense(self, sources: int, targets: int) -> Float[np.ndarray, "sources targets"]:
        """The table as a matrix over ids 0 .. sources-1 and 0 .. targets-1, without NULL: for small vocabularies."""
        out = np.zeros((sources, targets))
        words = self.source != NULL
        out[self.source[words], self.target[words]] = self.value[words]
        return out


def count_table(corpus: Bitext) -> PairTable:
    """C[i, o]: 1/L for each time i and o stand in the same pair of sentences (Eqs. 16, 52).

    Memory grows with the pairs that co-occur, not with the product of the vocabularies nor with the corpus.

    >>> table = count_table(bitext([[0, 0, 1], [1]], [[2], [2]]))
    >>> table.get([0, 1], 2).round(3).tolist()
    [0.667, 1.333]
    """
    width = _width(corpus)
    keys: np.ndarray = np.zeros(0, np.int64)
    value: np.ndarray = np.zeros(0)
    for source, target, length in links(corpus):
        met = np.concatenate([keys, (source + 1) * width + target])
        keys, where = np.unique(met, return_inverse=True)
        value = np.bincount(where, np.concatenate([value, 1 / length]), minlength=len(keys))
    return PairTable(keys // width - 1, keys % width, value)


def indexed_counts(corpus: Bitext) -> tuple[PairTable, Int[np.ndarray, " links"]]:
    """The count table, and the place in it of every link in the order of ``links``, four bytes each."""
    chunks = list(itertools.islice(links(corpus), 2))
    if len(chunks) != 1:
        counts = count_table(corpus)
        pairs = [counts.find(source, target).astype(np.int32) for source, target, _ in links(corpus)]
        return counts, np.concatenate(pairs) if pairs else np.zeros(0, np.int32)
    # With one chunk, the sorting that counts also gives each link's place.
    [(source, target, length)] = chunks
    width = _width(corpus)
    keys, pair = np.unique((source + 1) * width + target, return_inverse=True)
    counts = PairTable(keys // width - 1, keys % width, np.bincount(pair, 1 / length, minlength=len(keys)))
    return counts, pair.astype(np.int32)


def links(corpus: Bitext) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Chunks of (source word, target word, L) for every target position and each of its L source positions in turn."""
    lengths, heights = np.diff(corpus.source_at), np.diff(corpus.target_at)
    size = np.concatenate([[0], np.cumsum(lengths * heights)])
    start = 0
    while start < len(corpus):
        stop = max(start + 1, int(np.searchsorted(size, size[start] + LINKS, side="right")) - 1)
        sentence = np.repeat(np.arange(start, stop), heights[start:stop])
        target = corpus.target[corpus.target_at[start] : corpus.target_at[stop]]
        count = lengths[sentence]
        first = np.concatenate([[0], np.cumsum(count)[:-1]]) if len(count) else count
        total = int(count.sum())
        position = np.arange(total) + np.repeat(corpus.source_at[sentence] - first, count)
        if total:
            yield corpus.source[position], np.repeat(target, count), np.repeat(count, count)
        start = stop


def _width(corpus: Bitext) -> int:
    return int(corpus.target.max()) + 1 if len(corpus.target) else 1


def _flat(sentences: Sequence[Any], side: str, first: list[int]) -> tuple[np.ndarray, np.ndarray]:
    rows = [np.asarray(sentence) for sentence in sentences]
    for number, row in enumerate(rows, 1):
        if row.size and (row.ndim != 1 or row.dtype.kind not in "iu" or row.min() < 0):
            raise ValueError(
                f"{side} sentence {number} must be a row of ids 0, 1, ..., got {row.dtype} {row.tolist()!r:.60}"
            )
    head = np.array(first, np.int64)
    at = np.concatenate([[0], np.cumsum([len(row) + len(head) for row in rows], dtype=np.int64)]).astype(np.int64)
    parts = [part.astype(np.int64) for row in rows for part in (head, row)]
    return (np.concatenate(parts) if parts else np.zeros(0, np.int64)), at
