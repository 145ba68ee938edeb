"""A small random language model in a folder, and a text, for dry runs of benchmarks on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from attnlab.adapters import load_model
from attnlab.adapters.load import SHIPPED
from attnlab.data import bundled_text

__all__ = ["tiny_language_model", "tiny_llama", "tiny_text"]


def tiny_llama(vocabulary: int = 61) -> LlamaForCausalLM:
    """Two layers of six heads over two of keys."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, intermediate_size=64,
        vocab_size=vocabulary,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tiny_language_model(folder: Path) -> Path:
    """The folder with the model and the shipped tokenizer, to which lm-eval wants a token that ends texts."""
    if not folder.is_dir():
        tokenizer = load_model(SHIPPED).tokenizer
        tokenizer.eos_token = tokenizer.sep_token
        tokenizer.save_pretrained(folder)
        tiny_llama(len(tokenizer)).save_pretrained(folder)
    return folder


def tiny_text(file: Path, characters: int = 200_000) -> Path:
    """The beginning of the shipped text as a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(bundled_text()[:characters], encoding="utf-8")
    return file
