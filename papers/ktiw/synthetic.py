"""The toy tasks of KTIW, each a source of fresh batches: ``batch(step)`` is a pure function of (seed, split, step).

Words are numbered from 1, as in the paper; 0 is the symbol a decoder starts from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from attnlab.data.batching import generator

__all__ = ["FixedPermutation", "KeywordDetection", "MixtureOfPermutations", "PermutationCopying"]

START = 0
Split = Literal["train", "test"]


@dataclass(frozen=True)
class PermutationCopying:
    """Copy ``length`` distinct words of ``words`` in random order (section 3.3: 40 of 40; control: 40 of 60).

    With words == length every example holds the same words, so co-occurrence has no information on translation.

    >>> batch = PermutationCopying(words=5, length=5, batch_size=1).batch(0)
    >>> sorted(batch["input_ids"][0].tolist()), bool((batch["labels"] == batch["input_ids"]).all())
    ([1, 2, 3, 4, 5], True)
    """

    words: int = 40
    length: int = 40
    batch_size: int = 128
    seed: int = 0
    split: Split = "train"

    def __post_init__(self) -> None:
        if not 1 <= self.length <= self.words:
            raise ValueError(f"length distinct words are drawn from words, got length={self.length} of {self.words}")

    @property
    def vocab_size(self) -> int:
        """The words and the start symbol."""
        return self.words + 1

    def inputs(self, step: int) -> np.ndarray:
        """The words to read at this step."""
        return 1 + _permutations(_rng(self, step), self.batch_size, self.words)[:, : self.length]

    def batch(self, step: int) -> dict[str, Tensor]:
        x = self.inputs(step)
        return _copying(x, x)


@dataclass(frozen=True)
class MixtureOfPermutations:
    """Copy a permutation of {1 .. n} or, as often, of {n+1 .. 2n} (appendix A.3: n = 40)."""

    length: int = 40
    batch_size: int = 128
    seed: int = 0
    split: Split = "train"

    @property
    def vocab_size(self) -> int:
        """Both sets of words and the start symbol."""
        return 2 * self.length + 1

    def batch(self, step: int) -> dict[str, Tensor]:
        rng = _rng(self, step)
        x = 1 + _permutations(rng, self.batch_size, self.length)
        x += self.length * rng.integers(0, 2, size=(self.batch_size, 1))
        return _copying(x, x)


@dataclass(frozen=True)
class FixedPermutation(PermutationCopying):
    """y_t = x_pi(t) for one permutation pi drawn from the seed (Eq. 25); inputs as in the copying control, 40 of 60."""

    words: int = 60

    @property
    def pi(self) -> np.ndarray:
        """The permutation, counted from 0; the same for both splits."""
        return generator(self.seed, 2).permutation(self.length)

    def batch(self, step: int) -> dict[str, Tensor]:
        x = self.inputs(step)
        return _copying(x, x[:, self.pi])


@dataclass(frozen=True)
class KeywordDetection:
    """Positive when word 1 is in the sequence, and then exactly once (section 6.1: 40 words, length 40).

    Words are uniform, conditioned on that, as after the paper's rejection sampling. ``position`` is the keyword's
    place, -1 in negative sequences. Either class has probability 1/2.
    """

    words: int = 40
    length: int = 40
    batch_size: int = 32
    seed: int = 0
    split: Split = "train"

    @property
    def vocab_size(self) -> int:
        """The words and 0, which never occurs."""
        return self.words + 1

    def batch(self, step: int) -> dict[str, Tensor]:
        rng, b = _rng(self, step), self.batch_size
        x = rng.integers(2, self.words + 1, size=(b, self.length))
        positive = rng.integers(0, 2, size=b)
        position = np.where(positive == 1, rng.integers(0, self.length, size=b), -1)
        x[np.arange(b)[positive == 1], position[positive == 1]] = 1
        return {
            "input_ids": torch.from_numpy(x),
            "labels": torch.from_numpy(positive),
            "position": torch.from_numpy(position),
        }


Task = PermutationCopying | MixtureOfPermutations | FixedPermutation | KeywordDetection


def _rng(task: Task, step: int) -> np.random.Generator:
    return generator(task.seed, {"train": 0, "test": 1}[task.split], step)


def _permutations(rng: np.random.Generator, rows: int, n: int) -> np.ndarray:
    return rng.permuted(np.tile(np.arange(n), (rows, 1)), axis=1)


def _copying(x: np.ndarray, y: np.ndarray) -> dict[str, Tensor]:
    start = np.full((len(y), 1), START)
    return {
        "input_ids": torch.from_numpy(x),
        "decoder_input_ids": torch.from_numpy(np.concatenate([start, y[:, :-1]], axis=1)),
        "labels": torch.from_numpy(np.ascontiguousarray(y)),
    }
