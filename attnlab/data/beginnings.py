"""The beginning of a text file: only as much of it is read as is asked for."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attnlab.data.readers import open_bytes

__all__ = ["TextFile", "first_tokens", "tokens_around"]

BLOCK = 1 << 16
# Tokens are seldom longer; where they are, more is read, up to the second number.
CHARACTERS_PER_TOKEN, MOST_CHARACTERS_PER_TOKEN = 8, 4096
# What has longer tokens than that over so many characters is no text, however much of it is left.
CHARACTERS_TO_JUDGE = 1 << 20
# Tokens before a cut that may depend on the text after it.
UNSETTLED = 64


class TextFile:
    """A UTF-8 text file, perhaps compressed, or a pipe, of which the beginning is read, each byte once.

    What is empty, binary or not UTF-8 as far as it is read is a ValueError of one line.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._blocks = self._decoded()
        self._parts: list[str] = []
        self._length = 0
        self._whole = False

    def beginning(self, characters: int | None) -> tuple[str, bool]:
        """(so many characters from the start and some more, cut between words; whether that is the whole file).

        None asks for the whole file.
        """
        while not self._whole and (characters is None or self._length <= characters):
            block = next(self._blocks, None)
            if block is None:
                self._whole = True
            else:
                self._parts.append(block)
                self._length += len(block)
        text = "".join(self._parts)
        if self._whole and not text.strip():
            raise ValueError(f"{self.path} is empty: expected a text file")
        return (text if self._whole else _between_words(text)).replace("\r\n", "\n"), self._whole

    def _decoded(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        read = 0
        with open_bytes(self.path) as file:
            while block := file.read(BLOCK):
                if b"\0" in block:
                    at = read + block.index(0)
                    raise ValueError(f"{self.path} looks binary (a NUL byte at {at}): expected a UTF-8 text file")
                yield self._text(decoder, block, read)
                read += len(block)
            yield self._text(decoder, b"", read)

    def _text(self, decoder: codecs.IncrementalDecoder, block: bytes, read: int) -> str:
        try:
            return decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            # Bytes that the decoder held back from the block before come first in the error's.
            at = read + error.start - (len(error.object) - len(block))
            raise ValueError(
                f"{self.path} is not UTF-8 (byte 0x{error.object[error.start]:02x} at {at}): convert it with "
                "iconv -t UTF-8"
            ) from None


def first_tokens(text: str | TextFile, most: int | None, encode: Callable[[str], list[int]]) -> list[int]:
    """The first ``most`` tokens of a text, or all; it is read and tokenised only as far as they need.

    >>> first_tokens("a b c d", 2, lambda text: [ord(word) for word in text.split()])
    [97, 98]
    """
    if most is None:
        return encode(text if isinstance(text, str) else text.beginning(None)[0])
    characters = (most + UNSETTLED) * CHARACTERS_PER_TOKEN
    while True:
        part, whole = text.beginning(characters) if isinstance(text, TextFile) else _beginning(text, characters)
        ids = encode(part)
        if whole or len(ids) >= most + UNSETTLED:
            return ids[:most]
        no_text = len(part) > max(CHARACTERS_TO_JUDGE, len(ids) * MOST_CHARACTERS_PER_TOKEN)
        if no_text or characters > (most + UNSETTLED) * MOST_CHARACTERS_PER_TOKEN:
            name = text.path if isinstance(text, TextFile) else "the text"
            raise ValueError(
                f"{name}: its first {len(part):,} characters hold {len(ids)} tokens for this tokenizer, and {most} are "
                "to be read; ask for fewer tokens, or check that it is a text"
            )
        characters *= 2


def tokens_around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    body = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(body) + 1):
        if whole[start : start + len(body)] == body:
            return whole[:start], whole[start + len(body) :]
    return [], []


def _beginning(text: str, characters: int) -> tuple[str, bool]:
    return (text, True) if len(text) <= characters else (_between_words(text[:characters]), False)


def _between_words(text: str) -> str:
    """The text up to its last space; all of it where it has none."""
    words = text.rstrip()
    cut = max(words.rfind(space) for space in " \n\t")
    return words[:cut] if cut > 0 else text
