"""``python -m papers wiki-corpus``: the token stores that the shipped model and the experiments learn from."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from attnlab.data import TokenStore, load_store, load_tokeniser, train_bpe, train_wordpiece, write_store
from attnlab.data.overlap import Passages
from attnlab.data.readers import open_bytes
from attnlab.data.tokenisers import Tokeniser
from attnlab.progress import each, note
from attnlab.provenance import write_json
from papers.common.enwik8 import articles, wikitext_titles
from papers.common.translation import find_file

__all__ = ["WikiCorpus", "prepare_wiki_corpus", "wikitext_articles"]

HEADING = re.compile(r" = ([^=].*?) =\s*$")
SECTION = re.compile(r" (= )+")


@dataclass(frozen=True, eq=False)
class WikiCorpus:
    """The folder that ``wiki-corpus`` writes: token stores (train, valid, wikitext103-valid, wikitext103-test)."""

    folder: Path

    def tokeniser(self) -> Tokeniser:
        """The tokeniser of all stores."""
        return load_tokeniser(self.folder / "tokenizer")

    def store(self, name: str) -> TokenStore:
        """The store of this name."""
        return load_store(self.folder / name)


def prepare_wiki_corpus(
    enwik8: Path,
    wikitext: Path,
    out: Path,
    *,
    vocab: int = 8192,
    byte_level: bool = False,
    held_out: float = 0.01,
    seed: int = 0,
    limit: int | None = None,
) -> dict[str, Any]:
    """Write tokenizer, train, valid, wikitext103-valid and wikitext103-test below ``out``; what each holds.

    ``wikitext`` is the folder of wiki.valid.tokens and wiki.test.tokens (or .xz, .gz); enwik8's articles that share a
    title or thirteen words in a row with them are left out, and one in a hundred of the rest is held out. The tokeniser
    is a lower-cased WordPiece, with ``byte_level`` a byte-level BPE. ``limit``: only so many articles of each.
    """
    files = {name: find_file(wikitext, f"wiki.{name}.tokens") for name in ("valid", "test")}
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"{out} is not empty; name a new folder")
    note("reading WikiText-103")
    titles = [title for path in files.values() for title in wikitext_titles(path)]
    evaluated = {name: wikitext_articles(path, limit=limit) for name, path in files.items()}
    seen = Passages(text for documents, _ in evaluated.values() for text in documents)
    documents = []
    for article in islice(articles(enwik8, leave_out=titles, held_out=seen), limit):
        documents.append(f"{article.title}\n{article.text}")
        note(f"{len(documents):,} articles of {enwik8.name}")
    train, valid = _split(documents, held_out, seed)
    note("making the tokeniser")
    tokeniser = (train_bpe if byte_level else train_wordpiece)(train, vocab_size=vocab)
    tokeniser.save(out / "tokenizer")
    counts_by_store: dict[str, Any] = {}
    splits: list[tuple[str, list[str], dict[str, int]]] = [("train", train, {}), ("valid", valid, {})]
    splits += [(f"wikitext103-{name}", texts, counts) for name, (texts, counts) in evaluated.items()]
    for name, texts, counts in each(splits, lambda split: split[0]):
        store = write_store(out / name, texts, tokeniser, source=name)
        # Perplexity per word needs the words of the text as it was published.
        write_json(out / name / "meta.json", {**store.meta, **counts})
        counts_by_store[name] = {k: v for k, v in load_store(out / name).meta.items() if isinstance(v, int)}
    return counts_by_store


def wikitext_articles(path: Path, *, limit: int | None = None) -> tuple[list[str], dict[str, int]]:
    """(one plain text per article, its words and unknown words); @-@ @,@ @.@ undone, <unk> as [UNK].

    ``limit``: only the first so many articles.
    """
    articles_lines: list[list[str]] = []
    words = unknown = 0
    with open_bytes(path) as file:
        for raw in file:
            line = raw.decode("utf-8")
            if HEADING.match(line):
                if len(articles_lines) == limit:
                    break
                articles_lines.append([])
            if not line.strip() or not articles_lines:
                continue
            if SECTION.match(line):
                line = line.replace("=", "")
            words += len(line.split())
            unknown += line.split().count("<unk>")
            articles_lines[-1].append(_plain(line))
    return ["\n".join(lines) for lines in articles_lines if len(lines) > 1], {"words": words, "unknown_words": unknown}


def _plain(line: str) -> str:
    for joined in "-,.":
        line = line.replace(f" @{joined}@ ", joined)
    return line.replace("<unk>", "[UNK]").strip()


def _split(documents: Iterable[str], held_out: float, seed: int) -> tuple[list[str], list[str]]:
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    cut = max(1, round(len(shuffled) * held_out))
    if cut >= len(shuffled):
        raise ValueError(f"{len(shuffled)} articles are too few to hold out {held_out:.0%} of them")
    return shuffled[cut:], shuffled[:cut]
