"""Multi-query associative recall (Arora et al., 2024): pairs of key and value, then keys asked for their values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.fields import check_fields
from attnlab.loss import IGNORED

__all__ = ["RecallTask"]


@dataclass(frozen=True)
class RecallTask:
    """Batches of ``rows`` sequences: ``pairs`` pairs, then each key once, at random places, among empty tokens.

    Keys and values are drawn anew for each row, no key twice, from ``keys`` and ``values`` tokens. Every question comes
    more than ``apart`` tokens after its pair. A label stands where a key is asked for: the value that came with it.
    Easier tasks of the same vocabulary: ``drawn`` takes the keys from the first so many alone, and ``dense`` asks for
    some key at every place from the first question on.

    >>> batch = RecallTask(pairs=2, length=9, apart=2, rows=1).batch(0)
    >>> batch["input_ids"].shape, int((batch["labels"] != -100).sum())
    (torch.Size([1, 9]), 2)
    """

    pairs: int = 64
    length: int = 512
    apart: int = 64
    keys: int = 128
    values: int = 128
    rows: int = 64
    seed: int = 0
    drawn: int | None = None
    dense: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        drawn = self.keys if self.drawn is None else self.drawn
        if not 1 <= self.pairs <= drawn <= self.keys:
            raise ValueError(f"pairs must be at least 1 and at most the {drawn} keys, got {self.pairs}")
        if self.length < self.first_question + self.pairs:
            raise ValueError(
                f"{self.pairs} pairs, {self.apart} tokens and {self.pairs} questions need a length of "
                f"{self.first_question + self.pairs}, got {self.length}"
            )

    @property
    def first_question(self) -> int:
        """The first place where a key may be asked for: ``apart`` tokens lie between it and the last pair."""
        return 2 * self.pairs + self.apart

    @property
    def vocab(self) -> int:
        """The empty token, keys and values."""
        return 1 + self.keys + self.values

    def batch(self, step: int) -> dict[str, Tensor]:
        """A pure function of (seed, step)."""
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + step)

        def chosen(n: int) -> Tensor:
            return torch.rand(self.rows, n, generator=draw).argsort(-1)[:, : self.pairs]

        keys = 1 + chosen(self.keys if self.drawn is None else self.drawn)
        values = 1 + self.keys + torch.randint(self.values, (self.rows, self.pairs), generator=draw)
        room = self.length - self.first_question
        if self.dense:
            which = torch.randint(self.pairs, (self.rows, room), generator=draw)
            asked = (self.first_question + torch.arange(room)).expand(self.rows, -1)
        else:
            which, asked = torch.arange(self.pairs).expand(self.rows, -1), self.first_question + chosen(room)
        ids = torch.zeros(self.rows, self.length, dtype=torch.long)
        ids[:, : 2 * self.pairs] = torch.stack([keys, values], -1).flatten(1)
        labels = torch.full_like(ids, IGNORED).scatter(1, asked, values.gather(1, which))
        return {"input_ids": ids.scatter(1, asked, keys.gather(1, which)), "labels": labels}
