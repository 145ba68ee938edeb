"""Tokenizers of model folders, which packages their files need, and what transformers says while it loads."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnlab.errors import first_line, refusal

__all__ = ["load_tokenizer", "quiet_transformers"]

# For each kind of file: packages as pip names them, and as Python imports them.
NEEDED = {
    "SentencePiece": {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"},
    "tiktoken": {"tiktoken": "tiktoken"},
}

SENTENCEPIECE_SPACE = "▁"


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or a hub name.

    Packages that its files need and that are missing are a ValueError, and so is a tokenizer without a vocabulary.
    """
    import transformers

    _refuse_missing(Path(name))
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise refusal(error, f"{name}: its tokenizer cannot be loaded ({first_line(error)})") from None
    _refuse_empty(name, tokenizer)
    return tokenizer


@contextmanager
def quiet_transformers(*, errors_only: bool = False) -> Iterator[None]:
    """No progress bar of transformers outside a terminal, and no warnings where ``errors_only``."""
    from transformers.utils import logging

    bar = not sys.stderr.isatty() and logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    if bar:
        logging.disable_progress_bar()
    if errors_only:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _refuse_missing(folder: Path) -> None:
    """Raise a ValueError if a folder has only a tokenizer file that needs packages which are not installed."""
    if not folder.is_dir() or (folder / "tokenizer.json").is_file():
        return
    for file in sorted([*folder.glob("*.model"), *folder.glob("*.spm")]):
        kind = _kind(file)
        missing = [package for package, module in NEEDED[kind].items() if not _installed(module)]
        if missing:
            are = "is not installed" if len(missing) == 1 else "are not installed"
            raise ValueError(
                f"{folder}: its tokenizer is a {kind} file ({file.name}), which needs {' and '.join(NEEDED[kind])}; "
                f"{' and '.join(missing)} {are}: pip install {' '.join(missing)}"
            )


def _refuse_empty(name: str, tokenizer: Any) -> None:
    """Raise a ValueError if a tokenizer knows nothing but special tokens.

    transformers makes one without a word where a folder lacks the files that the tokenizer's class reads.
    """
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    # Classes that read SentencePiece files know the mark of a word's beginning even then.
    if tokenizer.get_vocab().keys() - special - set(tokenizer.all_special_tokens) - {SENTENCEPIECE_SPACE}:
        return
    own_files = " with ".join(sorted(set(tokenizer.vocab_files_names.values()) - {"tokenizer.json"}))
    raise ValueError(
        f"{name}: its tokenizer has no vocabulary, so that every word of a text would be unknown; "
        f"{type(tokenizer).__name__} reads tokenizer.json{own_files and f' or {own_files}'}: "
        "copy what is missing from where the model was made"
    )


def _kind(file: Path) -> str:
    """A SentencePiece model is a protocol buffer whose first field is a piece; a tiktoken file is lines of base64."""
    with open(file, "rb") as opened:
        return "SentencePiece" if opened.read(1) == b"\n" else "tiktoken"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # The package that would hold the module is missing.
        return False
