"""WikiText-103 by whole words, as the paper's causal LMs read it: ``python -m papers value-aware-words``.

The vocabulary is every word of the training file, so that only <unk> of the published text is unknown. Articles are the
documents; the end of each line within one is the word <eos>.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from attnlab.data import load_store, train_words, write_store
from attnlab.data.readers import numbered_lines
from attnlab.progress import each, note
from papers.common.wiki_corpus import HEADING

__all__ = ["articles_of", "prepare_words"]

# The stores that the causal LMs read, and the file that each is made from.
SPLITS = {"train": "train", "valid": "valid", "wikitext103-test": "test"}
END_OF_LINE = " <eos> "
UNKNOWN = "<unk>"
WORD = r"\S+"


def prepare_words(wikitext: Path, out: Path, *, limit: int | None = None) -> dict[str, Any]:
    """Write tokenizer, train, valid and wikitext103-test below ``out``; returns the counts of each.

    ``limit``: only the first so many articles of each file.

    ``wikitext`` is the folder of wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, plain or compressed.
    """
    files = {store: _tokens_file(wikitext, split) for store, split in SPLITS.items()}
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"{out} is not empty; name a new folder")
    note("making the vocabulary")
    words = train_words(islice(articles_of(files["train"]), limit), min_count=1, pattern=WORD, lowercase=False)
    tokeniser = replace(words, words=tuple(word for word in words.words if word != UNKNOWN))
    tokeniser.save(out / "tokenizer")
    counts: dict[str, Any] = {"vocabulary": tokeniser.vocab_size}
    for name, path in each(list(files.items()), lambda file: file[0]):
        write_store(out / name, islice(articles_of(path), limit), tokeniser, source=path.name)
        counts[name] = {key: n for key, n in load_store(out / name).meta.items() if isinstance(n, int)}
    return counts


def articles_of(path: Path) -> Iterator[str]:
    """The articles of a file as published; empty lines are left out."""
    lines: list[str] = []
    for _, line in numbered_lines(path):
        if HEADING.match(line) and lines:
            yield END_OF_LINE.join(lines)
            lines = []
        if line.strip():
            lines.append(line.strip())
    if lines:
        yield END_OF_LINE.join(lines)


def _tokens_file(folder: Path, split: str) -> Path:
    files = sorted(folder.glob(f"wiki.{split}.tokens*"))
    if not files:
        raise ValueError(
            f"{folder} holds no wiki.{split}.tokens (nor .xz, .gz); the paper's vocabulary needs all three"
        )
    return files[0]
