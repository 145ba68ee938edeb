"""Readings against the truth: the translator, and the links of its aligner."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from papers.common.translation import Corpus
from papers.truth.config import CONFIGS
from papers.truth.translation import agreed_links, quality, read_corpus, translation_cases, translator

CONFIG = replace(CONFIGS["smoke"], vocab=330, width=8, heads=1, translation_steps=2)
# Words of one token each, in another order: the adjective comes last.
NOUNS = {"dog": "hund", "cat": "katze", "man": "mann", "tree": "baum", "house": "haus", "boat": "boot"}
ADJECTIVES = {"red": "rot", "big": "dick", "old": "alt", "new": "neu", "wet": "nass", "hot": "warm"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root = tmp_path_factory.mktemp("data")
    (root / "multi30k").mkdir()
    draw = random.Random(0)
    for name, count in (("train", 400), ("val", 70), ("test_2016_flickr", 70)):
        pairs = [(draw.choice([*ADJECTIVES]), draw.choice([*NOUNS])) for _ in range(count)]
        sides = {
            "en": [f"{adjective} {noun}" for adjective, noun in pairs],
            "de": [f"{NOUNS[noun]} {ADJECTIVES[adjective]}" for adjective, noun in pairs],
        }
        for side, lines in sides.items():
            (root / "multi30k" / f"{name}.{side}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_corpus(root, CONFIG)


def test_the_aligner_links_each_word_to_its_translation(corpus: Corpus) -> None:
    assert all(len(row) == 2 for row in corpus.ids["tests"][0]), "each word is one token"
    assert [links.tolist() for links in agreed_links(corpus)] == [[1, 0]] * 70
    for case, source in zip(translation_cases(corpus, CONFIG), corpus.ids["tests"][0], strict=True):
        assert case.ids[:-1] == tuple(source)
        for target in case.targets:
            # The query reads the word before the one that it predicts.
            assert case.decoder[target.query + 1 :][:1] in ((target.answer,), ())
            assert target.sources == (1 - target.query,)
            assert target.candidates == (0, 1, 2)


def test_a_training_that_was_ended_is_read_as_it_is(corpus: Corpus, tmp_path: Path) -> None:
    model, updates = translator(corpus, CONFIG, tmp_path)
    assert updates == 2
    longer = replace(CONFIG, translation_steps=9)
    with pytest.raises(RuntimeError, match="other settings"):
        translator(corpus, longer, tmp_path)
    same, updates = translator(corpus, longer, tmp_path, as_trained=True)
    assert updates == 2
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    good = quality(same, updates, corpus, tmp_path)
    assert (good["updates"], 0 <= good["bleu"] <= 100) == (2, True)
    assert 1 < good["loss"] < 12
    # It is found once for these updates.
    assert quality(None, updates, corpus, tmp_path) == good  # type: ignore[arg-type]
