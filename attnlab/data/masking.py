"""Masked language modelling: which tokens are hidden, and what replaces them (Devlin et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnlab.data.tokenisers import Specials
from attnlab.loss import IGNORED
from attnlab.shapes import Int

__all__ = ["IGNORED", "Masking", "mask_tokens"]


@dataclass(frozen=True)
class Masking:
    """Of the ``rate`` of tokens chosen, ``masked`` become the mask, ``random`` any token, and the rest stay."""

    rate: float = 0.15
    masked: float = 0.8
    random: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be above 0 and at most 1, got {self.rate}")
        if self.masked < 0 or self.random < 0 or self.masked + self.random > 1 + 1e-9:
            raise ValueError(f"masked and random are shares of the chosen tokens, got {self.masked} and {self.random}")


BERT = Masking()


def mask_tokens(
    tokens: Int[np.ndarray, "b l"],
    *,
    specials: Specials,
    vocab_size: int,
    rng: np.random.Generator,
    masking: Masking = BERT,
) -> tuple[Int[np.ndarray, "b l"], Int[np.ndarray, "b l"]]:
    """(inputs, labels): labels hold the chosen tokens and ``IGNORED`` elsewhere; special tokens are never chosen."""
    if specials.mask is None:
        raise ValueError("this tokeniser has no mask token; train one with train_wordpiece or train_bpe")
    u = rng.random(tokens.shape)
    chosen = (u < masking.rate) & ~np.isin(tokens, specials.ids())
    # Where u < rate, u / rate is uniform again: one draw decides whether a token is chosen and how it is replaced.
    kind = u / masking.rate
    inputs = np.where(chosen & (kind < masking.masked), specials.mask, tokens)
    replaced = chosen & (kind >= masking.masked) & (kind < masking.masked + masking.random)
    other = rng.integers(0, vocab_size - len(specials.ids()), size=int(replaced.sum()))
    for special in specials.ids():
        other += other >= special
    inputs[replaced] = other
    return inputs, np.where(chosen, tokens, IGNORED)
