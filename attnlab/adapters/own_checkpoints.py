"""Folders of our own models as ``load_model`` reads them: config.json of model type "attnlab", weights, a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch

from attnlab.adapters.tokenizer_files import quiet_transformers
from attnlab.data.plain_tokenizer import PlainTokenizer
from attnlab.data.tokenisers import load_tokeniser
from attnlab.models import Transformer, TransformerConfig, load_transformer
from attnlab.models.saving import CONFIG, MODEL_TYPE

__all__ = ["Task", "is_own_checkpoint", "load_own_checkpoint", "own_max_length", "own_task"]

Task = Literal["mlm", "causal", "seq2seq", "encoder"]
# By these an own config is known that was written before it named its model type.
OWN_FIELDS = {"kind", "vocab", "width", "heads", "layers"}


def is_own_checkpoint(folder: Path) -> bool:
    """Whether ``save_transformer`` wrote the model in this folder."""
    if not (folder / CONFIG).is_file():
        return False
    values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        return False
    return values.get("model_type") == MODEL_TYPE or ("model_type" not in values and values.keys() >= OWN_FIELDS)


def load_own_checkpoint(folder: Path, *, dtype: torch.dtype | None) -> tuple[Transformer, Any, Task]:
    """(the model with the mechanisms that its config names, its tokenizer, its task)."""
    model = load_transformer(folder, dtype=dtype)
    tokenizer = _tokenizer(folder)
    if len(tokenizer) > model.config.vocab:
        raise ValueError(
            f"{folder}: its tokenizer has {len(tokenizer)} tokens, and its model reads {model.config.vocab}; they do "
            "not belong together"
        )
    return model, tokenizer, own_task(model.config)


def own_task(config: TransformerConfig) -> Task:
    """What a transformer of this config predicts: masked, next or target tokens, or none."""
    if config.head == "none":
        return "encoder"
    tasks: dict[str, Task] = {"encoder": "mlm", "decoder": "causal", "encoder-decoder": "seq2seq"}
    return tasks[config.kind]


def own_max_length(config: TransformerConfig) -> int | None:
    """How many positions were learned; None where they are computed."""
    return config.max_length if config.positions == "learned" else None


def _tokenizer(folder: Path) -> Any:
    if not (folder / "tokenizer.json").is_file():
        return PlainTokenizer(load_tokeniser(folder))
    from transformers import PreTrainedTokenizerFast

    # transformers would warn that it knows no model type "attnlab", which its tokenizers need not know.
    with quiet_transformers(errors_only=True):
        return PreTrainedTokenizerFast.from_pretrained(folder)
