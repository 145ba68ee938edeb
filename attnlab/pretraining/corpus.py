"""A text file as a corpus for training: a tokeniser, a token store, and a held-out part of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.data import Malformed, TokenStore, load_tokeniser, texts, tokenise, train_bpe, train_wordpiece
from attnlab.data.readers import Unit
from attnlab.data.tokenisers import FastTokeniser, Tokeniser
from attnlab.provenance import file_sha256, sync_folder
from attnlab.training import RunError
from attnlab.training.runs import say

__all__ = ["CorpusConfig", "for_model", "prepare_corpus", "split_store"]


@dataclass(frozen=True)
class CorpusConfig:
    """Where the text and the tokeniser come from, and how much of the text is held out."""

    text: str
    # A folder with a tokeniser; None: one is trained on the text. A copy is kept in the run's folder.
    tokenizer: str | None = None
    vocab: int = 8192
    unit: Unit = "paragraph"
    # Which column of a jsonl, csv or tsv file.
    column: str = "text"
    held_out: float = 0.02
    # Leave out lines that cannot be read instead of stopping at the first.
    skip_malformed: bool = False
    # The checksum of the text's bytes: a run knows it, so that another text is not taken for it.
    sha256: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must lie between 0 and 1, got {self.held_out}")

    def located(self) -> CorpusConfig:
        """The same with absolute paths and the text's checksum, so that a run can be resumed from any folder."""
        if Path(self.text).exists() and not Path(self.text).is_file():
            raise ValueError(f"{self.text} is no regular file; the text is read several times, so save it as a file")
        tokenizer = None if self.tokenizer is None else str(Path(self.tokenizer).resolve())
        # Where links form a loop, the error of opening the file says so.
        text = Path(os.path.realpath(self.text))
        return replace(self, text=str(text), tokenizer=tokenizer, sha256=file_sha256(text))

    def as_dict(self) -> dict[str, Any]:
        """The settings as run.json holds them; what earlier versions did not have is left out where it is not used."""
        later = {"skip_malformed", "sha256"}
        return {name: value for name, value in asdict(self).items() if value or name not in later}


@dataclass(frozen=True)
class _Texts:
    """The file's documents, read anew each time: a tokeniser is trained in two passes."""

    config: CorpusConfig

    def __iter__(self) -> Iterator[str]:
        config = self.config
        malformed = Malformed("skip") if config.skip_malformed else None
        return texts(config.text, unit=config.unit, column=config.column, malformed=malformed)


def prepare_corpus(
    config: CorpusConfig, *, run_dir: Path, task: str, fingerprint: str | None = None
) -> tuple[Tokeniser, dict[str, TokenStore]]:
    """(tokeniser, {"train", "valid"}); both are kept in ``run_dir``, and a second call reads them there.

    The text is needed only for what is not there or damaged; it must be the text of ``config.sha256`` then, and give
    the tokeniser of ``fingerprint``, where these are known.
    """
    tokeniser = _kept_tokeniser(run_dir / "tokenizer", fingerprint)
    if tokeniser is None:
        tokeniser = _make_tokeniser(config, run_dir / "tokenizer", task)
        if fingerprint not in (None, tokeniser.fingerprint()):
            raise RunError(
                f"{run_dir / 'tokenizer'} is not the tokeniser that the run began with, and cannot be made again; put "
                "it back, or start a new run"
            )
    malformed = Malformed("skip" if config.skip_malformed else "fail")
    try:
        store = tokenise(
            config.text,
            tokeniser,
            cache=run_dir / "tokens",
            unit=config.unit,
            column=config.column,
            malformed=malformed,
            sha256=config.sha256,
        )
    except FileNotFoundError as error:
        raise RunError(_without_text(config, "the tokens")) from error
    if malformed.count:
        say(str(malformed))
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


def _kept_tokeniser(folder: Path, fingerprint: str | None) -> Tokeniser | None:
    """The tokeniser in ``folder``, if it is there, whole, and the one with this fingerprint."""
    if not folder.exists():
        return None
    try:
        tokeniser = load_tokeniser(folder)
    except Exception:
        # The package tokenizers raises plain Exceptions about its files.
        tokeniser = None
    if tokeniser is None or fingerprint not in (None, tokeniser.fingerprint()):
        say(f"{folder} is damaged and is made again")
        return None
    return tokeniser


def _make_tokeniser(config: CorpusConfig, folder: Path, task: str) -> Tokeniser:
    """The tokeniser that the config names, or one trained on the text, kept in ``folder``."""
    if config.tokenizer is not None:
        tokeniser = load_tokeniser(config.tokenizer)
    else:
        if not Path(config.text).is_file():
            raise RunError(_without_text(config, "the tokeniser"))
        if config.sha256 not in (None, file_sha256(config.text)):
            raise RunError(f"{config.text} has changed since the run began; put the old text back, or start a new run")
        train_tokeniser = train_wordpiece if task == "mlm" else train_bpe
        tokeniser = train_tokeniser(_Texts(config), vocab_size=config.vocab)
    # A folder of this name is whole: it is written under another, and renamed.
    unfinished = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    tokeniser.save(unfinished)
    os.rename(unfinished, folder)
    sync_folder(folder.parent)
    return load_tokeniser(folder)


def _without_text(config: CorpusConfig, what: str) -> str:
    return f"{config.text} is gone, and {what} made from it are not in the run's folder; put the text back"


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
