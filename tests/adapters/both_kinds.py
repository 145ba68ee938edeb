"""Models of both kinds, Hugging Face's and those of attnlab.models, with batches that each of them takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

import attnlab as al
from attnlab.adapters import adapter_of
from attnlab.models import Transformer, TransformerConfig, load_transformer, save_transformer
from tests.adapters.test_load import write_tokenizer
from tests.adapters.zoo import VOCABULARY, build, inputs, padding

__all__ = ["DECODERS", "FAMILIES", "Family", "batch", "first_kind", "logits", "ours", "tokens_of"]

# Large enough for attention to matter.
STD = 0.3


def ours(kind: str) -> Transformer:
    """A transformer of this package with the vocabulary of the zoo."""
    torch.manual_seed(3)
    config = TransformerConfig(kind=kind, vocab=VOCABULARY, width=24, heads=4, layers=3, hidden=37, max_length=64)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=STD)
    return model


def save_and_load_hf(model: tf.PreTrainedModel, folder: Path) -> nn.Module:
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return al.load_model(folder).model


def save_and_load_ours(model: Transformer, folder: Path) -> nn.Module:
    return load_transformer(save_transformer(model, folder))


@dataclass(frozen=True)
class Family:
    """How a kind of model is made, and how it goes through files."""

    make: Callable[[], Any]
    save_and_load: Callable[[Any, Path], nn.Module]


FAMILIES = {
    "bert": Family(lambda: build("bert"), save_and_load_hf),
    "llama": Family(lambda: build("llama"), save_and_load_hf),
    "bart": Family(lambda: build("bart"), save_and_load_hf),
    "our encoder": Family(lambda: ours("encoder"), save_and_load_ours),
    "our decoder": Family(lambda: ours("decoder"), save_and_load_ours),
    "our encoder-decoder": Family(lambda: ours("encoder-decoder"), save_and_load_ours),
}
DECODERS = ("llama", "our decoder")


def batch(model: Any, kind: str = "right") -> dict[str, Tensor]:
    if not isinstance(model, Transformer):
        return inputs(model, padding(kind))
    tokens = torch.randint(3, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(11))
    texts = {"input_ids": tokens} | ({} if kind == "none" else {"attention_mask": padding(kind)})
    return texts | ({"decoder_input_ids": tokens[:, :7]} if model.config.kind == "encoder-decoder" else {})


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**batch(model)).logits


def first_kind(model: nn.Module) -> str:
    return adapter_of(model).sites()[0].kind


def tokens_of(length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(5))
