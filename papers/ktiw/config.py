"""Settings of KTIW's experiments: the trainings of a data set, the toy tasks, Figure 7 and our transformers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from attnlab.dynamics.proxy import ProxyConfig
from papers.ktiw.corpora import Corpus
from papers.ktiw.models.lstm_config import LSTM_CONFIGS, TranslatorConfig

__all__ = [
    "CLASSIFICATION",
    "EPOCHS",
    "TRANSLATION",
    "HeadsConfig",
    "LocalConfig",
    "PermutationsConfig",
    "StudyConfig",
    "study_config",
]

# A data set whose median text has more words than this has long texts, for which the proxy learns more slowly.
LONG_TEXTS = 100


@dataclass(frozen=True)
class StudyConfig:
    """A data set's trainings (A.8); ``evaluate`` are the first evaluations, then one every ``evaluate_every`` steps."""

    steps: int
    batch: int
    lr: float = 1e-3
    evaluate: tuple[int, ...] = ()
    evaluate_every: int = 250
    # Examples of either split that agreements are measured on.
    count: int = 4000
    # Rows of them that tau is measured on.
    tau_rows: int = 1000
    # Texts are cut after this many words.
    longest: int | None = None
    # Of the LSTMs.
    width: int = 256
    # A file of word vectors that the embeddings of classifiers start from (A.8); None: they start at random.
    glove: str | None = None
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    seed: int = 0

    def evaluate_at(self) -> tuple[int, ...]:
        """The steps at which a run is evaluated, the last one among them."""
        start = self.evaluate[-1] if self.evaluate else 0
        later = range(start + self.evaluate_every, self.steps + 1, self.evaluate_every)
        return tuple(step for step in (*self.evaluate, *later, self.steps) if step <= self.steps)


# A.8's; a translation has as many updates as its epochs need.
CLASSIFICATION = StudyConfig(steps=4000, batch=32, evaluate=(0, 10, 50, 100, 150, 200, 250))
TRANSLATION = StudyConfig(steps=0, batch=16, evaluate=(0, 50, 100, 500, 1000, 1500), evaluate_every=2000, count=1014)
EPOCHS = 20


def study_config(corpus: Corpus, *, epochs: int = EPOCHS) -> StudyConfig:
    """The paper's settings for this data set: 4,000 steps of 32 texts, or ``epochs`` of 16 sentence pairs."""
    if corpus.kind == "classification":
        long = float(np.median([len(row) for row in corpus.train[0]])) > LONG_TEXTS
        return replace(CLASSIFICATION, proxy=ProxyConfig(lr=5e-5 if long else 1.5e-4))
    return replace(TRANSLATION, steps=epochs * -(-len(corpus.train[0]) // TRANSLATION.batch))


@dataclass(frozen=True)
class PermutationsConfig:
    """Figures 3 and 6 and section 6.2: the toy copying tasks and their models."""

    seeds: int = 20
    length: int = 40
    batch: int = 128
    width: int = 256
    # Eqs. 1 and 2 as they are written. Otherwise attention has a bias and the context a linear layer, as the
    # parameters that the paper counts for its translator imply.
    literal: bool = True
    lr: float = 1e-3
    # Updates of Figure 3 and of copying.
    steps: int = 300
    # Updates after which heads are judged, alone and together (later even bad heads learn), and updates of Figure 6.
    head_steps: int = 200
    figure_6_steps: int = 400
    contexts: tuple[Literal["sum", "mean"], ...] = ("sum", "mean")
    # Updates of the fixed permutation, which the paper says is never learned.
    permute_steps: int = 1000
    heads: int = 8
    # The seed of all but the heads' initialisations, in Figure 6.
    base: int = 0
    # Head initialisations that are tried, and how many of either kind are enough.
    candidates: int = 64
    pool: int = 16
    data_seeds: int = 3
    seed: int = 0

    def model(self, task: Any, *, heads: int = 1) -> TranslatorConfig:
        """The translator for a task's vocabulary."""
        config = LSTM_CONFIGS["ktiw-permutations"]
        assert isinstance(config, TranslatorConfig)
        return replace(config, vocab=task.vocab_size, width=self.width, heads=heads, literal=self.literal)


@dataclass(frozen=True)
class LocalConfig:
    """Figure 7: the classifier of A.8 with uniform attention on keyword detection, measured on ``count`` sequences."""

    steps: int = 4000
    lr: float = 1e-3
    batch: int = 32
    count: int = 2048
    # The order of the four log-odds reverses within the first hundred steps.
    evaluate_early: int = 10
    evaluate_every: int = 100
    embedding: int = 300
    width: int = 256
    seeds: int = 3


@dataclass(frozen=True)
class HeadsConfig:
    """A small translation transformer, and when its heads are measured."""

    family: str = "attnlab"
    width: int = 256
    heads: int = 4
    layers: int = 2
    steps: int = 4000
    batch: int = 64
    lr: float = 5e-4
    warmup: int = 400
    dropout: float = 0.1
    sentences: int = 128
    evaluate: tuple[int, ...] = (0, 50, 100, 200, 400, 700, 1000, 1500, 2000, 3000, 4000)
    # Also the probe of each head alone: as many passes again for every head.
    each_head: bool = True
    seed: int = 0
