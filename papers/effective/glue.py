"""GLUE's files as token ids for the reproduction of Effective: training batches, dev batches, types of tokens."""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from attnlab.data import Malformed
from attnlab.data.readers import records
from attnlab.reading.token_types import token_types
from papers.effective.tagger import PerceptronTagger

__all__ = [
    "TASKS",
    "Examples",
    "GlueSource",
    "Task",
    "dev_batches",
    "encode",
    "read_glue",
    "read_splits",
    "subset",
    "tag_types",
]

T = TypeVar("T")
# An example's texts and its label.
Row = tuple[tuple[str, ...], float]
# Words as a treebank splits them: clitics apart, every mark of punctuation a word.
WORD = re.compile(r"\w+(?=n't\b)|n't\b|'(?:s|re|ve|ll|d|m)\b|\w+(?:[-.]\w+)*|[^\w\s]", re.IGNORECASE)


@dataclass(frozen=True)
class Task:
    """Where a task keeps its texts, and what is predicted: a class, or with ``classes`` = 1 a number.

    ``labels`` are the classes' names in the files, in order; without them the files have the classes' numbers.
    """

    name: str
    columns: tuple[str, ...]
    label: str
    classes: int = 2
    metric: str = "accuracy"
    labels: tuple[str, ...] = ()
    # The files of development examples; "dev" is the first of them.
    dev: tuple[str, ...] = ("dev",)
    # Lines with too few fields, as QQP's have, are left out and counted on stderr.
    skip_malformed: bool = False
    # More than 50,000 examples to train on.
    large: bool = False


ENTAILMENT = ("not_entailment", "entailment")
TASKS = {
    task.name: task
    for task in (
        Task("RTE", ("sentence1", "sentence2"), "label", labels=ENTAILMENT),
        Task("MRPC", ("#1 String", "#2 String"), "Quality"),
        Task("SST-2", ("sentence",), "label", large=True),
        Task("STS-B", ("sentence1", "sentence2"), "score", 1, "pearson"),
        Task("QNLI", ("question", "sentence"), "label", labels=ENTAILMENT, large=True),
        Task(
            "MNLI",
            ("sentence1", "sentence2"),
            "gold_label",
            3,
            labels=("contradiction", "entailment", "neutral"),
            dev=("dev_matched", "dev_mismatched"),
            large=True,
        ),
        Task("QQP", ("question1", "question2"), "is_duplicate", skip_malformed=True, large=True),
    )
}


@dataclass(frozen=True, eq=False)
class Examples:
    """Token ids, segments and labels of each example; ``texts`` are what they were made from."""

    ids: list[list[int]] = field(repr=False)
    segments: list[list[int]] = field(repr=False)
    labels: list[float]
    texts: list[tuple[str, ...]] = field(repr=False)
    # The token id of padding.
    pad: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, n: int | None) -> Examples:
        """The first ``n`` examples; None: all."""
        return Examples(self.ids[:n], self.segments[:n], self.labels[:n], self.texts[:n], self.pad)

    def segment_ids(self, chosen: Sequence[int], *, length: int) -> Tensor:
        """The segments of these examples, padded with zeros to ``length``."""
        rows = torch.zeros(len(chosen), length, dtype=torch.long)
        for row, i in enumerate(chosen):
            rows[row, : len(self.segments[i])] = torch.tensor(self.segments[i])
        return rows

    def batch(self, chosen: Sequence[int], *, length: int, segments: bool, classes: int) -> dict[str, Tensor]:
        """Padded on the right to ``length``, as the paper's evaluation has it."""
        tensors = {
            "input_ids": torch.full((len(chosen), length), self.pad),
            "attention_mask": torch.zeros(len(chosen), length, dtype=torch.long),
        }
        if segments:
            tensors["token_type_ids"] = self.segment_ids(chosen, length=length)
        for row, i in enumerate(chosen):
            n = len(self.ids[i])
            tensors["input_ids"][row, :n] = torch.tensor(self.ids[i])
            tensors["attention_mask"][row, :n] = 1
        labels = torch.tensor([self.labels[i] for i in chosen])
        return tensors | {"labels": labels if classes == 1 else labels.long()}


def read_glue(folder: Path | str, task: Task, split: str) -> list[Row]:
    """(texts, label) of <folder>/<task>/<split>.tsv, plain or compressed; MNLI's "dev" is dev_matched."""
    path = _file(folder, task, split)
    if path is None:
        raise ValueError(
            f"{Path(folder) / task.name} holds no {_file_name(task, split)} (or .xz, .gz); give the folder of GLUE's "
            "tasks"
        )
    malformed = Malformed("skip" if task.skip_malformed else "fail")
    rows = [
        (tuple(row[c].strip() for c in task.columns), _class(task, row[task.label].strip(), path, number))
        for number, row in records(path, columns=[*task.columns, task.label], malformed=malformed)
    ]
    if malformed.count:
        print(malformed, file=sys.stderr)
    return rows


