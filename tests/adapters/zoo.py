"""Tiny models with random weights, one per family, whose sizes are small and distinct."""

from __future__ import annotations

import warnings

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
GPT2 = dict(n_embd=24, n_layer=3, n_head=4, n_positions=64, **SPECIAL)
WIDE = dict(GROUPED, head_dim=10)
# Two of three layers see the last five tokens only.
SLIDING_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
RELATIVE = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 13, "decoder_start_token_id": PAD}
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
# Further families: other ways to hide keys, to make scores, to share modules, and to attend outside of the interface.
MORE_ENCODERS = {
    "albert": lambda: tf.AlbertForMaskedLM(tf.AlbertConfig(embedding_size=16, **LLAMA)),
    "esm": lambda: tf.EsmForMaskedLM(tf.EsmConfig(mask_token_id=3, **LLAMA)),
    "mpnet": lambda: tf.MPNetForMaskedLM(tf.MPNetConfig(**LLAMA)),
    "deberta": lambda: tf.DebertaForMaskedLM(
        tf.DebertaConfig(relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=7, **LLAMA)
    ),
    "megatron_bert": lambda: tf.MegatronBertForMaskedLM(tf.MegatronBertConfig(**LLAMA)),
    "roformer": lambda: tf.RoFormerForMaskedLM(tf.RoFormerConfig(rotary_value=True, **LLAMA)),
    "deberta_v2": lambda: tf.DebertaV2ForMaskedLM(
        tf.DebertaV2Config(relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4, **LLAMA)
    ),
}
MORE_DECODERS = {
    "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(ffn_dim=31, word_embed_proj_dim=24, **LLAMA)),
    "gpt_bigcode": lambda: tf.GPTBigCodeForCausalLM(tf.GPTBigCodeConfig(**GPT2)),
    "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(attention_multiplier=0.3, **GROUPED)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(sliding_window=5, **GROUPED)),
    "cohere2": lambda: tf.Cohere2ForCausalLM(
        tf.Cohere2Config(sliding_window=5, layer_types=SLIDING_TYPES, logit_scale=1.0, **GROUPED)
    ),
    # Chunks of four tokens in two layers of three.
    "llama4": lambda: tf.Llama4ForCausalLM(
        tf.Llama4TextConfig(
            attention_chunk_size=4, num_local_experts=2, intermediate_size_mlp=31, no_rope_layers=[1, 1, 0], **WIDE
        )
    ),
    "modernbert_decoder": lambda: tf.ModernBertDecoderForCausalLM(
        tf.ModernBertDecoderConfig(local_attention=6, global_attn_every_n_layers=3, **LLAMA)
    ),
    # Values are narrower than keys.
    "deepseek_v3": lambda: tf.DeepseekV3ForCausalLM(
        tf.DeepseekV3Config(
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=6,
            v_head_dim=5,
            first_k_dense_replace=3,
            **dict(LLAMA, num_key_value_heads=4),
        )
    ),
    # A stack of layers runs several times, each time with keys of its own.
    "hrm_text": lambda: tf.HrmTextForCausalLM(tf.HrmTextConfig(**LLAMA)),
    "gptj": lambda: tf.GPTJForCausalLM(tf.GPTJConfig(rotary_dim=4, **GPT2)),
    "gpt_neo": lambda: tf.GPTNeoForCausalLM(
        tf.GPTNeoConfig(
            hidden_size=24,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=4,
            intermediate_size=31,
            max_position_embeddings=64,
            **SPECIAL,
        )
    ),
    "falcon": lambda: tf.FalconForCausalLM(tf.FalconConfig(**LLAMA)),
    "falcon_alibi": lambda: tf.FalconForCausalLM(tf.FalconConfig(alibi=True, **LLAMA)),
    "codegen": lambda: tf.CodeGenForCausalLM(tf.CodeGenConfig(rotary_dim=4, **GPT2)),
    "gpt_neox_japanese": lambda: tf.GPTNeoXJapaneseForCausalLM(tf.GPTNeoXJapaneseConfig(**LLAMA)),
    "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(hidden_size=24, n_layer=3, n_head=4, **SPECIAL)),
    "mpt": lambda: tf.MptForCausalLM(tf.MptConfig(d_model=24, n_heads=4, n_layers=3, max_seq_len=64, **SPECIAL)),
    # A mask of values that it makes itself; its modules do not say that they are causal.
    "doge": lambda: tf.DogeForCausalLM(tf.DogeConfig(**GROUPED)),
    # Two calls in each layer, whose difference counts.
    "diffllama": lambda: tf.DiffLlamaForCausalLM(tf.DiffLlamaConfig(**GROUPED)),
    "lfm2": lambda: tf.Lfm2ForCausalLM(tf.Lfm2Config(layer_types=["conv", "full_attention", "conv"], **GROUPED)),
    "xglm": lambda: tf.XGLMForCausalLM(
        tf.XGLMConfig(d_model=24, num_layers=3, attention_heads=4, ffn_dim=37, max_position_embeddings=64, **SPECIAL)
    ),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(sliding_window=5, attn_logit_softcapping=2.0, layer_types=SLIDING_TYPES, **WIDE)
    ),
    # Widths that its experts can multiply.
    "gpt_oss": lambda: tf.GptOssForCausalLM(
        tf.GptOssConfig(
            sliding_window=5,
            layer_types=SLIDING_TYPES,
            num_local_experts=2,
            num_experts_per_tok=1,
            **{**WIDE, "hidden_size": 32, "intermediate_size": 32},
        )
    ),
}
MORE_SEQ2SEQ = {
    "umt5": lambda: tf.UMT5ForConditionalGeneration(
        tf.UMT5Config(d_model=24, d_kv=7, num_heads=3, num_layers=2, d_ff=37, **RELATIVE, **SPECIAL)
    ),
    "mvp": lambda: tf.MvpForConditionalGeneration(tf.MvpConfig(**BART)),
    "pegasus": lambda: tf.PegasusForConditionalGeneration(tf.PegasusConfig(**BART)),
}
ALL = {**ENCODERS, **DECODERS, **SEQ2SEQ}
FAMILIES = {**ALL, **MORE_ENCODERS, **MORE_DECODERS, **MORE_SEQ2SEQ}
# The families whose only attention of their own is eager.
EAGER = {
    "mpnet", "deberta", "deberta_v2", "megatron_bert", "roformer", "gptj", "gpt_neo", "codegen",
    "gpt_neox_japanese", "bloom", "mpt", "xglm", "mvp", "gpt_oss", "gemma2",
}  # fmt: skip


def build(name: str, *, implementation: str = "sdpa") -> tf.PreTrainedModel:
    """A model of the family in evaluation mode, with weights large enough for attention to matter."""
    torch.manual_seed(7)
    with warnings.catch_warnings():
        # The first import of some families calls torch.jit.script.
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        model = FAMILIES[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Fixed position tables are no weights.
            if parameter.dim() >= 2 and parameter.requires_grad:
                parameter.normal_(std=0.3)
    set_implementation(model, "eager" if name in EAGER else implementation)
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
