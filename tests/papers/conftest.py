"""A tiny encoder and a tiny GLUE, for the tests of the reproduction of Effective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attnlab.adapters.load import load_model

WORDS = ["the", "cat", "sees", "her", ".", "a", "dog"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers and two heads of 5, and a tokenizer of seven words."""
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("encoder")
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=10,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=13,
        max_position_embeddings=32,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RTE and STS-B with twelve examples a split."""
    folder = tmp_path_factory.mktemp("glue")
    text = ["the cat sees her .", "a dog sees the cat .", "the dog ."]
    for task, column in (("RTE", "label"), ("STS-B", "score")):
        (folder / task).mkdir()
        for split in ("train", "dev"):
            lines = ["\t".join(["index", "sentence1", "sentence2", column])]
            for i in range(12):
                label = ("entailment", "not_entailment")[i % 2] if task == "RTE" else f"{i % 6}.500"
                lines.append("\t".join([str(i), " ".join(text), text[i % 3], label]))
            (folder / task / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def tokenizer(encoder: Path) -> Any:
    return load_model(encoder).tokenizer
