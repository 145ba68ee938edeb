"""From tokens to vectors and back: plain embeddings, and the adaptive ones of Baevski and Auli (2019), tied."""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, log_softmax

from attnlab.loss import IGNORED
from attnlab.models.config import TransformerConfig
from attnlab.shapes import Float, Int

__all__ = [
    "IGNORED",
    "AdaptiveEmbedding",
    "AdaptiveHead",
    "Head",
    "LinearHead",
    "MaskedHead",
    "at_least_float32",
    "make_embedding",
    "make_head",
]


class AdaptiveEmbedding(nn.Module):
    """Frequent tokens get wide vectors, rare ones narrow vectors, each band projected to the model's width.

    Tokens are numbered by falling frequency; band i holds those between cutoffs i-1 and i with width m / factor^i.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.edges = (0, *config.cutoffs, config.vocab)
        widths = [config.width // config.adaptive_factor**i for i in range(len(self.edges) - 1)]
        sizes = [hi - lo for lo, hi in pairwise(self.edges)]
        self.bands = nn.ModuleList(nn.Embedding(n, w) for n, w in zip(sizes, widths, strict=True))
        self.projections = nn.ModuleList(nn.Linear(w, config.width, bias=False) for w in widths)
        self.width = config.width

    def forward(self, tokens: Int[Tensor, "b q"]) -> Float[Tensor, "b q m"]:
        out: Tensor | None = None
        for (lo, hi), band, project in zip(pairwise(self.edges), self.bands, self.projections, strict=True):
            inside = (tokens >= lo) & (tokens < hi)
            vectors = project(band((tokens - lo).clamp(0, hi - lo - 1))) * inside[..., None]
            out = vectors if out is None else out + vectors
        assert out is not None
        return out


@runtime_checkable
class Head(Protocol):
    """From hidden states to logits; ``nll`` is -log p of given tokens, without all logits where that is possible."""

    def __call__(self, hidden: Float[Tensor, "*n m"]) -> Float[Tensor, "*n v"]:
        """The logits."""
        ...

    def nll(self, hidden: Float[Tensor, "n m"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """-log p(label), zero where the label is -100."""
        ...


class LinearHead(nn.Module):
    """One matrix; with ``tied`` it is the embedding's, which then belongs to the embedding."""

    def __init__(self, config: TransformerConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        # In a tuple, so that the embedding is no submodule of the head and is saved once.
        self._tied = (embedding,) if config.tied else None
        self.matrix = None if config.tied else nn.Linear(config.width, config.vocab, bias=False)
        self.bias: nn.Parameter | None = None

    def forward(self, hidden: Float[Tensor, "*n m"]) -> Float[Tensor, "*n v"]:
        if self._tied is not None:
            return linear(hidden, self._tied[0].weight, self.bias)
        assert self.matrix is not None
        return linear(hidden, self.matrix.weight, self.bias)

    def nll(self, hidden: Float[Tensor, "n m"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """-log p(label), zero where the label is -100."""
        return cross_entropy(at_least_float32(self(hidden)), labels, ignore_index=IGNORED, reduction="none")


class MaskedHead(LinearHead):
    """RoBERTa's: norm(gelu(dense(h))) before the matrix, and a bias for each token."""

    def __init__(self, config: TransformerConfig, embedding: nn.Embedding) -> None:
        super().__init__(config, embedding)
        self.dense = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab))

    def forward(self, hidden: Float[Tensor, "*n m"]) -> Float[Tensor, "*n v"]:
        return super().forward(self.norm(gelu(self.dense(hidden))))


class AdaptiveHead(nn.Module):
    """Adaptive softmax (Grave et al., 2017): p(w) = p(band) p(w | band), with the first band's words beside the bands.

    Word vectors and projections are the embedding's own; only the vectors of the bands belong to the head.
    """

    def __init__(self, config: TransformerConfig, embedding: AdaptiveEmbedding) -> None:
        super().__init__()
        self._tied = (embedding,)
        self.clusters = nn.Linear(config.width, len(config.cutoffs), bias=False)
        self.dropout = nn.Dropout(config.adaptive_dropout)

    def forward(self, hidden: Float[Tensor, "*n m"]) -> Float[Tensor, "*n v"]:
        """log p of every token, which serves as its logit."""
        hidden = self.dropout(hidden)
        first = self._first_band(hidden)
        words = self._first_size
        tails = [first[..., words + i, None] + self._band(hidden, i + 1) for i in range(self.clusters.out_features)]
        return torch.cat([first[..., :words], *tails], dim=-1)

    def nll(self, hidden: Float[Tensor, "n m"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """-log p(label), zero where the label is -100; a rare band is computed only for the tokens that are in it."""
        hidden = self.dropout(hidden)
        first, words = self._first_band(hidden), self._first_size
        edges = self._tied[0].edges
        in_first = labels.clamp(min=0)
        rare = []
        for i, (lo, hi) in enumerate(pairwise(edges[1:])):
            where = ((labels >= lo) & (labels < hi)).nonzero().squeeze(-1)
            in_first = in_first.index_fill(0, where, words + i)
            rare.append((where, lo))
        log_prob = first.gather(-1, in_first[:, None]).squeeze(-1)
        for i, (where, lo) in enumerate(rare):
            inside = self._band(hidden[where], i + 1).gather(-1, (labels[where] - lo)[:, None]).squeeze(-1)
            log_prob = log_prob.index_add(0, where, inside)
        return -log_prob.masked_fill(labels == IGNORED, 0)

    @property
    def _first_size(self) -> int:
        return self._tied[0].edges[1]

    def _first_band(self, hidden: Float[Tensor, "*n m"]) -> Float[Tensor, "*n v"]:
        words = self._tied[0].bands[0].weight
        assert isinstance(words, Tensor)
        scores = torch.cat([linear(hidden, words), self.clusters(hidden)], dim=-1)
        return log_softmax(at_least_float32(scores), dim=-1)

    def _band(self, hidden: Float[Tensor, "*n m"], i: int) -> Float[Tensor, "*n v"]:
        words, project = self._tied[0].bands[i].weight, self._tied[0].projections[i].weight
        assert isinstance(words, Tensor)
        assert isinstance(project, Tensor)
        return log_softmax(at_least_float32(linear(self.dropout(hidden @ project), words)), dim=-1)


def at_least_float32(t: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Half precision widened: a logarithm of a sum over a vocabulary needs more than eight bits."""
    return t.float() if t.element_size() < 4 else t


def make_embedding(config: TransformerConfig) -> nn.Embedding | AdaptiveEmbedding:
    """The token vectors that the config asks for."""
    return AdaptiveEmbedding(config) if config.cutoffs else nn.Embedding(config.vocab, config.width)


def make_head(config: TransformerConfig, embedding: nn.Embedding | AdaptiveEmbedding) -> nn.Module | None:
    """The output layer that the config asks for; None for a model whose hidden states are the output."""
    if config.head == "none":
        return None
    if isinstance(embedding, AdaptiveEmbedding):
        return AdaptiveHead(config, embedding)
    return MaskedHead(config, embedding) if config.head == "mlm" else LinearHead(config, embedding)
