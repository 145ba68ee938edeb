"""Models small enough to check by enumeration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.models import Transformer, TransformerConfig

BASE = TransformerConfig(kind="encoder", vocab=13, width=12, heads=3, layers=2, max_length=31)


def make(kind: str, **fields: Any) -> Transformer:
    """A float64 model in evaluation mode, with weights large enough that its logits differ."""
    torch.manual_seed(1)
    model = Transformer(replace(BASE, kind=kind, **fields)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return model


def some_tokens(batch: int, length: int, vocab: int = 13) -> Tensor:
    return torch.randint(0, vocab, (batch, length))
