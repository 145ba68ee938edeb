"""Parallel corpora: two files line by line, or one tsv; batches of like length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnlab.data.batching import Buckets
from attnlab.data.malformed import Malformed
from attnlab.data.masking import IGNORED
from attnlab.data.readers import numbered_lines
from attnlab.data.tokenisers import as_tokeniser

__all__ = ["Pairs", "ParallelSource", "encode_pairs", "read_parallel"]


class Pairs(NamedTuple):
    """Sentences and their translations, in the same order."""

    source: list[str]
    target: list[str]


def read_parallel(
    source: Path | str,
    target: Path | str | None = None,
    *,
    columns: tuple[int, int] = (0, 1),
    malformed: Malformed | None = None,
    most: int | None = None,
) -> Pairs:
    """Two files whose lines correspond, or, without ``target``, two ``columns`` of one tsv.

    Sides of different length are always an error, which names the first line without a partner. A pair with an empty
    side, or a tsv line with too few fields, is malformed. With ``most`` no more than the first so many pairs are read.
    """
    malformed = malformed or Malformed("fail")
    pairs = Pairs([], [])
    rows = _tsv_rows(source, columns, malformed) if target is None else _two_files(source, target)
    for number, left, right in rows:
        if most is not None and len(pairs.source) >= most:
            break
        if left.strip() and right.strip():
            pairs.source.append(left.strip())
            pairs.target.append(right.strip())
        else:
            malformed.add(source, number, f"the {'source' if right.strip() else 'target'} side is empty")
    return pairs


def encode_pairs(pairs: Pairs, tokenizer: Any, *, max_length: int | None = None) -> tuple[list[np.ndarray], ...]:
    """(source ids, target ids) of each pair by one shared tokeniser, each side cut at ``max_length`` tokens."""
    tokeniser = as_tokeniser(tokenizer)
    sides = (tokeniser.encode_batch(side) for side in pairs)
    return tuple([np.array(ids[:max_length], dtype=np.int64) for ids in side] for side in sides)


@dataclass(frozen=True, eq=False)
class ParallelSource:
    """Batches for an encoder-decoder: source with </s>, decoder inputs from <s>, labels to </s>, padded on the right.

    By ``batch_size`` sentences or by ``max_tokens`` on the longer side; unshuffled it is one pass for evaluation.
    """

    source: Sequence[np.ndarray] = field(repr=False)
    target: Sequence[np.ndarray] = field(repr=False)
    pad: int
    bos: int
    eos: int
    batch_size: int | None = None
    max_tokens: int | None = None
    seed: int = 0
    shuffle: bool = True
    buckets: Buckets = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise ValueError(
                f"{len(self.source)} sources but {len(self.target)} targets; read_parallel keeps them in step"
            )
        lengths = np.array([1 + max(len(x), len(y)) for x, y in zip(self.source, self.target, strict=True)])
        buckets = Buckets(lengths, self.batch_size, self.max_tokens, self.seed, self.shuffle)
        object.__setattr__(self, "buckets", buckets)

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every pair has been seen (of the first epoch, if by tokens)."""
        return self.buckets.steps_per_epoch

    def batch(self, step: int) -> dict[str, Tensor]:
        chosen = self.buckets.indices(step)
        x = [np.append(self.source[i], self.eos) for i in chosen]
        y = [self.target[i] for i in chosen]
        input_ids = padded(x, self.pad)
        return {
            "input_ids": input_ids,
            "attention_mask": padded([np.ones(len(row), np.int64) for row in x], 0),
            "decoder_input_ids": padded([np.insert(row, 0, self.bos) for row in y], self.pad),
            "labels": padded([np.append(row, self.eos) for row in y], IGNORED),
        }


def padded(rows: Sequence[np.ndarray], fill: int) -> Tensor:
    """Rows of different lengths as one tensor, filled up on the right."""
    out = np.full((len(rows), max(len(row) for row in rows)), fill, dtype=np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return torch.from_numpy(out)


def _two_files(source: Path | str, target: Path | str) -> Any:
    # A line that is not UTF-8 is always an error: leaving it out of one file would shift it against the other.
    for left, right in zip_longest(numbered_lines(source), numbered_lines(target)):
        if left is None or right is None:
            number, line = left or right
            longer, shorter = (source, target) if right is None else (target, source)
            raise ValueError(
                f"{shorter} ends after {number - 1} lines, but {longer} goes on with line {number}: {line[:60]!r}; "
                "parallel files must have as many lines as each other"
            )
        yield left[0], left[1], right[1]


def _tsv_rows(path: Path | str, columns: tuple[int, int], malformed: Malformed) -> Any:
    for number, line in numbered_lines(path, malformed=malformed):
        fields = line.split("\t")
        if len(fields) > max(columns):
            yield number, fields[columns[0]], fields[columns[1]]
        else:
            malformed.add(path, number, f"expected at least {max(columns) + 1} fields between tabs, got {len(fields)}")
