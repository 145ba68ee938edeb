"""alpha, beta and Delta of the recurrent models on a set of examples, as rows that ``attnlab.dynamics`` compares.

A classification has a row for each example, a translation one for each target token. beta is read as a logarithm or
log-odds: the same order without saturating, since equal values would count as agreement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from attnlab.adapters import record
from attnlab.data import IGNORED, LabelledSource, ParallelSource
from attnlab.dynamics import gradient_saliency, lexical_probe, proxy_probe
from attnlab.dynamics.proxy import BagOfWords, LogisticProxy
from attnlab.shapes import Float, Int
from papers.ktiw.corpora import Corpus
from papers.ktiw.models.lstm import Classifier, Translator

__all__ = ["Examples", "Reading", "as_read", "examples", "proxy_rows", "read", "saliency"]

PAD, BOS, EOS = 0, 2, 3


@dataclass(frozen=True, eq=False)
class Examples:
    """Batches on a device, in the order of their rows, and each row's number of source positions."""

    kind: str
    batches: list[dict[str, Tensor]]
    lengths: Int[Tensor, " rows"]

    @property
    def width(self) -> int:
        """The longest row."""
        return int(self.lengths.max())


@dataclass(frozen=True, eq=False)
class Reading:
    """What a model does on examples: attention, the logarithm of its probe, its accuracy and loss in nats a target."""

    alpha: Float[Tensor, "rows k"]
    beta: Float[Tensor, "rows k"]
    accuracy: float
    loss: float


def as_read(corpus: Corpus, split: str) -> tuple[list[np.ndarray], Any]:
    """(sources, targets) of a split as the models read them: both sides of a translation end with </s>."""
    sources, targets = corpus.split(split)
    if corpus.kind == "classification":
        return sources, targets
    return [np.append(row, EOS) for row in sources], [np.append(row, EOS) for row in targets]


def examples(
    corpus: Corpus, split: str, *, count: int, device: torch.device, batch: int = 64, seed: int = 0
) -> Examples:
    """``count`` examples of a split at random, in batches of like length."""
    sources, targets = corpus.split(split)
    chosen = np.sort(np.random.default_rng(seed).permutation(len(sources))[:count])
    x, y = [sources[i] for i in chosen], [targets[i] for i in chosen]
    feed: Any
    if corpus.kind == "classification":
        feed = LabelledSource(x, [int(label) for label in y], pad=PAD, batch_size=batch, shuffle=False)
    else:
        feed = ParallelSource(x, y, pad=PAD, bos=BOS, eos=EOS, batch_size=batch, shuffle=False)
    batches = [{k: t.to(device) for k, t in feed.batch(i).items()} for i in range(feed.steps_per_epoch)]
    return Examples(corpus.kind, batches, torch.cat([_lengths(b) for b in batches]))


@torch.no_grad()
def read(model: Classifier | Translator, on: Examples) -> Reading:
    """alpha and beta of every row, and how well the model does."""
    alphas, betas = [], []
    right, loss, count = 0.0, 0.0, 0
    for batch in on.batches:
        with record(model) as trace:
            beta, correct, nll = _read_batch(model, batch)
        # Several heads are read as their mean.
        alpha = trace["cross", 0].weights().mean(1)
        alphas.append(alpha[:, 0] if on.kind == "classification" else alpha[batch["labels"] != IGNORED])
        betas.append(beta)
        right, loss, count = right + float(correct.sum()), loss + float(nll), count + correct.numel()
    return Reading(_rows(alphas, on.width), _rows(betas, on.width), 100 * right / count, loss / count)


