"""KTIW's data sets: read from a folder of downloads, tokenised as in appendix A.8, saved and loaded.

A data set's folder is named as in ``READERS``; ``train``, ``val`` or ``test`` begin its files' names, which may be
compressed. Ids 0 to 3 are <pad> <unk> <s> </s>.
"""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.data import Labelled, Malformed, Pairs, encode_pairs, read_labelled, read_parallel, read_trees
from attnlab.data.readers import numbered_lines
from attnlab.data.vocabularies import train_sentencepiece, train_words
from attnlab.provenance import write_atomic
from papers.ktiw.archives import read_imdb, read_newsgroups, read_reviews

__all__ = ["READERS", "TITLES", "Corpus", "load_corpus", "prepare", "save_corpus", "some_examples", "statistics"]

Rows = list[np.ndarray]
# Texts are cut after this many words. The paper leaves longer texts of Amazon out and does not mention the others.
LONGEST = 400
VALIDATION = 4000
SHORT = 11
# The array of a file that holds everything but the ids, as JSON.
DESCRIPTION = "told"
WORD, WORD_WITHOUT_UNDERSCORE = r"\w+", r"[^\W_]+"


@dataclass(frozen=True, eq=False)
class Corpus:
    """A data set in ids: ``train`` and ``valid`` are (sources, targets), where a classification's target is a label."""

    name: str
    kind: str
    words: tuple[str, ...]
    train: tuple[Rows, Any]
    valid: tuple[Rows, Any]
    # Where the data set differs from the paper's in a way that its files decide.
    remark: str = ""

    @property
    def vocab(self) -> int:
        """The number of ids."""
        return len(self.words)

    def split(self, name: str) -> tuple[Rows, Any]:
        """The split of this name, "train" or "valid"."""
        return {"train": self.train, "valid": self.valid}[name]


def prepare(name: str, folder: Path | str, *, vocab: int = 8000) -> Corpus:
    """Read and tokenise one data set of ``folder``; ``vocab`` is the size of a translation's SentencePiece model."""
    if name not in READERS:
        raise ValueError(f"no data set named {name!r}; there are {', '.join(READERS)}")
    where = Path(folder) / name.removesuffix("-short")
    if not where.is_dir():
        raise ValueError(f"{where} is no folder; put the files of {TITLES[name]} there as they are downloaded")
    return READERS[name](name, where, vocab)


