"""Small settings for the tests of value-aware approximation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from papers.value_aware.config import ValueAwareConfig

WORDS = list("abcdefghijklmnopqrs")
CONFIG = ValueAwareConfig(
    kernels=("exp", "poly"),
    lm_layers=1,
    lm_width=6,
    lm_heads=2,
    lm_length=17,
    lm_batch=3,
    lm_steps=2,
    lm_context=11,
    lm_r=(1, 4, 17),
    mlm_short=13,
    mlm_long=29,
    mlm_tokens=58,
    mlm_steps=2,
    mlm_r=(1, 5, 29),
    mlm_lsh=((4, 2),),
    between_r=(2,),
    between_rows=1,
    sweep_every=2,
    curve_points=1,
    eval_batch=5,
)

LINES = [" = A title = \n", " \n", " The cat <unk> sat . \n", " It @-@ sat . \n", " = Other = \n", " the END \n"]


def write_language_model(folder: Path, words: Sequence[str]) -> Path:
    """A Llama of one layer with two heads of 4, and a tokenizer of words."""
    import tokenizers
    import transformers

    vocabulary = {word: i for i, word in enumerate(["<unk>", *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=8,
        intermediate_size=11,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=1.0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
