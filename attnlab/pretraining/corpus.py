"""A text file as a corpus for training: a tokeniser, a token store, and a held-out part of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnlab.data import TokenStore, load_tokeniser, texts, tokenise, train_bpe, train_wordpiece
from attnlab.data.readers import Unit
from attnlab.data.tokenisers import FastTokeniser, Tokeniser

__all__ = ["CorpusConfig", "for_model", "prepare_corpus", "split_store"]


@dataclass(frozen=True)
class CorpusConfig:
    """Where the text and the tokeniser come from, and how much of the text is held out."""

    text: str
    # A folder with a tokeniser; None: one is trained on the text and kept in the run's folder.
    tokenizer: str | None = None
    vocab: int = 8192
    unit: Unit = "paragraph"
    # Which column of a jsonl, csv or tsv file.
    column: str = "text"
    held_out: float = 0.02

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must lie between 0 and 1, got {self.held_out}")


@dataclass(frozen=True)
class _Texts:
    """The file's documents, read anew each time: a tokeniser is trained in two passes."""

    config: CorpusConfig

    def __iter__(self) -> Iterator[str]:
        return texts(self.config.text, unit=self.config.unit, column=self.config.column)


def prepare_corpus(config: CorpusConfig, *, run_dir: Path, task: str) -> tuple[Tokeniser, dict[str, TokenStore]]:
    """(tokeniser, {"train", "valid"}); both are kept in ``run_dir``, and a second call reads them there."""
    kept = run_dir / "tokenizer"
    if config.tokenizer is not None:
        tokeniser = load_tokeniser(config.tokenizer)
    elif kept.exists():
        tokeniser = load_tokeniser(kept)
    else:
        train_tokeniser = train_wordpiece if task == "mlm" else train_bpe
        tokeniser = train_tokeniser(_Texts(config), vocab_size=config.vocab)
        tokeniser.save(kept)
    store = tokenise(config.text, tokeniser, cache=run_dir / "tokens", unit=config.unit, column=config.column)
    train, valid = split_store(store, config.held_out)
    return tokeniser, {"train": train, "valid": valid}


def for_model(tokeniser: Tokeniser, *, task: str) -> Tokeniser:
    """The tokeniser as it lies beside a trained model: for a causal one a text begins where the last document ended.

    A causal model learns from a stream of documents, each followed by the end token, and never sees one enclosed.
    """
    if task != "causal" or not isinstance(tokeniser, FastTokeniser) or tokeniser.specials.eos is None:
        return tokeniser
    from tokenizers import Tokenizer, processors

    own = Tokenizer.from_str(tokeniser.tokenizer.to_str())
    end = str(own.id_to_token(tokeniser.specials.eos))
    own.post_processor = processors.TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, tokeniser.specials.eos)]
    )
    return FastTokeniser(own, tokeniser.specials)


def split_store(store: TokenStore, held_out: float) -> tuple[TokenStore, TokenStore]:
    """The last documents, or the end of the only one, are held out: at least ``held_out`` of all tokens.

    >>> store = TokenStore(np.arange(10), np.array([0, 4, 8, 10]))
    >>> [part.tokens.tolist() for part in split_store(store, 0.1)]
    [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9]]
    """
    total = len(store.tokens)
    cut = int(total * (1 - held_out))
    if len(store) > 1:
        # The last document that begins before the cut goes to the held-out part, unless it is the first.
        first = max(1, int(np.searchsorted(store.offsets, cut, side="right")) - 1)
        cut = int(store.offsets[first])
        offsets = np.asarray(store.offsets)
        parts = offsets[: first + 1], offsets[first:] - cut
    else:
        parts = np.array([0, cut]), np.array([0, total - cut])
    return TokenStore(store.tokens[:cut], parts[0], store.meta), TokenStore(store.tokens[cut:], parts[1], store.meta)
