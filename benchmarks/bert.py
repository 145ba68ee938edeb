"""A random BERT and a batch for it, which benchmarks of whole models share."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Sizes = dict[str, int]
# BERT-base with 8 sentences of 128 tokens; tiny is for dry runs.
SIZES: dict[str, Sizes] = {
    "full": {"layers": 12, "heads": 12, "width": 768, "inner": 3072, "batch": 8, "length": 128},
    "tiny": {"layers": 2, "heads": 2, "width": 16, "inner": 32, "batch": 2, "length": 24},
}
VOCAB = 1000


def bert(size: Sizes, device: str, attention: Literal["eager", "sdpa"]) -> nn.Module:
    """The model, ready to evaluate."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=size["width"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        intermediate_size=size["inner"],
        vocab_size=VOCAB,
        attn_implementation=attention,
    )
    return BertModel(config, add_pooling_layer=False).eval().to(device)


def batch_for(size: Sizes, device: str, *, shortest: int | None = None) -> dict[str, Tensor]:
    """Random tokens; with ``shortest``, padded from lengths between that and all of it."""
    batch, length = size["batch"], size["length"]
    batch_tensors = {"input_ids": torch.randint(0, VOCAB, (batch, length), device=device)}
    if shortest is not None:
        kept = torch.linspace(shortest, length, batch, device=device)
        batch_tensors["attention_mask"] = (torch.arange(length, device=device) < kept[:, None]).long()
    return batch_tensors