def some_examples(corpus: Corpus, count: int | None) -> Corpus:
    """The corpus with at most ``count`` examples of either split, taken evenly, so that all classes stay."""
    if count is None:
        return corpus

    def thinned(sides: tuple[Rows, Any]) -> tuple[Rows, Any]:
        every = -(-len(sides[0]) // count)
        return sides[0][::every], sides[1][::every]

    return replace(corpus, train=thinned(corpus.train), valid=thinned(corpus.valid))


def save_corpus(corpus: Corpus, path: Path | str) -> Path:
    """Write a corpus as .npz.xz: ids of 16 bits where they fit."""
    arrays: dict[str, np.ndarray] = {}
    for split, sides in (("train", corpus.train), ("valid", corpus.valid)):
        for side, rows in zip(("source", "target"), sides, strict=True):
            flat = np.concatenate(rows) if isinstance(rows, list) else np.asarray(rows)
            arrays[f"{split}_{side}"] = flat.astype(np.uint16 if corpus.vocab <= 1 << 16 else np.uint32)
            if isinstance(rows, list):
                arrays[f"{split}_{side}_lengths"] = np.array([len(row) for row in rows], np.uint16)
    description = {"name": corpus.name, "kind": corpus.kind, "words": corpus.words, "remark": corpus.remark}
    arrays[DESCRIPTION] = np.frombuffer(json.dumps(description, ensure_ascii=False).encode(), np.uint8)
    out = io.BytesIO()
    np.savez(out, **arrays)  # type: ignore[arg-type]
    return write_atomic(path, lzma.compress(out.getvalue(), preset=9))


def load_corpus(path: Path | str) -> Corpus:
    """Read what ``save_corpus`` wrote."""
    with np.load(io.BytesIO(lzma.decompress(Path(path).read_bytes())), allow_pickle=False) as arrays:
        description = json.loads(arrays[DESCRIPTION].tobytes().decode())

        def side(name: str) -> Any:
            flat = arrays[name].astype(np.int64)
            if f"{name}_lengths" not in arrays:
                return flat
            return np.split(flat, np.cumsum(arrays[f"{name}_lengths"].astype(np.int64))[:-1])

        train, valid = ((side(f"{split}_source"), side(f"{split}_target")) for split in ("train", "valid"))
    return Corpus(**{**description, "words": tuple(description["words"])}, train=train, valid=valid)


def statistics(corpus: Corpus) -> dict[str, Any]:
    """A row of Table 9: medians of the lengths, numbers of examples, vocabulary."""
    row: dict[str, Any] = {"dataset": TITLES[corpus.name]}
    for split, sides in (("train", corpus.train), ("valid", corpus.valid)):
        rows = [side for side in sides if isinstance(side, list)]
        row[f"{split}_length"] = " / ".join(str(int(np.median([len(r) for r in side]))) for side in rows)
        row[f"{split}_count"] = len(sides[0])
    return row | {"vocabulary": corpus.vocab}


def _classification(
    name: str,
    train: Labelled,
    valid: Labelled,
    *,
    pattern: str = WORD,
    numbers: bool = True,
    longest: int | None = None,
) -> Corpus:
    """Words seen at least three times; the others, and with ``numbers`` off integers of several digits, are <unk>."""
    clean = [[text.replace("<br />", " ") for text in part.texts] for part in (train, valid)]
    tokeniser = train_words(clean[0], pattern=pattern, numbers=numbers)
    splits = []
    for texts, part in zip(clean, (train, valid), strict=True):
        ids = tokeniser.encode_batch(texts)
        kept = [
            (row, y) for row, y in zip(ids, part.labels, strict=True) if row and (not longest or len(row) < longest)
        ]
        rows = [np.array(row[:LONGEST], np.int64) for row, _ in kept]
        splits.append((rows, np.array([y for _, y in kept], np.int64)))
    for split, (_, labels) in zip(("train", "validation"), splits, strict=True):
        if len(np.unique(labels)) < 2:
            raise ValueError(f"{name}: the {split} examples are all of one class; a classifier needs both")
    return Corpus(name, "classification", (*tokeniser.names, *tokeniser.words), splits[0], splits[1])


def _translation(name: str, train: Pairs, valid: Pairs, vocab: int) -> Corpus:
    tokeniser = train_sentencepiece([*train.source, *train.target], vocab_size=vocab)
    sides: list[Any] = [encode_pairs(pairs, tokeniser, max_length=LONGEST) for pairs in (train, valid)]
    return Corpus(name, "translation", tokeniser.pieces, sides[0], sides[1])


def _file(folder: Path, *starts: str) -> Path:
    """The file whose name begins so, in the folder or in one that an archive was unpacked to."""
    for start in starts:
        for pattern in (f"{start}*", f"*/{start}*"):
            files = sorted(path for path in folder.glob(pattern) if path.is_file())
            if files:
                return files[0]
    raise ValueError(f"{folder} has no file whose name begins with {' or '.join(starts)}")


def _is_repackaged(folder: Path) -> bool:
    """Whether a folder has a text a line, instead of a published archive with a text a file."""
    return any(folder.glob("*.jsonl*"))


def _sample(data: Labelled, n: int, *, seed: int = 0) -> Labelled:
    """At most n examples at random, in their order."""
    chosen = np.sort(np.random.default_rng(seed).permutation(len(data.texts))[:n])
    return _choose(data, chosen)


def _choose(data: Labelled, chosen: Sequence[int] | np.ndarray) -> Labelled:
    return Labelled([data.texts[i] for i in chosen], [data.labels[i] for i in chosen], data.names)


def _split(data: Labelled, n: int, *, seed: int = 0) -> tuple[Labelled, Labelled]:
    """n examples drawn at random as the second part, and the other examples as the first."""
    order = np.random.default_rng(seed).permutation(len(data.texts))
    return _choose(data, np.sort(order[n:])), _choose(data, np.sort(order[:n]))


def _two_splits(folder: Path, published: Callable[[Path, str], Labelled]) -> tuple[Labelled, Labelled]:
    """train and test, from files of a text a line or from the published archive."""
    if _is_repackaged(folder):
        return read_labelled(_file(folder, "train")), read_labelled(_file(folder, "test"))
    return published(folder, "train"), published(folder, "test")


def _imdb(name: str, folder: Path, _: int) -> Corpus:
    train, test = _two_splits(folder, read_imdb)
    return _classification(name, train, _sample(test, VALIDATION))


def _newsgroups(name: str, folder: Path, _: int) -> Corpus:
    train, test = _two_splits(folder, read_newsgroups)
    return _classification(name, train, test, pattern=WORD_WITHOUT_UNDERSCORE, numbers=False)


def _sst(name: str, folder: Path, _: int) -> Corpus:
    return _classification(name, *(read_trees(_file(folder, split)) for split in ("train", "test")))


def _ag_news(name: str, folder: Path, _: int) -> Corpus:
    """World against business; a tsv is (description, topic), a csv (class, title, description) without a header.

    A text is the title and the description. Where one of the files has no titles, they are left out of both.
    """
    paths = {split: _file(folder, split) for split in ("train", "test")}
    without = [path.name for path in paths.values() if ".tsv" in path.name]
    train, test = (_ag_news_file(path, titles=not without) for path in paths.values())
    corpus = _classification(name, train, _sample(test, VALIDATION), numbers=False)
    return replace(corpus, remark=f"descriptions only: {without[0]} has no titles") if without else corpus


def _ag_news_file(path: Path, *, titles: bool) -> Labelled:
    if ".tsv" in path.name:
        return read_labelled(path, header=["text", "label"], classes={"World": 0, "Business": 1})
    columns: dict[str, Any] = {"header": ["label", "title", "text"], "classes": {"1": 0, "3": 1}}
    data = read_labelled(path, **columns)
    if not titles:
        return data
    titled = read_labelled(path, text="title", **columns)
    texts = [f"{title} {text}" for title, text in zip(titled.texts, data.texts, strict=True)]
    return Labelled(texts, data.labels, data.names)


def _amazon(name: str, folder: Path, _: int) -> Corpus:
    data = read_labelled(_file(folder, "labelled", "train")) if _is_repackaged(folder) else read_reviews(folder)
    return _classification(name, *_split(data, min(VALIDATION, len(data.texts) // 8)), longest=400)


def _yelp(name: str, folder: Path, _: int) -> Corpus:
    def stars(label: str) -> int | None:
        number = float(label.rsplit(" ", 1)[-1])
        return None if 2 < number < 4 else int(number >= 4)

    files = sorted([*folder.glob("*.csv*"), *folder.glob("*/*.csv*")])
    if any(path.name.startswith("train.csv") for path in files):
        return _yelp_polarity(name, folder)
    parts = [read_labelled(path, label="label2", classes=stars) for path in files]
    data = Labelled([t for p in parts for t in p.texts], [y for p in parts for y in p.labels], ("negative", "positive"))
    return _classification(name, *_split(data, min(VALIDATION, len(data.texts) // 8)))


def _yelp_polarity(name: str, folder: Path) -> Corpus:
    """The files of Zhang et al. (2015), as published: class 1 or 2 and text, without a header."""
    columns: dict[str, Any] = {"header": ["label", "text"], "classes": {"1": 0, "2": 1}}
    train, test = (read_labelled(_file(folder, f"{split}.csv"), **columns) for split in ("train", "test"))
    return _classification(name, train, _sample(test, VALIDATION))


def _sms(name: str, folder: Path, _: int) -> Corpus:
    """SMSSpamCollection as it is unpacked: ham or spam, a tab, the message."""
    texts, labels, bad = [], [], Malformed("skip")
    path = _file(folder, "SMSSpamCollection")
    for number, line in numbered_lines(path, malformed=bad):
        label, tab, text = line.partition("\t")
        if tab and label in ("ham", "spam"):
            texts.append(text)
            labels.append(int(label == "spam"))
        else:
            bad.add(path, number, "not ham or spam, a tab and a message")
    return _classification(name, *_split(Labelled(texts, labels, ("ham", "spam")), len(texts) // 5))


def _two_files(source: str, target: str) -> Callable[[str, Path, int], Corpus]:
    def read(name: str, folder: Path, vocab: int) -> Corpus:
        splits = []
        for starts in (("train", "lr_sample_train"), ("val", "valid")):
            left, right = (_file(folder, *(f"{start}.{side}" for start in starts)) for side in (source, target))
            pairs = read_parallel(left, right, malformed=Malformed("skip"))
            # SentencePiece is trained on words, so the BPE of IWSLT'14's sample is undone.
            splits.append(Pairs(*([text.replace("@@ ", "") for text in side] for side in pairs)))
        return _translation(name, splits[0], splits[1], vocab)

    return read


def _short_pairs(name: str, folder: Path, vocab: int) -> Corpus:
    """Multi30k's pairs of at most eleven pieces on either side, for machines without a GPU."""
    whole = _two_files("en", "de")(name, folder, vocab)

    def short(sides: tuple[Rows, Rows]) -> tuple[Rows, Rows]:
        kept = [(x, y) for x, y in zip(*sides, strict=True) if max(len(x), len(y)) <= SHORT]
        return [x for x, _ in kept], [y for _, y in kept]

    return replace(whole, train=short(whole.train), valid=short(whole.valid))


def _news_commentary(name: str, folder: Path, vocab: int) -> Corpus:
    """news-commentary-v14's tsv as it is downloaded; purely numerical pairs are left out, a tenth is validation."""
    pairs = read_parallel(_file(folder, "news-commentary"), malformed=Malformed("skip"))
    kept = [(x, y) for x, y in zip(*pairs, strict=True) if any(c.isalpha() for c in x) and any(c.isalpha() for c in y)]
    order = np.random.default_rng(0).permutation(len(kept))
    cut = len(kept) // 10
    train, valid = (
        Pairs(*map(list, zip(*(kept[i] for i in part), strict=True))) for part in (order[cut:], order[:cut])
    )
    return _translation(name, train, valid, vocab)


READERS: dict[str, Callable[[str, Path, int], Corpus]] = {
    "imdb": _imdb,
    "yelp": _yelp,
    "ag-news": _ag_news,
    "20newsgroups": _newsgroups,
    "sst-trees": _sst,
    "amazon": _amazon,
    "sms": _sms,
    "multi30k": _two_files("en", "de"),
    "multi30k-short": _short_pairs,
    "iwslt14-de-en": _two_files("de", "en"),
    "news-it-pt": _news_commentary,
    "news-en-nl": _news_commentary,
    "news-en-pt": _news_commentary,
}
# The data sets' names in the paper's tables.
TITLES = {
    "imdb": "IMDB",
    "yelp": "Yelp",
    "ag-news": "AG News",
    "20newsgroups": "20 NG",
    "sst-trees": "SST",
    "amazon": "Amazon",
    "sms": "SMS",
    "multi30k": "Multi30k",
    "multi30k-short": "Multi30k, short",
    "iwslt14-de-en": "IWSLT14",
    "news-it-pt": "News It-Pt",
    "news-en-nl": "News En-Nl",
    "news-en-pt": "News En-Pt",
}
