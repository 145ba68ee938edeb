"""How well a model predicts a text, with whatever attention it has at the moment."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnlab.adapters import LoadedModel
from attnlab.evaluation.windows import IGNORED, Windows, batches

__all__ = ["model_inputs", "quality"]


@torch.no_grad()
def quality(loaded: LoadedModel, windows: Windows, *, batch: int) -> dict[str, Any] | None:
    """Perplexity of the next token, or the share of masked tokens predicted wrongly; None without such a head."""
    if loaded.task not in ("mlm", "causal"):
        return None
    loss, wrong, count = 0.0, 0, 0
    for part in batches(windows, size=batch):
        labels = part["labels"]
        logits = loaded.model(**model_inputs(loaded, part)).logits
        if loaded.task == "causal":
            logits, labels = logits[:, :-1], labels[:, 1:]
        chosen = labels != IGNORED
        logits, labels = logits[chosen].double(), labels[chosen]
        loss += float(cross_entropy(logits, labels, reduction="sum"))
        wrong += int((logits.argmax(-1) != labels).sum())
        count += len(labels)
    if count == 0:
        return None
    mean = loss / count
    if loaded.task == "mlm":
        return {"name": "mlm_error", "value": wrong / count, "loss": mean, "predicted": count}
    return {"name": "perplexity", "value": math.exp(min(mean, 700.0)), "loss": mean, "predicted": count}


def model_inputs(loaded: LoadedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model's ``forward`` takes of a batch of windows."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if loaded.task == "seq2seq":
        # With no translation at hand, the decoder is read on the same text.
        inputs |= {"decoder_input_ids": batch["input_ids"], "decoder_attention_mask": batch["attention_mask"]}
    return inputs
