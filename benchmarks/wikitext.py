"""WikiText as a reader would have it: ``python benchmarks/wikitext.py wiki.test.tokens wikitext.txt``.

WikiText's files put spaces around punctuation and write a hyphen inside a word as " @-@ ". A language model that was
trained on ordinary text is asked for such text here: spaces and hyphens are put back as they were.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from attnlab.data.readers import open_bytes

# What a space before, after or around it did not stand in the text.
RULES = (
    (re.compile(r" @([-,.])@ "), r"\1"),
    (re.compile(r" ([.,;:!?%)\]\u2019])"), r"\1"),
    (re.compile(r"([(\[$\u2018]) "), r"\1"),
    (re.compile(r" (n't|'s|'re|'ve|'ll|'d|'m)\b"), r"\1"),
    (re.compile(r"\" ([^\"]*) \""), r'"\1"'),
    (re.compile(r" ' (\w)"), r" '\1"),
    (re.compile(r" / "), "/"),
)


def detokenised(text: str) -> str:
    """The text with its spaces as they were.

    >>> detokenised(' He said " well @-@ known facts " , ( 1 @,@ 500 of them ) . ')
    'He said "well-known facts", (1,500 of them).'
    """
    for pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    return "\n".join(line.strip() for line in text.split("\n")).strip()


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    with open_bytes(source) as file:
        target.write_text(detokenised(file.read().decode()))


if __name__ == "__main__":
    main()
