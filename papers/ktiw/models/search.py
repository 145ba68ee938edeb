"""Greedy translation by the LSTM translator."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.shapes import Int
from papers.ktiw.models.lstm import Translator

__all__ = ["translate"]


@torch.no_grad()
def translate(
    model: Translator,
    input_ids: Int[Tensor, "b k"],
    *,
    attention_mask: Tensor | None = None,
    bos: int,
    eos: int,
    max_length: int,
) -> Int[Tensor, "b q"]:
    """The most probable next token at each step, from ``bos`` on; after ``eos`` a row is filled with ``eos``."""
    source = model.encode(model.tokens(input_ids), attention_mask=attention_mask)
    tokens = input_ids.new_full((len(input_ids), 1), bos)
    state, done = source.state, torch.zeros_like(tokens, dtype=torch.bool)
    steps = []
    for step in range(max_length):
        s, state = model.decode(tokens, state)
        tokens = model.predict(model.attention(s, source=source), s).argmax(-1).masked_fill(done, eos)
        done = done | (tokens == eos)
        steps.append(tokens)
        # The check waits for the GPU, so it is made every eight steps.
        if step % 8 == 7 and bool(done.all()):
            break
    return torch.cat(steps, 1)