def _read_batch(model: Classifier | Translator, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    mask, y = batch["attention_mask"], batch["labels"]
    if isinstance(model, Classifier):
        out = model(batch["input_ids"], attention_mask=mask)
        gamma = model.output(out.source.hidden).squeeze(2) * (2 * y - 1).unsqueeze(1)
        nll = binary_cross_entropy_with_logits(out.logits, y.to(out.logits.dtype), reduction="sum")
        return gamma, (out.logits > 0) == (y == 1), nll
    translated = model(batch["input_ids"], decoder_input_ids=batch["decoder_input_ids"], attention_mask=mask)
    beta = lexical_probe(
        model.predict,
        translated.source.hidden,
        translated.states,
        y,
        key_visible=mask.bool(),
        vocabulary=model.config.vocab,
        log=True,
    )
    told = y != IGNORED
    nll = cross_entropy(translated.logits[told], y[told], reduction="sum")
    return beta[told], translated.logits[told].argmax(-1) == y[told], nll


def saliency(model: Classifier | Translator, on: Examples) -> Float[Tensor, "rows k"]:
    """Delta of every row (KTIW, 5.1)."""
    found = []
    with _differentiable(model):
        for batch in on.batches:
            delta = gradient_saliency(partial(_nll, model, batch), model.tokens(batch["input_ids"]))
            found.append(delta if on.kind == "classification" else delta[batch["labels"] != IGNORED])
    return _rows(found, on.width)


@torch.no_grad()
def proxy_rows(proxy: BagOfWords | LogisticProxy, on: Examples) -> Float[Tensor, "rows k"]:
    """beta of the proxy on every row: of the right class or the right word, leaving the bias out."""
    found = []
    for batch in on.batches:
        x = batch["input_ids"]
        if on.kind == "classification":
            if isinstance(proxy, LogisticProxy):
                gamma = proxy.weight.to(x.device)[x].float()
            else:
                difference = proxy.output.weight[1] - proxy.output.weight[0]
                gamma = proxy.embedding.weight[x] @ difference
            found.append(gamma * (2 * batch["labels"] - 1).unsqueeze(1))
            continue
        assert isinstance(proxy, BagOfWords)
        told = batch["labels"] != IGNORED
        seen = x.masked_fill(batch["attention_mask"] == 0, -1)
        beta = proxy_probe(proxy.output.weight, proxy.embedding.weight, seen, batch["labels"].masked_fill(~told, -1))
        found.append(beta[told])
    return _rows(found, on.width)


def _nll(model: Classifier | Translator, batch: dict[str, Tensor], embeddings: Tensor) -> Tensor:
    mask, y = batch["attention_mask"], batch["labels"]
    if isinstance(model, Classifier):
        logits = model.classify(embeddings, attention_mask=mask).logits
        return binary_cross_entropy_with_logits(logits, y.float(), reduction="none")
    source = model.encode(embeddings, attention_mask=mask)
    states, _ = model.decode(batch["decoder_input_ids"], source.state)
    logits = model.predict(model.attention(states, source=source), states)
    return cross_entropy(logits.transpose(1, 2), y, ignore_index=IGNORED, reduction="none")


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """cuDNN differentiates an LSTM in training mode only; without dropout that is evaluation mode."""
    lstms = [m for m in model.modules() if isinstance(m, nn.LSTM)]
    before = [(m.training, m.dropout) for m in lstms]
    try:
        for m in lstms:
            m.training, m.dropout = True, 0.0
        yield
    finally:
        for m, (training, dropout) in zip(lstms, before, strict=True):
            m.training, m.dropout = training, dropout


def _lengths(batch: dict[str, Tensor]) -> Tensor:
    length = batch["attention_mask"].sum(1)
    y = batch["labels"]
    return length if y.ndim == 1 else length.repeat_interleave((y != IGNORED).sum(1))


def _rows(parts: Sequence[Tensor], width: int) -> Tensor:
    """Batches of rows as one; what lies beyond a row's length is never read."""
    out = parts[0].new_zeros(sum(len(part) for part in parts), width)
    at = 0
    for part in parts:
        out[at : at + len(part), : part.shape[1]] = part
        at += len(part)
    return out
