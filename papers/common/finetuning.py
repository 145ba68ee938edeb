"""Encoders fine-tuned side by side on one of GLUE's tasks, and their accuracies."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attnlab.loss import Loss
from attnlab.models import Transformer
from attnlab.training import Recipe, Schedule
from attnlab.training.side_by_side import Fitted, fit
from papers.effective.glue import Examples, dev_batches

__all__ = ["Classifier", "Tuning", "accuracy", "predictions", "tune", "tune_seeds"]


@dataclass(frozen=True)
class Tuning:
    """How the encoders are fine-tuned; the same for all of them."""

    batch: int = 32
    length: int = 128
    lr: float = 1e-4
    weight_decay: float = 0.1
    epochs: float = 3.0
    streams: int = 4
    seed: int = 0
    classes: int = 2
    # On a GPU: products of bfloat16. Small batches are faster without the casts.
    half: bool = True
    # None: all epochs, however long they take. Otherwise the learning rate falls to zero in this time.
    seconds: float | None = None


class Classifier(nn.Module):
    """A copy of an encoder with BERT's classification head on the first token, drawn from ``seed``."""

    def __init__(self, encoder: Transformer, *, classes: int, seed: int) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(encoder)
        self.encoder.head = None
        self.encoder.config = replace(encoder.config, head="none")
        width = encoder.config.width
        torch.manual_seed(seed)
        self.pool, self.out = nn.Linear(width, width), nn.Linear(width, classes)
        for layer in (self.pool, self.out):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.dropout = nn.Dropout(encoder.config.dropout)
        self.to(next(encoder.parameters()).device)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The logits of each row."""
        first = self.encoder(input_ids, attention_mask=attention_mask).hidden[:, 0]
        return self.out(self.dropout(self.pool(first).tanh()))


@dataclass(frozen=True)
class Classified:
    """-log p(class)."""

    name: str = "classified"

    def __call__(self, model: nn.Module, output: Tensor, batch: Mapping[str, Any], step: int) -> Loss:
        labels = batch["labels"]
        total = cross_entropy(output.float(), labels, reduction="sum")
        return Loss(total, torch.ones_like(labels).sum())


@dataclass(frozen=True, eq=False)
class Padded:
    """Training batches out of one table of padded rows, of one shape; each epoch has an order of its own."""

    ids: Tensor
    seen: Tensor
    labels: Tensor
    size: int
    seed: int

    def batch(self, step: int) -> dict[str, Tensor]:
        """The global batch of a step."""
        epoch, at = divmod(step, max(1, len(self.ids) // self.size))
        rows = _order(len(self.ids), self.seed, epoch)[at * self.size : (at + 1) * self.size]
        return {"input_ids": self.ids[rows], "attention_mask": self.seen[rows], "labels": self.labels[rows]}


@lru_cache(maxsize=8)
def _order(n: int, seed: int, epoch: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(n))


def _padded(examples: Examples, *, width: int, size: int, seed: int) -> Padded:
    rows = examples.batch(range(len(examples)), length=width, segments=False, classes=2)
    return Padded(rows["input_ids"], rows["attention_mask"].bool(), rows["labels"], size, seed)


def tune(
    encoders: Mapping[str, Transformer], examples: Mapping[str, Examples], tuning: Tuning
) -> tuple[Fitted, dict[str, dict[str, Tensor]]]:
    """A classifier on each encoder learns ``examples["train"]``.

    Returns how that went, and {name: {split: predicted classes}} of the other splits.
    """
    fitted, models, width = _tuned(encoders, examples, tuning, seeds=(tuning.seed,))
    others = {split: some for split, some in examples.items() if split != "train"}
    return fitted, {
        name: {split: predictions(model, some, length=width) for split, some in others.items()}
        for (name, _), model in models.items()
    }


def tune_seeds(
    encoders: Mapping[str, Transformer],
    examples: Mapping[str, Examples],
    tuning: Tuning,
    *,
    seeds: Sequence[int],
) -> tuple[Fitted, dict[tuple[str, int], float]]:
    """Classifiers on each encoder, one for each seed, learn ``examples["train"]`` side by side.

    Returns how that went, and the accuracy on "dev" of each (encoder, seed).
    """
    fitted, models, width = _tuned(encoders, examples, tuning, seeds=seeds)
    return fitted, {key: accuracy(model, examples["dev"], length=width) for key, model in models.items()}


def _tuned(
    encoders: Mapping[str, Transformer], examples: Mapping[str, Examples], tuning: Tuning, *, seeds: Sequence[int]
) -> tuple[Fitted, dict[tuple[str, int], Classifier], int]:
    """(how the training went, the classifier of each encoder and seed, the tokens of a row)."""
    longest = max(len(ids) for some in examples.values() for ids in some.ids)
    width = min(tuning.length, -(-longest // 64) * 64)
    first = _padded(examples["train"], width=width, size=tuning.batch, seed=0)
    sources = {seed: replace(first, seed=seed) for seed in seeds}
    steps = max(1, round(tuning.epochs * max(1, len(examples["train"]) // tuning.batch)))
    made = {
        (name, seed): Classifier(encoder, classes=tuning.classes, seed=seed)
        for seed in seeds
        for name, encoder in encoders.items()
    }
    models = {f"{name}/{seed}": model for (name, seed), model in made.items()}
    fitted = fit(
        models,
        {f"{name}/{seed}": sources[seed] for name, seed in made},
        term=Classified(),
        recipe=Recipe(lr=tuning.lr, betas=(0.9, 0.98), weight_decay=tuning.weight_decay),
        schedule=Schedule("linear", warmup=max(1, round(0.06 * steps))),
        steps=steps,
        seconds=tuning.seconds,
        streams=min(tuning.streams, len(models)),
        half=tuning.half,
        # A limit of time needs the speed early.
        every=20,
    )
    return fitted, made, width


def accuracy(model: Classifier, examples: Examples, *, length: int) -> float:
    """The share of examples whose class the model predicts."""
    right = predictions(model, examples, length=length) == torch.tensor(examples.labels)
    return float(right.double().mean())


@torch.no_grad()
def predictions(model: Classifier, examples: Examples, *, length: int) -> Tensor:
    """The class that the model predicts for each example, on the CPU."""
    device = next(model.parameters()).device
    batches = dev_batches(examples, size=512, length=length, segments=False, classes=2, device=device)
    rows = [model(batch["input_ids"], batch["attention_mask"].bool()).argmax(-1).cpu() for _, batch in batches]
    return torch.cat(rows)
