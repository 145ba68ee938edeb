"""Tiny models with random weights, one per family, whose sizes are small and distinct."""

from __future__ import annotations

import torch
import transformers as tf
from torch import Tensor

VOCABULARY, PAD, BOS, EOS = 61, 0, 1, 2
SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
LLAMA = dict(
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=37,
    max_position_embeddings=64,
    **SPECIAL,
)
GROUPED = dict(LLAMA, num_key_value_heads=2)
BART = dict(
    d_model=24,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=3,
    decoder_attention_heads=4,
    encoder_ffn_dim=37,
    decoder_ffn_dim=31,
    max_position_embeddings=64,
    decoder_start_token_id=EOS,
    forced_eos_token_id=None,
    **SPECIAL,
)

ENCODERS = {
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**LLAMA)),
    "roberta": lambda: tf.RobertaForMaskedLM(tf.RobertaConfig(**LLAMA)),
    "electra": lambda: tf.ElectraForMaskedLM(tf.ElectraConfig(embedding_size=16, **LLAMA)),
    "distilbert": lambda: tf.DistilBertForMaskedLM(
        tf.DistilBertConfig(dim=24, n_layers=3, n_heads=4, hidden_dim=37, max_position_embeddings=64, **SPECIAL)
    ),
    # Window 6 // 2 = 3 on each side in two layers of three.
    "modernbert": lambda: tf.ModernBertForMaskedLM(
        tf.ModernBertConfig(local_attention=6, global_attn_every_n_layers=3, **LLAMA)
    ),
}
DECODERS = {
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=24, n_layer=3, n_head=4, n_positions=64, **SPECIAL)),
    "gpt_neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**LLAMA)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(sliding_window=5, **GROUPED)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(head_dim=10, **GROUPED)),
    "gemma3": lambda: tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(
            head_dim=10,
            sliding_window=5,
            query_pre_attn_scalar=7,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            **GROUPED,
        )
    ),
}
SEQ2SEQ = {
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(
            d_model=24,
            d_kv=7,
            num_heads=3,
            num_layers=3,
            num_decoder_layers=2,
            d_ff=37,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=13,
            decoder_start_token_id=PAD,
            **SPECIAL,
        )
    ),
    "bart": lambda: tf.BartForConditionalGeneration(tf.BartConfig(**BART)),
    "marian": lambda: tf.MarianMTModel(tf.MarianConfig(decoder_vocab_size=VOCABULARY, **BART)),
}
ALL = {**ENCODERS, **DECODERS, **SEQ2SEQ}


def build(name: str, *, implementation: str = "sdpa") -> tf.PreTrainedModel:
    """A model of the family in evaluation mode, with weights large enough for attention to matter."""
    torch.manual_seed(7)
    model = ALL[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Fixed position tables are no weights.
            if parameter.dim() == 2 and parameter.requires_grad:
                parameter.normal_(std=0.3)
    set_implementation(model, implementation)
    return model


def set_implementation(model: tf.PreTrainedModel, name: str) -> None:
    """``model.set_attn_implementation``, which in transformers 5.17 does not reach the configs of T5's two stacks."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = name


def inputs(model: tf.PreTrainedModel, mask: Tensor | None = None, *, length: int = 11) -> dict[str, Tensor]:
    """Three sentences without special tokens; an encoder-decoder also gets seven target tokens."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, VOCABULARY, (3, length), generator=generator)
    given = {"input_ids": ids}
    if mask is not None:
        given["attention_mask"] = mask
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.randint(3, VOCABULARY, (3, 7), generator=generator)
    return given


def padding(kind: str, length: int = 11) -> Tensor | None:
    """A 0/1 mask of three rows: padded on the left, on the right, or each row in its own way."""
    if kind == "none":
        return None
    mask = torch.ones(3, length, dtype=torch.long)
    if kind in ("left", "mixed"):
        mask[0, :4] = 0
    if kind in ("right", "mixed"):
        mask[1, 8:] = 0
    if kind == "left":
        mask[1, :2] = 0
    if kind == "mixed":
        mask[2, :1] = mask[2, -2:] = 0
    return mask


def real_logits(model: tf.PreTrainedModel, given: dict[str, Tensor]) -> Tensor:
    """Logits at positions that are no padding: (positions, vocabulary)."""
    with torch.no_grad():
        logits = model(**given).logits
    if model.config.is_encoder_decoder or "attention_mask" not in given:
        return logits.flatten(0, 1)
    return logits[given["attention_mask"].bool()]
