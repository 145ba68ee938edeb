"""Read from token strings alone: where words begin, and what type each token is."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

__all__ = ["TYPE_NAMES", "guess_types", "guess_words", "readable"]

TYPE_NAMES = ("special", "punctuation", "number", "word", "word piece")
SPECIAL, PUNCTUATION, NUMBER, WORD, PIECE = range(len(TYPE_NAMES))
# GPT-2's and SentencePiece's sign for a space before the word.
SPACES = ("Ġ", "▁")


def guess_words(tokens: Sequence[str]) -> list[int]:
    """The word that each token belongs to, by the marks of WordPiece, byte-level BPE and SentencePiece.

    >>> guess_words(["[CLS]", "un", "##happy", "cat", "[SEP]"])
    [0, 1, 1, 2, 3]
    >>> guess_words(["▁un", "happy", "▁cat", ".", "</s>"])
    [0, 0, 1, 2, 3]
    """
    spaced = any(token.startswith(SPACES) for token in tokens)
    words: list[int] = []
    for i, token in enumerate(tokens):
        # After a special token or punctuation a new word begins, even without the sign for a space.
        after_word = i > 0 and _bare_type(tokens[i - 1]) in (WORD, NUMBER)
        if spaced:
            joins = not token.startswith(SPACES) and _bare_type(token) in (WORD, NUMBER) and after_word
        else:
            joins = token.startswith("##") and len(token) > 2
        words.append(words[-1] if joins and words else (words[-1] + 1 if words else 0))
    return words


def guess_types(tokens: Sequence[str], words: Sequence[int] | None = None) -> list[int]:
    """Each token's index in ``TYPE_NAMES``; a word piece is a token that continues a word.

    >>> [TYPE_NAMES[t] for t in guess_types(["[CLS]", "run", "##ning", "7", "!"])]
    ['special', 'word', 'word piece', 'number', 'punctuation']
    """
    words = guess_words(tokens) if words is None else words
    return [
        PIECE if i and words[i] == words[i - 1] and words[i] >= 0 else _bare_type(token)
        for i, token in enumerate(tokens)
    ]


def readable(tokens: Sequence[str]) -> list[str]:
    """Tokens without the sign for a space before them.

    >>> readable(["▁the", "▁", "Ġcat", "##s"])
    ['the', '▁', 'cat', '##s']
    """
    return [token[1:] if token.startswith(SPACES) and len(token) > 1 else token for token in tokens]


def _bare_type(token: str) -> int:
    if (
        len(token) > 2
        and (token[0], token[-1]) in (("[", "]"), ("<", ">"))
        and token[1:-1].replace("/", "").isidentifier()
    ):
        return SPECIAL
    if token.startswith("<|") and token.endswith("|>"):
        return SPECIAL
    bare = token.lstrip("".join(SPACES)).removeprefix("##").strip()
    if not bare:
        return PUNCTUATION
    if all(unicodedata.category(c)[0] in "PS" for c in bare):
        return PUNCTUATION
    return NUMBER if all(unicodedata.category(c)[0] in "NP" for c in bare) else WORD
