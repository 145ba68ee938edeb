"""Rows of tokens to learn from: drawn from texts in memory, or from a long stream of tokens on the disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.adapters.distillation.settings import Distillation, row_shape
from attnlab.adapters.load import as_loaded
from attnlab.data.batching import Order
from attnlab.loss import IGNORED

__all__ = ["DrawnRows", "TokenRows"]


class TokenRows:
    """Rows of a stream of tokens, each once before any comes again; ``first`` are the tokens that a row begins with.

    In a share ``settings.repeats`` of the rows a passage stands a second time: text seldom asks for what was said far
    before, and a memory that is never asked does not learn to remember.
    """

    def __init__(self, tokens: np.ndarray, settings: Distillation, *, first: tuple[int, ...] = ()) -> None:
        self.tokens, self.settings, self.first = tokens, settings, first
        longest = max(length for length, _ in settings.lengths or ((settings.length, 1.0),))
        if len(tokens) < longest:
            raise ValueError(f"the text holds {len(tokens)} tokens, fewer than one row of {longest}")

    def batch(self, step: int) -> dict[str, Tensor]:
        """A pure function of (seed, step)."""
        shape = row_shape(self.settings, step)
        width = shape.length - len(self.first)
        # Each length has an order of its own.
        order = Order(len(self.tokens) // width, shape.rows, seed=self.settings.seed * 1009 + shape.part)
        at = order.indices(shape.step)[:, None] * width + np.arange(width)
        rows = np.empty((shape.rows, shape.length), np.int64)
        rows[:, : len(self.first)] = self.first
        rows[:, len(self.first) :] = self.tokens[at]
        _repeat_passages(rows[:, len(self.first) :], self.settings.repeats, (self.settings.seed, step))
        return {"input_ids": torch.from_numpy(rows)}


def _repeat_passages(rows: np.ndarray, share: float, seed: tuple[int, int]) -> None:
    """In a share of the rows, write a passage of an eighth of the row's length over a later one."""
    draw, width = np.random.default_rng(seed), rows.shape[1]
    size = width // 8
    for i in np.flatnonzero(draw.random(len(rows)) < share) if size else ():
        first = draw.integers(0, width - 2 * size + 1)
        second = draw.integers(first + size, width - size + 1)
        rows[i, second : second + size] = rows[i, first : first + size]


class DrawnRows:
    """Rows of tokens drawn from texts; for a masked language model some of them hidden."""

    def __init__(self, texts: Iterable[str], tokenizer: Any, settings: Distillation, model: nn.Module) -> None:
        if isinstance(texts, str):
            raise ValueError("texts must be several strings, got one; pass [text]")
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError("an encoder-decoder learns from pairs, not from texts; pass an object with batch(step)")
        if tokenizer is None:
            raise ValueError("texts are strings, so tokenizer= is needed; or pass an object with batch(step)")
        texts = list(texts)
        if not texts:
            raise ValueError("texts is empty: there is nothing to learn from")
        self.settings = settings
        self.mask = tokenizer.mask_token_id if settings.masked and as_loaded(model, tokenizer).task == "mlm" else None
        end = next((i for i in (tokenizer.sep_token_id, tokenizer.eos_token_id) if i is not None), None)
        first = next((i for i in (tokenizer.cls_token_id, tokenizer.bos_token_id) if i is not None), None)
        stream: list[int] = []
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            stream += ids if end is None else [*ids, end]
        self.first = [] if first is None else [first]
        self.tokens = torch.tensor(stream, dtype=torch.long)
        self.special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
        if len(self.tokens) < 2:
            raise ValueError(f"the texts hold {len(self.tokens)} tokens, too few to learn from")

    def checksum(self) -> str:
        """A hash of the tokens that rows are drawn from."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()

    def batch(self, step: int) -> dict[str, Tensor]:
        """A pure function of (seed, step)."""
        shape, draw = row_shape(self.settings, step), torch.Generator()
        draw.manual_seed(self.settings.seed * 1_000_003 + step)
        n = min(shape.length - len(self.first), len(self.tokens))
        starts = torch.randint(0, len(self.tokens) - n + 1, (shape.rows,), generator=draw)
        rows = self.tokens[starts[:, None] + torch.arange(n)]
        ids = torch.cat([torch.tensor(self.first).expand(shape.rows, -1).long(), rows], 1)
        if self.mask is None:
            return {"input_ids": ids}
        hidden = (torch.rand(ids.shape, generator=draw) < self.settings.masked) & ~torch.isin(ids, self.special)
        # A batch without a hidden token would have no loss.
        hidden[0, -1] = True
        return {"input_ids": ids.masked_fill(hidden, self.mask), "labels": ids.masked_fill(~hidden, IGNORED)}
