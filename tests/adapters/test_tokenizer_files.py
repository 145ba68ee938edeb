"""A tokenizer that needs more packages than the base install has: the error says which, and how to get them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import attnlab
from attnlab.adapters import tokenizer_files
from attnlab.adapters.tokenizer_files import load_tokenizer

SENTENCEPIECE = b"\n\x0e\n\x05<unk>"
TIKTOKEN = b"IQ== 0\nIg== 1\n"


@pytest.mark.parametrize(
    ("content", "installed", "message"),
    [
        (SENTENCEPIECE, set(), "sentencepiece and protobuf are not installed: pip install sentencepiece protobuf"),
        (SENTENCEPIECE, {"sentencepiece"}, "protobuf is not installed: pip install protobuf"),
        (TIKTOKEN, {"sentencepiece", "google.protobuf"}, "tiktoken is not installed: pip install tiktoken"),
    ],
)
def test_missing_packages_are_named(
    content: bytes, installed: set[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    monkeypatch.setattr(tokenizer_files, "_installed", installed.__contains__)
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        load_tokenizer(str(tmp_path))


# One family for each kind of vocabulary file that transformers reads.
@pytest.mark.parametrize(
    ("family", "files"),
    [
        ("albert", "tokenizer.json or spiece.model"),
        ("bert", "tokenizer.json or vocab.txt"),
        ("gpt2", "tokenizer.json or merges.txt with vocab.json"),
        ("gemma", "tokenizer.json"),
        ("mbart", "tokenizer.json or sentencepiece.bpe.model"),
        ("t5", "tokenizer.json or spiece.model"),
    ],
)
@pytest.mark.parametrize("unread", ["tokenizer_config.json", "vocab.txt", "words.json"])
def test_a_tokenizer_without_a_vocabulary_is_refused(family: str, files: str, unread: str, tmp_path: Path) -> None:
    """transformers makes a tokenizer of special tokens alone from files that its class does not read."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    (tmp_path / unread).write_text("{}" if unread.endswith("json") else "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nC\nO\n")
    if unread in files:
        assert "O" in load_tokenizer(str(tmp_path)).get_vocab()
        return
    with pytest.raises(ValueError, match=f"no vocabulary, .* reads {re.escape(files)}: copy"):
        load_tokenizer(str(tmp_path))


def test_what_is_installed() -> None:
    assert tokenizer_files._installed("torch")
    assert not tokenizer_files._installed("no_such_package.part")


def test_hints_name_packages_that_pip_knows() -> None:
    """``pip install "attnlab[train]"`` fails where attnlab came from a folder or a file; its parts have names."""
    for path in Path(attnlab.__file__).parent.rglob("*.py"):
        assert "attnlab[" not in path.read_text(encoding="utf-8"), path
