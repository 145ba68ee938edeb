"""A Hugging Face BERT as our transformer, weight by weight, and its loss at a fixed number of places.

Ours can be captured as one graph with padding in it; Hugging Face's cannot, because of how it reads masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attnlab.loss import IGNORED, Loss
from attnlab.models import Transformer, TransformerConfig
from attnlab.models.transformer import Output

__all__ = ["SomeMasked", "from_bert"]


def from_bert(theirs: Any) -> Transformer:
    """The same masked language model; segments other than the first are not supported."""
    config = theirs.config
    ours = Transformer(
        TransformerConfig(
            kind="encoder",
            vocab=config.vocab_size,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            layers=config.num_hidden_layers,
            hidden=config.intermediate_size,
            max_length=config.max_position_embeddings,
            norm="post",
            norm_eps=config.layer_norm_eps,
            embed_norm=True,
            head="mlm",
            dropout=config.hidden_dropout_prob,
        )
    )
    e, head = theirs.bert.embeddings, theirs.cls.predictions
    encoder: Any = ours.encoder
    own_head: Any = ours.head
    with torch.no_grad():
        ours.tokens.weight.copy_(e.word_embeddings.weight)  # type: ignore[operator]
        encoder.positions.weight.copy_(e.position_embeddings.weight + e.token_type_embeddings.weight[:1])
        _copy(encoder.embed_norm, e.LayerNorm)
        for block, layer in zip(encoder.blocks, theirs.bert.encoder.layer, strict=True):
            parts = [getattr(layer.attention.self, name) for name in ("query", "key", "value")]
            block.attention.qkv.weight.copy_(torch.cat([p.weight for p in parts]))
            block.attention.qkv.bias.copy_(torch.cat([p.bias for p in parts]))
            _copy(block.attention.out, layer.attention.output.dense)
            _copy(block.attention_norm, layer.attention.output.LayerNorm)
            _copy(block.widen, layer.intermediate.dense)
            _copy(block.narrow, layer.output.dense)
            _copy(block.feed_norm, layer.output.LayerNorm)
        _copy(own_head.dense, head.transform.dense)
        _copy(own_head.norm, head.transform.LayerNorm)
        own_head.bias.copy_(head.bias)
    return ours.eval()


def _copy(module: Any, theirs: Any) -> None:
    module.weight.copy_(theirs.weight)
    module.bias.copy_(theirs.bias)


@dataclass(frozen=True)
class SomeMasked:
    """-log p(label) at masked positions, of which each row has a fixed number of places, so that shapes are fixed.

    A quarter of a row and 16 more is far above what 15 % masks (seven standard deviations).
    """

    name: str = "masked-lm"

    def __call__(self, model: nn.Module, output: Output, batch: Mapping[str, Any], step: int) -> Loss:
        labels = batch["labels"]
        length = labels.shape[1]
        at = (labels != IGNORED).int().topk(min(length, length // 4 + 16), dim=1).indices
        hidden = output.hidden.gather(1, at[..., None].expand(-1, -1, output.hidden.shape[-1]))
        labels = labels.gather(1, at).flatten()
        assert output.head is not None
        return Loss(output.head.nll(hidden.flatten(0, 1), labels).sum(), (labels != IGNORED).sum())
