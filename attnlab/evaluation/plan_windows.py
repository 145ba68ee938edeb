"""The text on which a conversion is planned: windows as they stand, and windows that repeat what was read long ago."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.data import IGNORED
from attnlab.data.beginnings import first_tokens, tokens_around
from attnlab.evaluation.quality import Windows

__all__ = ["plain_and_recall_windows"]

# Tokens of a repeated passage, and the share of a window that repetition takes.
PASSAGE, REPEATED = 32, 4


def plain_and_recall_windows(
    texts: Sequence[str], tokenizer: Any, *, length: int, count: int, reach: int, seed: int
) -> tuple[Windows, Windows]:
    """``count`` windows of each kind, of ``length`` tokens; the texts follow one another.

    The end of a recall window repeats passages of its beginning in another order, each at least ``reach`` tokens after
    its first place; only what is repeated is to be predicted, without the first token of a passage.
    """
    if isinstance(texts, str):
        raise ValueError("texts must be several strings, got one; pass [text]")
    before, _ = tokens_around(tokenizer)
    passage, repeats = _passages(length - len(before), reach)
    room = length - len(before)
    fresh = room - passage * repeats
    needed, stream = count * (room + fresh), list[int]()
    for text in texts:
        if len(stream) >= needed:
            break
        stream += first_tokens(
            text,
            needed - len(stream),
            lambda part: tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"],
        )
    if len(stream) < needed:
        raise ValueError(
            f"the texts hold {len(stream)} tokens, and {needed} are needed for {2 * count} windows of {length}; give "
            "longer texts, or plan for a smaller length"
        )
    generator = torch.Generator().manual_seed(seed)
    plain, recall = [], []
    start = torch.tensor(before, dtype=torch.long)
    for i in range(count):
        own = torch.tensor(stream[i * (room + fresh) : (i + 1) * (room + fresh)])
        ids = torch.cat([start, own[:room]])
        plain.append((ids, ids.masked_fill(torch.arange(length) < max(1, len(before)), IGNORED)))
        recall.append(_repeating(start, own[room:], passage, repeats, reach, generator))
    return _as_windows(plain), _as_windows(recall)


def _passages(room: int, reach: int) -> tuple[int, int]:
    """(tokens in a passage, how many are repeated at the end of a window of ``room`` tokens)."""
    passage = max(4, min(PASSAGE, room // 16))
    repeats = min(room // REPEATED, (room - reach) // 2) // passage
    if repeats < 1:
        raise ValueError(
            f"a candidate sees the last {reach} tokens of windows of {room}, so that nothing is beyond it; plan for a "
            "larger length, or with smaller candidates"
        )
    return passage, repeats


def _repeating(
    start: Tensor, ids: Tensor, passage: int, repeats: int, reach: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A recall window and its labels."""
    # The last source ends ``reach`` before the first repetition.
    sources = torch.randperm((len(ids) - reach) // passage, generator=generator)[:repeats]
    again = torch.cat([ids[passage * i : passage * (i + 1)] for i in sources.tolist()])
    labels = again.masked_fill(torch.arange(len(again)) % passage == 0, IGNORED)
    first = torch.cat([start, ids])
    return torch.cat([first, again]), torch.cat([torch.full_like(first, IGNORED), labels])


def _as_windows(rows: list[tuple[Tensor, Tensor]]) -> Windows:
    ids, labels = (torch.stack(part) for part in zip(*rows, strict=True))
    return Windows(ids, torch.ones_like(ids), labels, ids.numel())
