"""Encoders fine-tuned side by side on one of GLUE's tasks, and how often each is right afterwards."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from attnlab.experiments.effective_glue import Examples, GlueSource, dev_batches
from attnlab.experiments.together import Fitted, fit
from attnlab.loss import Loss
from attnlab.models import Transformer
from attnlab.training import Recipe, Schedule

__all__ = ["Classifier", "Tuning", "accuracy", "tune"]


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


@dataclass(frozen=True)
class Wide:
    """Batches as wide as a multiple of 64, so that there are few shapes."""

    source: GlueSource

    def batch(self, step: int) -> dict[str, Tensor]:
        """The source's batch with more padding."""
        batch = self.source.batch(step)
        width = min(self.source.length, -(-batch["input_ids"].shape[1] // 64) * 64)
        room = width - batch["input_ids"].shape[1]
        wide = {name: pad(t, (0, room)) for name, t in batch.items() if name != "labels"}
        return wide | {"attention_mask": wide["attention_mask"].bool(), "labels": batch["labels"]}


def tune(
    encoders: Mapping[str, Transformer], examples: Mapping[str, Examples], tuning: Tuning
) -> tuple[Fitted, dict[str, float]]:
    """A classifier on each encoder learns ``examples["train"]``: how that went, and its accuracy on "dev"."""
    source = Wide(GlueSource(examples["train"], tuning.batch, tuning.length, False, 2, tuning.seed))
    steps = max(1, round(tuning.epochs * source.source.steps_per_epoch))
    models = {name: Classifier(encoder, classes=2, seed=tuning.seed) for name, encoder in encoders.items()}
    found = fit(
        models,
        source,
        term=Classified(),
        recipe=Recipe(lr=tuning.lr, betas=(0.9, 0.98), weight_decay=tuning.weight_decay),
        schedule=Schedule("linear", warmup=max(1, round(0.06 * steps))),
        steps=steps,
        streams=min(tuning.streams, len(models)),
    )
    return found, {name: accuracy(model, examples["dev"], length=tuning.length) for name, model in models.items()}


@torch.no_grad()
def accuracy(model: Classifier, examples: Examples, *, length: int) -> float:
    """The share of examples whose class the model finds."""
    device = next(model.parameters()).device
    right = 0
    for _, batch in dev_batches(examples, size=64, length=length, segments=False, classes=2, device=device):
        said = model(batch["input_ids"], batch["attention_mask"].bool()).argmax(-1)
        right += int((said == batch["labels"]).sum())
    return right / len(examples)
