"""Loss terms of the models: each is called as term(model, output, batch, step) and returns (total, count)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from attnlab.loss import Loss
from attnlab.models.transformer import Output
from attnlab.models.vocabulary import IGNORED, at_least_float32
from attnlab.shapes import Float, Int

__all__ = ["CausalLM", "Loss", "MaskedLM", "Translation", "token_loss"]


def token_loss(logits: Float[Tensor, "*n v"], labels: Int[Tensor, "*n"], *, label_smoothing: float = 0.0) -> Loss:
    """-sum_v t(v) log p(v) over the labels other than -100, with t = (1 - eps) [v = label] + eps / |V|.

    >>> token_loss(torch.zeros(2, 4), torch.tensor([3, -100])).count.item()
    1
    """
    flat = at_least_float32(logits.flatten(0, -2))
    total = cross_entropy(
        flat, labels.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing
    )
    return Loss(total, (labels != IGNORED).sum())


@dataclass(frozen=True)
class CausalLM:
    """-log p(the next token). ``labels`` are not shifted, as with Hugging Face; without them ``input_ids`` serve.

    Labels of -100 and padding are not predicted. Works with the adaptive softmax without ever making all logits.
    """

    name: str = "causal-lm"

    def __call__(self, model: nn.Module, output: Output, batch: Mapping[str, Any], step: int) -> Loss:
        labels = _next_tokens(batch)
        nll = _head(output).nll(output.hidden.flatten(0, 1), labels.flatten())
        return Loss(nll.sum(), (labels != IGNORED).sum())

    def count(self, batch: Mapping[str, Any], step: int) -> Tensor:
        """The number of predicted tokens."""
        return (_next_tokens(batch) != IGNORED).sum()


@dataclass(frozen=True)
class MaskedLM:
    """-log p(the label) at positions whose label is not -100; the vocabulary is scored at those positions only."""

    name: str = "masked-lm"

    def __call__(self, model: nn.Module, output: Output, batch: Mapping[str, Any], step: int) -> Loss:
        labels, hidden, head = batch["labels"].flatten(), output.hidden.flatten(0, 1), _head(output)
        # A graph has fixed shapes, so under torch.compile all positions are scored, to the same sum.
        if not torch.compiler.is_compiling():
            chosen = (labels != IGNORED).nonzero().squeeze(-1)
            labels, hidden = labels[chosen], hidden[chosen]
        return Loss(head.nll(hidden, labels).sum(), (labels != IGNORED).sum())

    def count(self, batch: Mapping[str, Any], step: int) -> Tensor:
        """The number of predicted tokens."""
        return (batch["labels"] != IGNORED).sum()


@dataclass(frozen=True)
class Translation:
    """-log p(label) with label smoothing; ``labels[t]`` is the token after ``decoder_input_ids[t]``.

    The smoothed loss is no likelihood: for perplexity, evaluate with ``label_smoothing=0``.
    """

    name: str = "translation"
    label_smoothing: float = 0.1

    def __call__(self, model: nn.Module, output: Output, batch: Mapping[str, Any], step: int) -> Loss:
        return token_loss(output.logits, batch["labels"], label_smoothing=self.label_smoothing)

    def count(self, batch: Mapping[str, Any], step: int) -> Tensor:
        """The number of predicted tokens."""
        return (batch["labels"] != IGNORED).sum()


def _next_tokens(batch: Mapping[str, Any]) -> Int[Tensor, "b q"]:
    """The label of each position: its next token, and none at the last, which keeps the shapes of the inputs."""
    labels = batch["labels"] if "labels" in batch else batch["input_ids"]
    mask = batch.get("attention_mask")
    if mask is None:
        return pad(labels[:, 1:], (0, 1), value=IGNORED)
    # A pair counts only where both of its tokens are there: left padding predicts nothing either.
    both = mask[:, 1:].bool() & mask[:, :-1].bool()
    return pad(labels[:, 1:].masked_fill(~both, IGNORED), (0, 1), value=IGNORED)


def _head(output: Output) -> Any:
    if output.head is None:
        raise ValueError("this model has head='none' and so no tokens to predict; give it head='linear' or 'mlm'")
    return output.head
