"""A tiny language model over bytes, saved with its tokenizer, a text and a few passages."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as tf

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "birds", "in", "trees", "while", "rain", "fell", "softly", "over", "hills", "near", "the", "old", "town", "where", "magic", "numbers", "hide"]  # fmt: skip


def write_word_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["[PAD]", "[BOS]", "[EOS]", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    return len(pieces)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny Llama over bytes, saved, with a text and a few passages."""
    path = tmp_path_factory.mktemp("tiny")
    vocabulary = write_word_tokenizer(path)
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    tf.LlamaForCausalLM(config).save_pretrained(path)
    (path / "text.txt").write_text(" ".join(WORDS * 40))
    rows = [json.dumps({"text": " ".join(WORDS[i : i + 8])}) for i in range(6)]
    (path / "lambada.jsonl").write_text("\n".join(rows))
    return path
