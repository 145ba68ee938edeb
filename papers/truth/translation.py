"""A translator of Multi30k, trained here, and the words that an aligner links in both directions.

Two tables of IBM Model 1 say which source word a target word comes from, one learned in each direction. A link counts
where both agree and are sure. It is an aligner's word, not an exact truth.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attnlab.data import ParallelSource
from attnlab.dynamics import bitext, fit_ibm, ibm_alpha
from attnlab.models import Transformer, TransformerConfig
from attnlab.provenance import write_json
from attnlab.training import CrossEntropy, Recipe, Schedule, Settings, load_weights, train
from papers.common.translation import TASKS, Corpus, corpus_bleu, mean_loss, read_task, tokenised, translate
from papers.truth.cases import Case, Target, some_of
from papers.truth.config import TruthConfig

__all__ = ["agreed_links", "quality", "read_corpus", "translation_cases", "translator"]

TASK = "multi30k-en-de"
# A link counts if each direction gives it at least this probability.
SURE = 0.5
EM_STEPS = 8
# Tokens of a translation, at most.
LONGEST = 80


def read_corpus(root: Path, config: TruthConfig) -> Corpus:
    """Multi30k, English to German, below a folder of data sets."""
    return tokenised(read_task(TASKS[TASK], root), vocab=config.vocab)


def translator(
    corpus: Corpus, config: TruthConfig, folder: Path, *, as_trained: bool = False
) -> tuple[Transformer, int]:
    """Train the model, or go on with it; the model and its updates.

    ``as_trained`` takes the newest checkpoint of a training that was ended before its last update.
    """
    torch.manual_seed(config.seed)
    model = Transformer(
        TransformerConfig(
            kind="encoder-decoder", vocab=config.vocab, width=2 * config.width, heads=2 * config.heads, layers=2,
            positions="sinusoidal", embed_scale=True, dropout=0.1, init="xavier",
        )
    )  # fmt: skip
    steps = config.translation_steps
    settings = Settings(
        steps=steps,
        recipe=Recipe(lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01),
        schedule=Schedule("inverse_sqrt", warmup=min(400, max(1, steps // 2))),
        seed=config.seed,
        checkpoint_seconds=60,
        precision="no",
    )
    source = _pairs(corpus, "train", config.seed)
    about = asdict(config)
    if not as_trained:
        train(model, source, terms=[CrossEntropy()], settings=settings, run_dir=folder, config=about, resume=True)
    return model, load_weights(model, folder)


def _pairs(corpus: Corpus, split: str, seed: int) -> ParallelSource:
    pad, bos, eos = _special(corpus)
    return ParallelSource(*corpus.ids[split], pad=pad, bos=bos, eos=eos, batch_size=64, seed=seed)


def quality(model: Transformer, updates: int, corpus: Corpus, folder: Path) -> dict[str, float]:
    """BLEU of greedy translations of the test set of 2016, and -log p of a token of it; found once, kept in a file."""
    path = folder / f"quality-{updates}.json"
    if not path.exists():
        model.eval()
        source = _pairs(corpus, "test", 0)
        batches = [source.batch(step) for step in range(source.steps_per_epoch)]
        said = translate(model, corpus, corpus.ids["test"][0], beams=1, longest=LONGEST)
        found = {
            "updates": updates,
            "bleu": corpus_bleu(said, corpus.texts["test"].target),
            "loss": float(mean_loss(model, batches, CrossEntropy())),
        }
        write_json(path, found)
    kept: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def translation_cases(corpus: Corpus, config: TruthConfig) -> list[Case]:
    """Sentences of the test sets: a target word comes from the source word that it is linked to."""
    _, bos, eos = _special(corpus)
    sources, targets = corpus.ids["tests"]
    links = agreed_links(corpus)
    words = tuple(int(word) for word in np.unique(np.concatenate(corpus.ids["valid"][0])))
    cases = []
    for number, (source, target, own) in enumerate(zip(sources, targets, links, strict=True)):
        linked = [
            Target(t, int(target[t]), (int(place),), tuple(range(len(source) + 1)), 1)
            for t, place in enumerate(own)
            if place >= 0
        ]
        chosen = some_of(linked, config.targets, f"{config.seed} translation {number}")
        ids, given = (*source.tolist(), eos), (bos, *target.tolist())
        cases.append(Case(ids, chosen, words, decoder=given))
    return cases


def _special(corpus: Corpus) -> tuple[int, int, int]:
    """The ids of padding, beginning and end."""
    special = corpus.tokeniser.specials
    assert special.pad is not None
    assert special.bos is not None
    assert special.eos is not None
    return special.pad, special.bos, special.eos


def agreed_links(corpus: Corpus) -> list[np.ndarray]:
    """For each test sentence, the source position of each target token; -1 where the two directions do not agree."""
    sides = corpus.ids["train"], corpus.ids["tests"]
    sources, targets = ([*sides[0][i], *sides[1][i]] for i in (0, 1))
    there, back = (_alignment(*pair, last=len(sides[1][0])) for pair in ((sources, targets), (targets, sources)))
    links = []
    for forward, backward in zip(there, back, strict=True):
        place = forward.argmax(1)
        rows = torch.arange(len(place))
        agreed = (backward.argmax(1)[place] == rows) & (forward[rows, place] >= SURE) & (backward[place, rows] >= SURE)
        links.append(torch.where(agreed, place, -1).numpy())
    return links


def _alignment(sources: list[np.ndarray], targets: list[np.ndarray], *, last: int) -> list[Tensor]:
    """p(source position) of each target token (target, source) for the last sentences."""
    model = fit_ibm(bitext(sources, targets), steps=EM_STEPS)
    alpha, _ = ibm_alpha(model.trans, bitext(sources[-last:], targets[-last:]))
    lengths = [len(target) for target in targets[-last:]]
    parts = alpha.split(lengths)
    return [part[:, : len(source)] for part, source in zip(parts, sources[-last:], strict=True)]
