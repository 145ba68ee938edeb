"""Labelled text: jsonl, csv or tsv with a text and a label, and the Stanford Sentiment Treebank's trees."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attnlab.data.batching import Buckets
from attnlab.data.malformed import Malformed
from attnlab.data.parallel import padded
from attnlab.data.readers import numbered_lines, records

__all__ = ["Labelled", "LabelledSource", "read_labelled", "read_trees"]


@dataclass(frozen=True)
class Labelled:
    """Texts with a class each; ``labels`` are places in ``names``."""

    texts: list[str]
    labels: list[int]
    names: tuple[str, ...]


def read_labelled(
    path: Path | str,
    *,
    text: str = "text",
    label: str = "label",
    header: Sequence[str] | None = None,
    classes: Mapping[str, int] | Callable[[str], int | None] | None = None,
    names: Sequence[str] | None = None,
    malformed: Malformed | None = None,
) -> Labelled:
    """The ``text`` and ``label`` columns of a file; without ``classes`` they are its labels, in sorted order.

    ``classes`` maps a label to its class, or to None to leave the example out (Yelp's three stars); as a dict, labels
    it lacks are left out. An empty text is malformed. Numbers sort as numbers.
    """
    malformed = malformed or Malformed("fail")
    texts: list[str] = []
    labels: list[str] = []
    for number, row in records(path, columns=[text, label], header=header, malformed=malformed):
        if row[text].strip():
            texts.append(row[text])
            labels.append(row[label].strip())
        else:
            malformed.add(path, number, "the text is empty")
    if classes is None:
        order = sorted(set(labels), key=_numbers_first)
        classes = {name: i for i, name in enumerate(order)}
        names = names or order
    to_class = classes.get if isinstance(classes, Mapping) else classes
    kept = [(t, c) for t, name in zip(texts, labels, strict=True) if (c := to_class(name)) is not None]
    if not kept:
        raise ValueError(f"{path} holds no example of the classes asked for; its labels are {sorted(set(labels))[:10]}")
    kept_texts, kept_classes = map(list, zip(*kept, strict=True))
    return Labelled(kept_texts, kept_classes, tuple(names or map(str, range(max(kept_classes) + 1))))


def read_trees(path: Path | str, *, malformed: Malformed | None = None) -> Labelled:
    """Sentences of the sentiment treebank as negative (roots 0, 1) or positive (3, 4); neutral ones are left out."""
    malformed = malformed or Malformed("fail")
    texts, labels = [], []
    for number, line in numbered_lines(path, malformed=malformed):
        if not line.strip():
            continue
        root = re.match(r"\((\d) ", line)
        leaves = re.findall(r"\(\d ([^()\s]+)\)", line)
        if root is None or not leaves:
            malformed.add(path, number, f"not a labelled tree: {line[:40]!r}")
        elif root[1] != "2":
            texts.append(" ".join(leaves).replace("-LRB-", "(").replace("-RRB-", ")"))
            labels.append(int(root[1] > "2"))
    return Labelled(texts, labels, ("negative", "positive"))


@dataclass(frozen=True, eq=False)
class LabelledSource:
    """Batches for a classifier, of like length, padded on the right; unshuffled it is one pass for evaluation."""

    inputs: Sequence[np.ndarray] = field(repr=False)
    labels: Sequence[int] = field(repr=False)
    pad: int
    batch_size: int = 32
    seed: int = 0
    shuffle: bool = True
    buckets: Buckets = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels):
            raise ValueError(f"{len(self.inputs)} texts but {len(self.labels)} labels")
        empty = [i for i, row in enumerate(self.inputs) if len(row) == 0]
        if empty:
            raise ValueError(f"example {empty[0]} has no tokens: leave such texts out before batching")
        lengths = np.array([len(row) for row in self.inputs])
        object.__setattr__(self, "buckets", Buckets(lengths, self.batch_size, None, self.seed, self.shuffle))

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every example has been seen."""
        return self.buckets.steps_per_epoch

    def batch(self, step: int) -> dict[str, Tensor]:
        chosen = self.buckets.indices(step)
        rows = [np.asarray(self.inputs[i], dtype=np.int64) for i in chosen]
        return {
            "input_ids": padded(rows, self.pad),
            "attention_mask": padded([np.ones(len(row), np.int64) for row in rows], 0),
            "labels": torch.tensor([self.labels[i] for i in chosen]),
        }


def _numbers_first(label: str) -> tuple[bool, float, str]:
    """The order of labels: numbers by their value, then words by the alphabet."""
    is_number = re.fullmatch(r"-?\d+(\.\d+)?", label) is not None
    return not is_number, float(label) if is_number else 0.0, label
