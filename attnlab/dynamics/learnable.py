"""A diagnosis before training: can word translation be learned from a corpus' co-occurrence counts?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from attnlab.dynamics.corpus import Bitext, PairTable, count_table
from attnlab.progress import each

__all__ = ["Learnable", "learnable_from_cooccurrence", "sharpness"]


# Rare words co-occur with few others, so any table looks sharp for them. Each word gets so many occurrences of an
# average word in addition.
SMOOTHING = 10.0


@dataclass(frozen=True)
class Learnable:
    """``bits``: the corpus' sharpness; ``chance``: that of its sentences paired at random, ``spread`` over draws."""

    bits: float
    chance: float
    spread: float

    @property
    def excess(self) -> float:
        """Bits a target word that the pairing of the sentences adds; at 0 and below nothing can be learned from it."""
        return self.bits - self.chance

    @property
    def hopeless(self) -> bool:
        """Whether the counts distinguish the words of a sentence no better than those of random pairs."""
        # Rounding leaves some 1e-15 bits in a table that is flat.
        return self.excess <= max(3 * self.spread, 1e-9)

    def __str__(self) -> str:
        verdict = "hopeless" if self.hopeless else "fine"
        return f"{verdict}: {self.bits:.4f} bits a target word, {self.chance:.4f} by chance"


def sharpness(counts: PairTable, *, smoothing: float = SMOOTHING) -> float:
    """How far one step of EM moves the alignment away from uniform, in bits a target word, from the counts alone.

    For a target word o, a uniform alignment chooses source word i with q(i) = C[i, o] / C[., o]; after one step it is
    p(i) proportional to q(i) Trans(o | i), Trans from the counts and ``smoothing`` occurrences of an average word. The
    sharpness is KL(p || q), averaged over target words. It is 0 exactly
    when all source words that co-occur with o translate to it equally well, so that beta cannot prefer a position: for
    permutations of one set of words, and for mixtures of permutations too (A.3), whose mutual information is not 0.
    """
    if not len(counts):
        return 0.0
    _, target = np.unique(counts.target, return_inverse=True)
    weight = np.bincount(target, counts.value)
    q = counts.value / weight[target]
    _, source = np.unique(counts.source, return_inverse=True)
    prior = smoothing * weight / weight.sum()
    trans = (counts.value + prior[target]) / (np.bincount(source, counts.value) + smoothing)[source]
    ratio = trans / np.bincount(target, q * trans)[target]
    kl = np.bincount(target, q * ratio * np.log2(ratio))
    # A divergence is not negative, but rounding can make it so.
    return max(0.0, float((weight * kl).sum() / weight.sum()))


def learnable_from_cooccurrence(corpus: Bitext, *, draws: int = 3, seed: int = 0) -> Learnable:
    """The sharpness of a corpus' count table against that of its sentences paired at random, ``draws`` times.

    Any table of finite counts has some sharpness: only the excess over chance can be learned from.
    """
    if len(corpus) < 2:
        raise ValueError(f"a corpus of {len(corpus)} sentence pairs cannot be paired at random; give at least 2")
    if draws < 2:
        raise ValueError(f"draws must be at least 2, to know their spread, got {draws}")
    rng = np.random.default_rng(seed)
    chance = [
        sharpness(count_table(_repaired(corpus, rng.permutation(len(corpus)))))
        for _ in each(range(draws), lambda draw: f"sentences paired at random, draw {draw + 1}")
    ]
    return Learnable(sharpness(count_table(corpus)), float(np.mean(chance)), float(np.std(chance, ddof=1)))


def _repaired(corpus: Bitext, order: np.ndarray) -> Bitext:
    """The corpus with its target sentences in another order."""
    lengths = np.diff(corpus.target_at)[order]
    at = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    position = np.arange(at[-1]) + np.repeat(corpus.target_at[:-1][order] - at[:-1], lengths)
    return replace(corpus, target=corpus.target[position], target_at=at)
