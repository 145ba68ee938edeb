"""Part-of-speech tags: gold from CoNLL-U files, from spaCy where it is installed, or from a small tagger of our own."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attnlab.provenance import write_atomic

__all__ = ["PerceptronTagger", "read_conllu", "spacy_tags", "train_tagger"]

Tagged = list[tuple[str, str]]
_OPEN: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}


def read_conllu(path: Path | str) -> Iterator[Tagged]:
    """Sentences of a CoNLL-U file (plain, .gz or .xz) as (word, UPOS) pairs, without empty nodes and ranges."""
    path = Path(path)
    sentence: Tagged = []
    with _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            line = line.rstrip("\n")
            if not line:
                if sentence:
                    yield sentence
                sentence = []
            elif not line.startswith("#"):
                fields = line.split("\t")
                if len(fields) != 10:
                    raise ValueError(
                        f"{path}, line {number}: CoNLL-U has 10 fields separated by tabs, got {len(fields)}"
                    )
                if fields[0].isdigit():
                    sentence.append((fields[1], fields[3]))
    if sentence:
        yield sentence


def spacy_tags(sentences: Iterable[Sequence[str]], model: str = "en_core_web_sm") -> list[list[str]]:
    """UPOS tags of words that are already split, from a spaCy pipeline on this machine."""
    try:
        import spacy
    except ImportError:
        raise ValueError(
            "spacy_tags needs spaCy and a pipeline: pip install spacy; or train_tagger on a CoNLL-U file"
        ) from None
    pipeline = spacy.load(model)
    docs = [spacy.tokens.Doc(pipeline.vocab, words=list(words)) for words in sentences]
    return [[token.pos_ for token in doc] for doc in pipeline.pipe(docs)]


class PerceptronTagger:
    """A greedy tagger with averaged perceptron weights (Collins, 2002); train one with ``train_tagger``."""

    def __init__(self, weights: dict[str, dict[str, float]], tags: Sequence[str]) -> None:
        self.weights = weights
        self.tags = sorted(tags)

    def tag(self, words: Sequence[str]) -> list[str]:
        """One tag per word."""
        tags: list[str] = []
        for i in range(len(words)):
            tags.append(_best(self.weights, self.tags, _features(words, i, tags)))
        return tags

    def accuracy(self, sentences: Iterable[Tagged]) -> float:
        """The share of words whose tag is the gold one."""
        right = total = 0
        for sentence in sentences:
            predicted = self.tag([word for word, _ in sentence])
            right += sum(a == b for a, (_, b) in zip(predicted, sentence, strict=True))
            total += len(sentence)
        return right / max(1, total)

    def save(self, path: Path | str) -> Path:
        """Write the weights as JSON."""
        return write_atomic(path, json.dumps({"tags": self.tags, "weights": self.weights}, ensure_ascii=False))

    @classmethod
    def load(cls, path: Path | str) -> PerceptronTagger:
        """Read what ``save`` wrote."""
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(stored["weights"], stored["tags"])


def train_tagger(
    sentences: Iterable[Tagged], *, epochs: int = 5, seed: int = 0, keep: float = 0.05
) -> PerceptronTagger:
    """Learn tags from gold sentences; weights whose average is below ``keep`` are dropped, which makes the file small.

    >>> gold = [[("the", "DET"), ("cat", "NOUN"), ("sleeps", "VERB")], [("the", "DET"), ("dog", "NOUN")]]
    >>> train_tagger(gold).tag(["the", "bird", "sings"])
    ['DET', 'NOUN', 'VERB']
    """
    data = list(sentences)
    tags = sorted({tag for sentence in data for _, tag in sentence})
    if not tags:
        raise ValueError("train_tagger needs at least one tagged sentence")
    weights: dict[str, dict[str, float]] = defaultdict(dict)
    totals: dict[tuple[str, str], float] = defaultdict(float)
    since: dict[tuple[str, str], int] = defaultdict(int)
    step = 0

    def change(feature: str, tag: str, by: float) -> None:
        # For the average over steps: the old weight times the number of steps that it was in use.
        key = (feature, tag)
        old = weights[feature].get(tag, 0.0)
        totals[key] += (step - since[key]) * old
        since[key] = step
        weights[feature][tag] = old + by

    order = random.Random(seed)
    for _ in range(epochs):
        order.shuffle(data)
        for sentence in data:
            words: list[str] = [word for word, _ in sentence]
            predicted: list[str] = []
            for i, (_, gold) in enumerate(sentence):
                step += 1
                features = _features(words, i, predicted)
                guess = _best(weights, tags, features)
                if guess != gold:
                    for feature in features:
                        change(feature, gold, 1.0)
                        change(feature, guess, -1.0)
                predicted.append(guess)
    averaged: dict[str, dict[str, float]] = {}
    for feature, by_tag in weights.items():
        means = {t: (totals[feature, t] + (step - since[feature, t]) * w) / step for t, w in by_tag.items()}
        kept = {t: round(mean, 3) for t, mean in means.items() if abs(mean) >= keep}
        if kept:
            averaged[feature] = kept
    return PerceptronTagger(averaged, tags)


def _best(weights: dict[str, dict[str, float]], tags: Sequence[str], features: Iterable[str]) -> str:
    score = dict.fromkeys(tags, 0.0)
    for feature in features:
        for tag, weight in weights.get(feature, {}).items():
            score[tag] += weight
    return max(tags, key=lambda tag: (score[tag], tag))


def _features(words: Sequence[str], i: int, predicted: Sequence[str]) -> list[str]:
    word = words[i]
    low = word.lower()
    before, after = (words[j].lower() if 0 <= j < len(words) else "" for j in (i - 1, i + 1))
    last, second = (predicted[i - j] if i >= j else "" for j in (1, 2))
    shape = "".join("d" if c.isdigit() else "X" if c.isupper() else "x" if c.isalpha() else c for c in word)[:4]
    return [
        "bias",
        f"word={low}",
        f"end3={low[-3:]}",
        f"end2={low[-2:]}",
        f"end1={low[-1:]}",
        f"start={low[:2]}",
        f"shape={shape}",
        f"last={last}",
        f"last2={second}+{last}",
        f"last+word={last}+{low}",
        f"before={before}",
        f"after={after}",
        f"after3={after[-3:]}",
        f"first={i == 0}",
    ]
