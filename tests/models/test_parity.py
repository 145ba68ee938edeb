"""The same weights in Hugging Face's models and in ours give the same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from attnlab.models import Transformer, TransformerConfig
from tests.models.small import some_tokens


def put(module: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    with torch.no_grad():
        module.weight.copy_(weight)
        if bias is not None:
            module.bias.copy_(bias)


def same(module: nn.Module, theirs: nn.Module) -> None:
    put(module, theirs.weight, theirs.bias)


def shaken(model: nn.Module) -> nn.Module:
    """Biases and norms away from 0 and 1, so that a forgotten one shows."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model.eval()


def assert_same_logits(ours: nn.Module, theirs: nn.Module, tokens: torch.Tensor, mask: torch.Tensor) -> None:
    """At the positions that the mask shows."""
    logits, expected = (model(tokens, attention_mask=mask).logits[mask.bool()] for model in (ours, theirs))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def copy_bert_layers(ours: Transformer, layers: Any) -> None:
    for block, theirs in zip(ours.encoder.blocks, layers, strict=True):
        self = theirs.attention.self
        parts = (self.query, self.key, self.value)
        put(block.attention.qkv, torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts]))
        same(block.attention.out, theirs.attention.output.dense)
        same(block.attention_norm, theirs.attention.output.LayerNorm)
        same(block.widen, theirs.intermediate.dense)
        same(block.narrow, theirs.output.dense)
        same(block.feed_norm, theirs.output.LayerNorm)


SIZES = {
    "vocab_size": 101,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "type_vocab_size": 1,
    "attn_implementation": "eager",
}
OURS: dict[str, Any] = {
    "kind": "encoder",
    "vocab": 101,
    "width": 24,
    "heads": 4,
    "layers": 3,
    "hidden": 37,
    "max_length": 17,
    "norm": "post",
    "embed_norm": True,
    "head": "mlm",
}


@pytest.mark.parametrize("side", ["none", "right"])
def test_bert(side: str) -> None:
    from transformers import BertConfig, BertForMaskedLM

    theirs = shaken(BertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=17)))
    ours = Transformer(TransformerConfig(**OURS, norm_eps=1e-12)).eval()
    e, head = theirs.bert.embeddings, theirs.cls.predictions
    put(ours.tokens, e.word_embeddings.weight)
    put(ours.encoder.positions, e.position_embeddings.weight + e.token_type_embeddings.weight)
    same(ours.encoder.embed_norm, e.LayerNorm)
    copy_bert_layers(ours, theirs.bert.encoder.layer)
    same(ours.head.dense, head.transform.dense)
    same(ours.head.norm, head.transform.LayerNorm)
    ours.head.bias.data.copy_(head.bias)
    tokens, mask = some_tokens(2, 11, 101), torch.ones(2, 11, dtype=torch.long)
    if side == "right":
        mask[1, 7:] = 0
    assert_same_logits(ours, theirs, tokens, mask)


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_roberta(side: str) -> None:
    from transformers import RobertaConfig, RobertaForMaskedLM

    theirs = shaken(
        RobertaForMaskedLM(RobertaConfig(**SIZES, max_position_embeddings=19, pad_token_id=1, layer_norm_eps=1e-5))
    )
    ours = Transformer(TransformerConfig(**OURS)).eval()
    e = theirs.roberta.embeddings
    put(ours.tokens, e.word_embeddings.weight)
    # Their first two positions stand for padding.
    put(ours.encoder.positions, e.position_embeddings.weight[2:] + e.token_type_embeddings.weight)
    same(ours.encoder.embed_norm, e.LayerNorm)
    copy_bert_layers(ours, theirs.roberta.encoder.layer)
    same(ours.head.dense, theirs.lm_head.dense)
    same(ours.head.norm, theirs.lm_head.layer_norm)
    ours.head.bias.data.copy_(theirs.lm_head.decoder.bias)
    tokens, mask = some_tokens(2, 11, 99) + 2, torch.ones(2, 11, dtype=torch.long)
    hidden = {"none": slice(0, 0), "left": slice(0, 4), "right": slice(7, 11)}[side]
    tokens[1, hidden], mask[1, hidden] = 1, 0
    assert_same_logits(ours, theirs, tokens, mask)


def test_gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {"vocab_size": 101, "n_positions": 17, "n_embd": 24, "n_layer": 3, "n_head": 4, "bos_token_id": 0}
    theirs = shaken(GPT2LMHeadModel(GPT2Config(**settings, eos_token_id=0)))
    sizes = {name: value for name, value in OURS.items() if name in ("vocab", "width", "heads", "layers", "max_length")}
    ours = Transformer(TransformerConfig(kind="decoder", **sizes, activation="gelu-tanh")).eval()
    put(ours.tokens, theirs.transformer.wte.weight)
    put(ours.decoder.positions, theirs.transformer.wpe.weight)
    same(ours.decoder.norm, theirs.transformer.ln_f)
    for block, layer in zip(ours.decoder.blocks, theirs.transformer.h, strict=True):
        # Their Conv1D is the transpose of a linear map.
        put(block.attention.qkv, layer.attn.c_attn.weight.T, layer.attn.c_attn.bias)
        put(block.attention.out, layer.attn.c_proj.weight.T, layer.attn.c_proj.bias)
        put(block.widen, layer.mlp.c_fc.weight.T, layer.mlp.c_fc.bias)
        put(block.narrow, layer.mlp.c_proj.weight.T, layer.mlp.c_proj.bias)
        same(block.attention_norm, layer.ln_1)
        same(block.feed_norm, layer.ln_2)
    tokens = some_tokens(2, 11, 101)
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-5)
