"""Attention by type of token (section 3.2 of Effective): nouns, pronouns, verbs, [SEP], [CLS], punctuation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnlab.shapes import Bool, Float, Int

__all__ = ["TOKEN_TYPES", "attention_to", "token_type_weights", "token_types"]

TOKEN_TYPES = ("noun", "pronoun", "verb", "[SEP]", "[CLS]", "punctuation")
# Proper nouns are nouns, auxiliaries are verbs.
TYPE_OF_TAG = {"NOUN": 0, "PROPN": 0, "PRON": 1, "VERB": 2, "AUX": 2, "PUNCT": 5}
SEP, CLS = 3, 4


def token_types(
    input_ids: Int[Tensor, " n"],
    word_ids: Sequence[int | None],
    tags: Sequence[str],
    *,
    cls_id: int | None,
    sep_id: int | None,
) -> Int[Tensor, " n"]:
    """Each token's index in ``TOKEN_TYPES``, or -1: a word's tag stands at its first subtoken, the others have none.

    ``word_ids`` says which word each token belongs to (None for special tokens), as a fast tokenizer's ``word_ids()``
    does for text given as words; ``tags`` are the words' UPOS tags.

    >>> token_types(torch.tensor([101, 7, 8, 9, 102]), [None, 0, 0, 1, None], ["NOUN", "PUNCT"], cls_id=101, sep_id=102)
    tensor([ 4,  0, -1,  5,  3])
    """
    if len(word_ids) != len(input_ids):
        raise ValueError(f"word_ids must say one word per token: got {len(word_ids)} for {len(input_ids)} tokens")
    types = torch.full((len(input_ids),), -1)
    previous = None
    for i, (token, word) in enumerate(zip(input_ids.tolist(), word_ids, strict=True)):
        if word is None:
            types[i] = CLS if token == cls_id else SEP if token == sep_id else -1
        elif word != previous:
            if word >= len(tags):
                raise ValueError(
                    f"token {i} belongs to word {word}, but there are {len(tags)} tags; are the words the same?"
                )
            types[i] = TYPE_OF_TAG.get(tags[word], -1)
        previous = word
    return types


def token_type_weights(
    maps: Float[Tensor, "b h q k"], types: Int[Tensor, "b k"], *, query: int = 0
) -> Float[Tensor, "h t"]:
    """What a query ([CLS] by default) gives to each type: the largest weight among its tokens, averaged over inputs.

    An input without a token of a type does not count for it; a type that no input has is NaN (Figure 1).

    >>> maps = torch.tensor([[[[0.1, 0.2, 0.3, 0.4]]]])
    >>> token_type_weights(maps, torch.tensor([[4, 0, 0, 3]]))
    tensor([[0.3000,    nan,    nan, 0.4000, 0.1000,    nan]])
    """
    rows = maps[:, :, query]
    of_type = types[:, None] == torch.arange(len(TOKEN_TYPES), device=types.device)[:, None]
    # (b, h, t)
    largest = rows[:, :, None].masked_fill(~of_type[:, None], -torch.inf).amax(-1)
    known = of_type.any(-1)[:, None]
    return torch.where(known, largest, 0).sum(0) / known.expand_as(largest).sum(0)


def attention_to(
    maps: Float[Tensor, "b h q k"], keys: Bool[Tensor, "b k"], *, queries: Bool[Tensor, "b q"] | None = None
) -> Float[Tensor, " h"]:
    """The weight that other tokens give to the marked keys together, averaged over queries and inputs (Figures 5, 6).

    ``queries`` marks real tokens. Where queries and keys are the same tokens, marked tokens do not count as queries.

    >>> maps = torch.tensor([[[[0.9, 0.1], [0.4, 0.6]]]])
    >>> attention_to(maps, torch.tensor([[True, False]]))
    tensor([0.4000])
    """
    received = torch.where(keys[:, None, None], maps, 0).sum(-1)
    counted = (
        torch.ones(maps.shape[0], maps.shape[2], dtype=torch.bool, device=maps.device) if queries is None else queries
    )
    if maps.shape[2] == maps.shape[3]:
        counted = counted & ~keys
    return (received * counted[:, None]).sum((0, 2)) / counted.sum()
