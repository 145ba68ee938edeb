"""Tokenisers behind one small interface: Hugging Face's fast ones, SentencePiece, and words by their counts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attnlab.data.patterns_of_words import may_take_forever
from attnlab.errors import first_line, read_json_object
from attnlab.provenance import write_atomic, write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "FastTokeniser",
    "SentencePieceTokeniser",
    "Specials",
    "Tokeniser",
    "WordTokeniser",
    "as_tokeniser",
    "load_tokeniser",
]


@dataclass(frozen=True)
class Specials:
    """Ids with a meaning of their own; None where the vocabulary has no such token."""

    pad: int | None = None
    unk: int | None = None
    bos: int | None = None
    eos: int | None = None
    mask: int | None = None

    def ids(self) -> list[int]:
        """The ids of the tokens that exist, in order."""
        return sorted({i for i in asdict(self).values() if i is not None})


@runtime_checkable
class Tokeniser(Protocol):
    """The interface that ``attnlab.data`` uses; ids never include special tokens."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    @property
    def specials(self) -> Specials:
        """The special tokens' ids."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids."""

    def fingerprint(self) -> str:
        """A hash of everything that the ids depend on."""

    def save(self, folder: Path | str) -> None:
        """Write the files that ``load_tokeniser`` reads."""


@dataclass(frozen=True)
class FastTokeniser:
    """A ``tokenizers.Tokenizer`` with its special tokens; saved in the form AutoTokenizer loads."""

    tokenizer: Tokenizer
    specials: Specials

    @property
    def vocab_size(self) -> int:
        # Not how many there are: ids may leave some out.
        return 1 + max(self.tokenizer.get_vocab().values(), default=-1)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # The fast form leaves out character offsets, which are not used.
        return [e.ids for e in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def fingerprint(self) -> str:
        return _hash(self.tokenizer.to_str().encode(), asdict(self.specials))

    def hf(self) -> PreTrainedTokenizerFast:
        """The same tokeniser as transformers knows it."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, **self._names())

    def save(self, folder: Path | str) -> None:
        folder = _make_folder(folder)
        write_atomic(folder / "tokenizer.json", self.tokenizer.to_str(pretty=True))
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **self._names()})

    def _names(self) -> dict[str, str]:
        s, bert = self.specials, self.tokenizer.token_to_id("[CLS]") is not None
        names = {
            "pad_token": s.pad,
            "unk_token": s.unk,
            "cls_token" if bert else "bos_token": s.bos,
            "sep_token" if bert else "eos_token": s.eos,
            "mask_token": s.mask,
        }
        return {name: str(self.tokenizer.id_to_token(i)) for name, i in names.items() if i is not None}


@dataclass(frozen=True)
class SentencePieceTokeniser:
    """A SentencePiece model, held as the bytes of its model file."""

    model: bytes = field(repr=False)

    @cached_property
    def _processor(self) -> Any:
        return _sentencepiece().SentencePieceProcessor(model_proto=self.model)

    @property
    def vocab_size(self) -> int:
        return self._processor.get_piece_size()

    @property
    def pieces(self) -> tuple[str, ...]:
        """The piece of each id."""
        return tuple(self._processor.id_to_piece(list(range(self.vocab_size))))

    @property
    def specials(self) -> Specials:
        p = self._processor
        mask = p.piece_to_id("<mask>")
        # SentencePiece says -1 for a token that the model lacks.
        ids = {"pad": p.pad_id(), "unk": p.unk_id(), "bos": p.bos_id(), "eos": p.eos_id()}
        return Specials(
            mask=None if mask == p.unk_id() else mask, **{name: i if i >= 0 else None for name, i in ids.items()}
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), out_type=int)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(i) for i in ids])

    def fingerprint(self) -> str:
        return _hash(self.model, {})

    def save(self, folder: Path | str) -> None:
        write_atomic(_make_folder(folder) / "spiece.model", self.model)


@dataclass(frozen=True)
class WordTokeniser:
    """Whole words by a regular expression; ids 0 to 3 are <pad> <unk> <s> </s>, then ``words`` in order.

    >>> WordTokeniser(words=("the", "film")).encode_batch(["The bad film"])
    [[4, 1, 5]]
    """

    words: tuple[str, ...] = field(repr=False)
    pattern: str = r"\w+|[^\w\s]"
    lowercase: bool = True

    names = ("<pad>", "<unk>", "<s>", "</s>")

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words, start=len(self.names))}

    @property
    def vocab_size(self) -> int:
        return len(self.names) + len(self.words)

    @property
    def specials(self) -> Specials:
        return Specials(pad=0, unk=1, bos=2, eos=3)

    def split(self, text: str) -> list[str]:
        """The words of a text, known or not."""
        return re.findall(self.pattern, text.lower() if self.lowercase else text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids = self._ids
        return [[ids.get(word, 1) for word in self.split(text)] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        words = (*self.names, *self.words)
        return " ".join(words[i] for i in ids)

    def fingerprint(self) -> str:
        return _hash("\n".join(self.words).encode(), {"pattern": self.pattern, "lowercase": self.lowercase})

    def save(self, folder: Path | str) -> None:
        write_json(_make_folder(folder) / "words.json", asdict(self))


def as_tokeniser(tokenizer: Any) -> Tokeniser:
    """A ``Tokeniser`` from a Hugging Face fast tokenizer or a ``tokenizers.Tokenizer``; one of ours stays as it is."""
    if isinstance(tokenizer, (FastTokeniser, SentencePieceTokeniser, WordTokeniser)):
        return tokenizer
    if hasattr(tokenizer, "backend_tokenizer"):
        t = tokenizer
        return FastTokeniser(
            t.backend_tokenizer,
            Specials(
                pad=t.pad_token_id,
                unk=t.unk_token_id,
                bos=t.bos_token_id if t.bos_token_id is not None else t.cls_token_id,
                eos=t.eos_token_id if t.eos_token_id is not None else t.sep_token_id,
                mask=t.mask_token_id,
            ),
        )
    if hasattr(tokenizer, "encode_batch_fast"):
        return FastTokeniser(tokenizer, _specials_by_name(tokenizer))
    if isinstance(tokenizer, Tokeniser):
        return tokenizer
    raise ValueError(
        f"cannot tokenise with {type(tokenizer).__name__}: pass a fast Hugging Face tokenizer, a tokenizers.Tokenizer "
        "or an object with vocab_size, specials, encode_batch, decode and fingerprint"
    )


def load_tokeniser(folder: Path | str) -> Tokeniser:
    """The tokeniser that ``save`` (or a Hugging Face tokenizer's ``save_pretrained``) left in a folder."""
    folder = Path(folder)
    if (folder / "spiece.model").exists():
        return SentencePieceTokeniser((folder / "spiece.model").read_bytes())
    if (folder / "words.json").exists():
        return _saved_words(folder / "words.json")
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        try:
            return as_tokeniser(Tokenizer.from_file(str(folder / "tokenizer.json")))
        # The library raises a plain Exception.
        except Exception as error:
            raise ValueError(f"{folder / 'tokenizer.json'} is no tokeniser ({first_line(error)})") from None
    raise ValueError(f"{folder} holds no tokeniser: expected tokenizer.json, spiece.model or words.json")


def _saved_words(file: Path) -> WordTokeniser:
    saved = read_json_object(file)
    words, pattern, lowercase = (saved.get(name) for name in ("words", "pattern", "lowercase"))
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{file}: words must be a list of strings")
    if not isinstance(pattern, str) or not isinstance(lowercase, bool):
        raise ValueError(f"{file}: pattern must be a regular expression and lowercase true or false")
    try:
        endless = may_take_forever(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{file}: {pattern[:60]!r} is no regular expression ({error})") from None
    if endless:
        raise ValueError(
            f"{file}: the pattern {pattern[:60]!r} may take forever on some text, as it repeats what repeats or has "
            "alternatives; write it without one of them"
        )
    return WordTokeniser(words=tuple(words), pattern=pattern, lowercase=lowercase)


def _specials_by_name(tokenizer: Tokenizer) -> Specials:
    def first(*names: str) -> int | None:
        return next((i for name in names if (i := tokenizer.token_to_id(name)) is not None), None)

    return Specials(
        pad=first("[PAD]", "<pad>"),
        unk=first("[UNK]", "<unk>"),
        bos=first("[CLS]", "<s>", "<|endoftext|>"),
        eos=first("[SEP]", "</s>", "<|endoftext|>"),
        mask=first("[MASK]", "<mask>"),
    )


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise ImportError("SentencePiece is not installed: pip install sentencepiece") from None
    return sentencepiece


def _make_folder(folder: Path | str) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _hash(content: bytes, settings: dict[str, Any]) -> str:
    return hashlib.blake2b(content + json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()