def read_splits(folder: Path | str, task: Task, *, seed: int) -> tuple[dict[str, list[Row]], str]:
    """({train, dev}, how they were split), dev in an order drawn from ``seed``, since some files are sorted.

    A task with no train file is cut in two: a fifth of dev.tsv's last texts, with all their rows, is dev.
    """
    dev = read_glue(folder, task, "dev")
    if _file(folder, task, "train") is not None:
        splits = {"train": read_glue(folder, task, "train"), "dev": dev}
        how = f"train.tsv and {_file_name(task, 'dev')}"
    else:
        last = list(dict.fromkeys(texts[-1] for texts, _ in dev))
        held = set(subset(last, len(last) // 5, seed=seed))
        splits = {
            "train": [row for row in dev if row[0][-1] not in held],
            "dev": [row for row in dev if row[0][-1] in held],
        }
        how = f"no train.tsv: dev.tsv cut in two, no {task.columns[-1]} on both sides"
    splits["dev"] = [splits["dev"][i] for i in np.random.default_rng(seed).permutation(len(splits["dev"])).tolist()]
    return splits, how


def _file(folder: Path | str, task: Task, split: str) -> Path | None:
    plain = Path(folder) / task.name / _file_name(task, split)
    return next((path for end in ("", ".xz", ".gz") if (path := plain.with_name(plain.name + end)).exists()), None)


def _file_name(task: Task, split: str) -> str:
    return f"{task.dev[0] if split == 'dev' else split}.tsv"


def subset(rows: Sequence[T], limit: int | None, *, seed: int) -> list[T]:
    """``limit`` of the rows, drawn once; all of them where there are no more."""
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))[:limit].tolist()]


def _class(task: Task, label: str, path: Path, line: int) -> float:
    """The label's class, or the number that the file has."""
    if task.labels:
        if label not in task.labels:
            raise ValueError(f"{path}, line {line}: {label!r} is not among {task.name}'s {', '.join(task.labels)}")
        return float(task.labels.index(label))
    try:
        return float(label)
    except ValueError:
        raise ValueError(f"{path}, line {line}: expected a number as {task.label}, got {label!r}") from None


def encode(rows: Sequence[Row], tokenizer: Any, *, length: int) -> Examples:
    """[CLS] a [SEP] b [SEP], cut to ``length``; padding comes with the batches."""
    texts = [row[0] for row in rows]
    special = tokenizer.cls_token_id, tokenizer.sep_token_id
    parts = [
        tokenizer([text[i] for text in texts], add_special_tokens=False)["input_ids"] for i in range(len(texts[0]))
    ]
    ids, segments = [], []
    for example in zip(*parts, strict=True):
        cut = _cut([list(part) for part in example], length - 1 - len(example))
        ids.append([special[0], *(token for part in cut for token in (*part, special[1]))])
        segments.append([0] * (2 + len(cut[0])) + [1] * sum(len(part) + 1 for part in cut[1:]))
    return Examples(ids, segments, [row[1] for row in rows], texts, pad=getattr(tokenizer, "pad_token_id", None) or 0)


def _cut(parts: list[list[T]], room: int) -> list[list[T]]:
    """The texts shortened to ``room`` tokens together; each token is removed from the longer text."""
    while sum(map(len, parts)) > room:
        max(parts, key=len).pop()
    return parts


@dataclass(frozen=True, eq=False)
class GlueSource:
    """Training batches: each epoch a permutation of its own, a pure function of (seed, step)."""

    examples: Examples = field(repr=False)
    batch_size: int
    length: int
    segments: bool
    classes: int
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch."""
        return max(1, len(self.examples) // self.batch_size)

    def batch(self, step: int) -> dict[str, Tensor]:
        """The global batch of a step."""
        epoch, at = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.examples))
        chosen = order[at * self.batch_size : (at + 1) * self.batch_size].tolist()
        # Padded to the longest text of the batch, in steps of 16: training does not depend on padding.
        length = min(self.length, -(-max(len(self.examples.ids[i]) for i in chosen) // 16) * 16)
        return self.examples.batch(chosen, length=length, segments=self.segments, classes=self.classes)


def dev_batches(
    examples: Examples, *, size: int, length: int, segments: bool, classes: int, device: torch.device
) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """(places, batch) in order."""
    for lo in range(0, len(examples), size):
        chosen = list(range(lo, min(lo + size, len(examples))))
        batch = examples.batch(chosen, length=length, segments=segments, classes=classes)
        yield chosen, {name: t.to(device) for name, t in batch.items()}


def tag_types(examples: Examples, tokenizer: Any, tagger: PerceptronTagger, *, length: int) -> list[Tensor]:
    """The type of every token (places in ``TOKEN_TYPES``): a word's tag stands at its first subtoken."""
    by_example = []
    for ids, texts in zip(examples.ids, examples.texts, strict=True):
        words: list[int | None] = [None]
        tags: list[str] = []
        room = [list(part) for part in _offsets(texts, tokenizer)]
        for text, part in zip(texts, _cut(room, length - 1 - len(texts)), strict=True):
            spans = [match.span() for match in WORD.finditer(text)]
            starts = [lo for lo, _ in spans]
            for lo, _ in part:
                words.append(len(tags) + max(0, bisect_right(starts, lo) - 1))
            words.append(None)
            tags += tagger.tag([text[lo:hi] for lo, hi in spans]) or ["X"]
        types = token_types(
            torch.tensor(ids), words, tags, cls_id=tokenizer.cls_token_id, sep_id=tokenizer.sep_token_id
        )
        by_example.append(types)
    return by_example


def _offsets(texts: Sequence[str], tokenizer: Any) -> list[list[tuple[int, int]]]:
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
    return encoded["offset_mapping"]
