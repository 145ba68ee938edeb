"""Vocabularies trained by us: the same texts always give the same ids, on any machine and in any process."""

from __future__ import annotations

import io
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from attnlab.data.tokenisers import FastTokeniser, SentencePieceTokeniser, Specials, WordTokeniser, _sentencepiece
from attnlab.sizes import check_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer

__all__ = ["train_bpe", "train_sentencepiece", "train_wordpiece", "train_words"]

BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def train_wordpiece(
    texts: Iterable[str], *, vocab_size: int = 8192, lowercase: bool = True, alphabet: int = 256
) -> FastTokeniser:
    """WordPiece in BERT's manner: [PAD] [UNK] [CLS] [SEP] [MASK] are ids 0 to 4; ``texts`` is read twice.

    The ``alphabet`` most frequent characters are kept (ties by code point); a word with any other is [UNK].
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    _refuse_iterator(texts)
    _refuse_size(vocab_size)
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    letters = _frequent_characters(texts, normalizer, alphabet)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # The trainer numbers "##x" in the order of a randomly seeded hash map, and breaks ties between merges by their
    # numbers. Named as special tokens they are numbered first, in our order.
    first = [*BERT_SPECIALS, *(f"##{letter}" for letter in letters if not _stands_alone(letter))]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=first,
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    built = Tokenizer(models.WordPiece(tokenizer.get_vocab(), unk_token="[UNK]"))
    built.normalizer = normalizer
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece()
    _surround(built, BERT_SPECIALS, "[CLS]", "[SEP]")
    return FastTokeniser(built, Specials(pad=0, unk=1, bos=2, eos=3, mask=4))


def train_bpe(texts: Iterable[str], *, vocab_size: int = 8192) -> FastTokeniser:
    """Byte-level BPE in RoBERTa's manner: <s> <pad> </s> <unk> <mask> are ids 0 to 4, no text is ever unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    _refuse_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(ROBERTA_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    _surround(tokenizer, ROBERTA_SPECIALS, "<s>", "</s>")
    return FastTokeniser(tokenizer, Specials(pad=1, unk=3, bos=0, eos=2, mask=4))


def train_sentencepiece(
    texts: Iterable[str], *, vocab_size: int = 8000, kind: str = "unigram", mask: bool = False
) -> SentencePieceTokeniser:
    """SentencePiece (``kind`` unigram or bpe), <pad> <unk> <s> </s> as ids 0 to 3; KTIW shares 8,000 (A.8)."""
    out = io.BytesIO()
    _sentencepiece().SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=out,
        vocab_size=vocab_size,
        model_type=kind,
        character_coverage=1.0,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        user_defined_symbols=["<mask>"] if mask else [],
        # Sums of floats depend on how the work is divided, so the number of threads is fixed.
        num_threads=2,
        minloglevel=2,
    )
    return SentencePieceTokeniser(out.getvalue())


def train_words(
    texts: Iterable[str],
    *,
    min_count: int = 3,
    max_size: int | None = None,
    pattern: str = WordTokeniser.pattern,
    lowercase: bool = True,
    numbers: bool = True,
) -> WordTokeniser:
    """Words seen at least ``min_count`` times, most frequent first, ties in alphabetical order (KTIW, A.8: 3).

    Without ``numbers``, integers of more than one digit are unknown, as in KTIW's AG News and 20 Newsgroups.

    >>> train_words(["a b a", "b a c"], min_count=2).words
    ('a', 'b')
    """
    split = WordTokeniser(words=(), pattern=pattern, lowercase=lowercase).split
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split(text))
    frequent = (word for word, n in counts.items() if n >= min_count and (numbers or not re.fullmatch(r"\d\d+", word)))
    kept = sorted(frequent, key=lambda word: (-counts[word], word))
    return WordTokeniser(words=tuple(kept[:max_size]), pattern=pattern, lowercase=lowercase)


def _frequent_characters(texts: Iterable[str], normalizer: Normalizer, limit: int) -> list[str]:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    letters = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    return sorted(letters[:limit])


def _stands_alone(letter: str) -> bool:
    """Punctuation and Chinese characters are words of their own to BERT, so they never continue one."""
    ascii_sign = letter.isascii() and not letter.isalnum()
    return ascii_sign or unicodedata.category(letter).startswith("P") or 0x4E00 <= ord(letter) <= 0x9FFF


def _surround(tokenizer: Tokenizer, specials: tuple[str, ...], bos: str, eos: str) -> None:
    from tokenizers import processors

    tokenizer.add_special_tokens(list(specials))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}",
        pair=f"{bos} $A {eos} $B:1 {eos}:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (bos, eos)],
    )


def _refuse_size(vocab_size: int) -> None:
    if vocab_size <= len(BERT_SPECIALS):
        raise ValueError(
            f"a vocabulary holds {len(BERT_SPECIALS)} special tokens and more, got vocab_size {vocab_size}"
        )
    # The trainers make room for the whole vocabulary at once: a string and a number in some tables.
    check_bytes(f"a vocabulary of {vocab_size} tokens", 200 * vocab_size, instead="make it smaller")


def _refuse_iterator(texts: Iterable[str]) -> None:
    if isinstance(texts, Iterator):
        raise ValueError(f"texts is read twice, so a {type(texts).__name__} will not do: pass a list of texts")
