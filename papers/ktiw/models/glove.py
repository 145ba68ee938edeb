"""Word vectors from a GloVe text file, for an embedding to start from (KTIW, A.8)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

__all__ = ["fill_from_glove"]


def fill_from_glove(embedding: nn.Embedding, path: Path | str, *, words: Sequence[str]) -> int:
    """Put a file's vectors in the rows of the words it knows, ``words[i]`` being row i; returns how many it knew.

    A line is the word and its numbers between blanks, as glove.6B.300d.txt has them.
    """
    if len(words) != embedding.num_embeddings:
        raise ValueError(f"words must name each of the {embedding.num_embeddings} rows, got {len(words)}")
    place = {word: i for i, word in enumerate(words)}
    known = 0
    with open(path, encoding="utf-8") as lines, torch.no_grad():
        for number, line in enumerate(lines, 1):
            word, *values = line.rstrip("\n").split(" ")
            if len(values) != embedding.embedding_dim:
                raise ValueError(
                    f"{path}, line {number}: {len(values)} numbers after {word!r}, "
                    f"but the embedding has width {embedding.embedding_dim}"
                )
            if word in place:
                embedding.weight[place[word]] = torch.tensor([float(value) for value in values])
                known += 1
    return known
