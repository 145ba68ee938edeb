"""The diagnosis before training: tasks known to fail are hopeless, tasks known to work are fine."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from attnlab.dynamics import Bitext, bitext, count_table, learnable_from_cooccurrence, sharpness
from papers.ktiw.synthetic import FixedPermutation, MixtureOfPermutations, PermutationCopying

SHARED = Path(__file__).parents[3] / "shared" / "data" / "multi30k"


def both_sides(batch: dict[str, Tensor]) -> Bitext:
    return bitext(list(batch["input_ids"].numpy()), list(batch["labels"].numpy()))


def generated(sentences: int, *, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Zipfian words, translated one by one with noise, dropped words and another order."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, 301)
    sources = [rng.choice(300, rng.integers(3, 15), p=share / share.sum()) for _ in range(sentences)]
    targets = [rng.permutation(np.where(rng.random(len(x)) < 0.8, x, rng.integers(0, 300, len(x)))) for x in sources]
    return [x.tolist() for x in sources], [y.tolist() for y in targets]


@pytest.mark.parametrize("task", [PermutationCopying(batch_size=257), MixtureOfPermutations(batch_size=257)])
def test_permutations_are_hopeless(task: PermutationCopying | MixtureOfPermutations) -> None:
    corpus = both_sides(task.batch(0))
    assert sharpness(count_table(corpus)) == pytest.approx(0, abs=1e-9)
    verdict = learnable_from_cooccurrence(corpus)
    assert verdict.hopeless
    assert str(verdict).startswith("hopeless: 0.0000 bits")


@pytest.mark.parametrize("task", [PermutationCopying(words=60, batch_size=257), FixedPermutation(batch_size=257)])
def test_forty_of_sixty_words_are_fine(task: PermutationCopying | FixedPermutation) -> None:
    """beta is the same for both tasks (section 6.2), so co-occurrence cannot tell that the second is hard."""
    verdict = learnable_from_cooccurrence(both_sides(task.batch(0)))
    assert not verdict.hopeless
    assert verdict.bits > 3 * verdict.chance


def test_parallel_text_is_fine_and_random_pairs_of_it_are_not() -> None:
    sources, targets = generated(1000)
    assert not learnable_from_cooccurrence(bitext(sources, targets)).hopeless
    # A sentence's translation is the next one's: the words are the same, the pairs are not.
    astray = learnable_from_cooccurrence(bitext(sources, targets[1:] + targets[:1]), draws=9)
    assert abs(astray.excess) < 4 * astray.spread


def test_sharpness_by_hand() -> None:
    """Two words, each seen once with its own translation: one source word for each o, so nothing to choose between.

    With both in one sentence, C is flat; a sentence more of word 0 alone makes q(0) of target 0 equal 3/4.
    """
    assert sharpness(count_table(bitext([[0], [1]], [[0], [1]]))) == 0
    assert sharpness(count_table(bitext([[0, 1]], [[0, 1]]))) == 0
    # C[0] = {0: 3/2, 1: 1/2}, C[1] = {0: 1/2, 1: 1/2}; Trans(0|.) = 3/4, 1/2, Trans(1|.) = 1/4, 1/2.
    q, t = np.array([[3 / 4, 1 / 4], [1 / 2, 1 / 2]]), np.array([[3 / 4, 1 / 2], [1 / 4, 1 / 2]])
    p = q * t / (q * t).sum(1, keepdims=True)
    kl = (p * np.log2(p / q)).sum(1)
    table = count_table(bitext([[0, 1], [0]], [[0, 1], [0]]))
    assert sharpness(table, smoothing=0) == pytest.approx((2 * kl[0] + kl[1]) / 3)
    assert sharpness(table, smoothing=1e9) == pytest.approx(0, abs=1e-9)


def test_the_seed_decides() -> None:
    corpus = bitext(*generated(101))
    assert learnable_from_cooccurrence(corpus, seed=3) == learnable_from_cooccurrence(corpus, seed=3)
    assert learnable_from_cooccurrence(corpus, seed=3).chance != learnable_from_cooccurrence(corpus, seed=4).chance


def test_corpora_without_counts() -> None:
    assert learnable_from_cooccurrence(bitext([[], [1]], [[2], []])).hopeless
    with pytest.raises(ValueError, match="a corpus of 1 sentence pairs cannot"):
        learnable_from_cooccurrence(bitext([[1]], [[2]]))
    with pytest.raises(ValueError, match="at least 2, to know their spread, got 1"):
        learnable_from_cooccurrence(bitext([[1], [2]], [[2], [3]]), draws=1)


@pytest.mark.skipif(not SHARED.exists(), reason="Multi30k is not at hand")
def test_multi30k_is_fine() -> None:
    def ids(side: str) -> list[list[int]]:
        known: dict[str, int] = {}
        with gzip.open(SHARED / f"train.{side}.gz", "rt", encoding="utf-8") as lines:
            return [
                [known.setdefault(w, len(known)) for w in line.lower().split()]
                for _, line in zip(range(3000), lines, strict=False)
            ]

    verdict = learnable_from_cooccurrence(bitext(ids("en"), ids("de")))
    assert not verdict.hopeless
    assert verdict.excess > 0.1
