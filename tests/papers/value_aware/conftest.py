"""A small corpus, its words, and a small masked LM."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from attnlab.data import load_tokeniser, train_wordpiece, write_store
from papers.value_aware.words import prepare_words
from tests.papers.value_aware.cases import LINES, WORDS


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stores of a tiny WikiText-103 by whole words."""
    source, out = tmp_path_factory.mktemp("wikitext"), tmp_path_factory.mktemp("words") / "stores"
    for split in ("train", "valid", "test"):
        (source / f"wiki.{split}.tokens").write_text("".join(LINES * 4))
    prepare_words(source, out)
    return out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four stores of words that follow one another, and their tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    texts = [" ".join(WORDS[(start + i) % 19] for i in range(71)) for start in rng.integers(0, 19, 12)]
    tokeniser = train_wordpiece(texts, vocab_size=64)
    tokeniser.save(folder / "tokenizer")
    tokeniser = load_tokeniser(folder / "tokenizer")
    for name, part in {
        "train": texts[:6],
        "valid": texts[6:8],
        "wikitext103-valid": texts[8:10],
        "wikitext103-test": texts[10:],
    }.items():
        write_store(folder / name, part, tokeniser)
    meta = folder / "wikitext103-test" / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"words": 144, "unknown_words": 2}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A tiny BERT with 13 positions and heads of 4."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = BertConfig(
        vocab_size=64,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=13,
        attention_probs_dropout_prob=0.0,
        type_vocab_size=1,
    )
    BertForMaskedLM(config).save_pretrained(folder)
    return folder
