"""Attention guidance in the training of a language model: the tokens that patterns look for, and the loss term."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from attnlab.data.tokenisers import Tokeniser
from attnlab.guidance import Guidance, GuidanceTerm, guide
from attnlab.patterns import SpecialTokens

__all__ = ["guided", "pattern_tokens"]


def pattern_tokens(tokeniser: Tokeniser) -> SpecialTokens:
    """The tokens that a full stop becomes, alone and after a word, and the delimiters of one of our tokenisers."""
    specials = tokeniser.specials
    stops = {ids[-1] for ids in tokeniser.encode_batch([".", "a.", "a ."]) if ids} - {specials.unk}
    return SpecialTokens(tuple(sorted(stops)), tuple(i for i in (specials.bos, specials.eos) if i is not None))


@contextmanager
def guided(
    model: nn.Module, guidance: Guidance | None, *, steps: int, tokeniser: Tokeniser
) -> Iterator[list[GuidanceTerm]]:
    """Inside the context, the loss terms that guide ``model`` in a run of ``steps``: none without ``guidance``."""
    if guidance is None:
        yield []
        return
    tokens = pattern_tokens(tokeniser)
    for name, ids in (("period", tokens.period), ("delim", tokens.delimiters)):
        if name in guidance.names and not ids:
            raise ValueError(f"the tokeniser has no token for the pattern {name!r}: name patterns without it")
    with guide(model, guidance.over(steps), tokens=tokens) as term:
        yield [term]
