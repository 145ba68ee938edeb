"""Blocks of one length out of a token store, as a view: tokens are copied when rows are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from attnlab.data.batching import generator
from attnlab.data.store import TokenStore
from attnlab.data.tokenisers import Specials
from attnlab.shapes import Int

__all__ = ["Blocks"]


@dataclass(frozen=True, eq=False)
class Blocks:
    """A store's documents as rows of ``length`` tokens, in an order drawn from ``seed`` (None: the store's order).

    | form     | a row is |
    | -------- | -------- |
    | enclosed | L - 2 tokens of the documents, each followed by </s>, between <s> and </s> (OVA, A.1) |
    | stream   | L tokens of the documents, each followed by </s> |
    | separate | up to L - 2 tokens of one document between <s> and </s>, then padding |

    In the first two a last row that would not be full is left out.

    >>> store = TokenStore(np.array([5, 6, 7, 8, 9]), np.array([0, 3, 5]))
    >>> Blocks(store, Specials(bos=1, eos=2), length=5, seed=None).rows([0, 1])[0].tolist()
    [[1, 5, 6, 7, 2], [1, 2, 8, 9, 2]]
    """

    store: TokenStore
    specials: Specials
    length: int
    form: Literal["enclosed", "stream", "separate"] = "enclosed"
    seed: int | None = 0
    _order: np.ndarray = field(init=False, repr=False)
    # Where each document begins, in rows' worth of payload: tokens of the stream, or rows if separate.
    _starts: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.form not in ("enclosed", "stream", "separate"):
            raise ValueError(f"form must be 'enclosed', 'stream' or 'separate', got {self.form!r}")
        if self.length < 3:
            raise ValueError(f"length must be at least 3 (one token between <s> and </s>), got {self.length}")
        needed = {"enclosed": ("bos", "eos"), "stream": ("eos",), "separate": ("bos", "eos", "pad")}[self.form]
        for name in needed:
            if getattr(self.specials, name) is None:
                raise ValueError(f"form {self.form!r} needs a token for {name!r}, which this tokeniser lacks")
        n = len(self.store)
        order = np.arange(n) if self.seed is None else generator(self.seed, n).permutation(n)
        lengths = self.store.lengths[order]
        sizes = -(-lengths // self._payload) if self.form == "separate" else lengths + 1
        object.__setattr__(self, "_order", order)
        object.__setattr__(self, "_starts", np.concatenate([[0], np.cumsum(sizes)]))
        if len(self) == 0 or len(self.store.tokens) == 0:
            raise ValueError(
                f"the store holds {len(self.store.tokens)} tokens, too few for one row of {self.length}: "
                "give more text, or shorter rows"
            )

    @property
    def _payload(self) -> int:
        return self.length if self.form == "stream" else self.length - 2

    def __len__(self) -> int:
        total = int(self._starts[-1])
        return total if self.form == "separate" else total // self._payload

    def rows(self, indices: np.ndarray | list[int]) -> tuple[Int[np.ndarray, "b l"], Int[np.ndarray, "b l"]]:
        """Rows, and beside each token the number of its document within the row, -1 on padding."""
        indices = np.asarray(indices, dtype=np.int64)
        if ((indices < 0) | (indices >= len(self))).any():
            raise IndexError(f"rows 0 to {len(self) - 1} exist, got {indices.min()} to {indices.max()}")
        tokens, documents = self._separate(indices) if self.form == "separate" else self._stream(indices)
        if self.form == "stream":
            return tokens, documents
        return self._enclosed(tokens, documents)

    def _stream(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = indices[:, None] * self._payload + np.arange(self._payload)
        document = np.searchsorted(self._starts, at, side="right") - 1
        within = at - self._starts[document]
        begin, end = self._span(document)
        is_end = begin + within == end
        # </s> follows each document. In the store that index is the next document's first token, or past the end.
        source = np.minimum(begin + within, len(self.store.tokens) - 1)
        tokens = np.where(is_end, np.int64(self.specials.eos or 0), self.store.tokens[source].astype(np.int64))
        return tokens, document - document[:, :1]

    def _separate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # A document without tokens takes no row: of several documents that begin at one row, the last has it.
        document = np.searchsorted(self._starts, indices, side="right") - 1
        begin, end = self._span(document)
        at = (begin + (indices - self._starts[document]) * self._payload)[:, None] + np.arange(self._payload)
        inside = at < end[:, None]
        source = np.minimum(at, len(self.store.tokens) - 1)
        tokens = np.where(inside, self.store.tokens[source].astype(np.int64), np.int64(self.specials.pad or 0))
        return tokens, np.where(inside, 0, -1)

    def _span(self, document: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        place = self._order[document]
        return self.store.offsets[place], self.store.offsets[place + 1]

    def _enclosed(self, tokens: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        b, n = len(tokens), (documents >= 0).sum(1)
        out = np.full((b, self.length), self.specials.pad if self.form == "separate" else 0)
        document_of = np.full((b, self.length), -1)
        out[:, 1:-1], document_of[:, 1:-1] = tokens, documents
        out[:, 0], document_of[:, 0] = self.specials.bos, 0
        row = np.arange(b)
        out[row, n + 1], document_of[row, n + 1] = self.specials.eos, documents[row, n - 1]
        return out, document_of
