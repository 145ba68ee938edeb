"""``attnlab diagnose``: before any training, is word translation learnable from a corpus' co-occurrence counts?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnlab.data import Malformed, read_parallel
from attnlab.dynamics import Bitext, Learnable, bitext, count_table, learnable_from_cooccurrence

__all__ = ["diagnose", "diagnose_files", "diagnosis_lines"]

WORD = re.compile(r"\w+|[^\w\s]")


# Natural text of three corpora (Multi30k, IWSLT'14, WMT) is "fine" from 500 pairs on, and often not below.
ENOUGH = 1000
# Below so many bits by chance, every word co-occurs with every other equally: that is certain from any number of pairs.
FLAT = 1e-6


def diagnose(corpus: Bitext, *, name: str, draws: int = 3, seed: int = 0) -> dict[str, Any]:
    """A row of numbers about a corpus: the bits a target word that the pairing adds, and the verdict."""
    learnable = learnable_from_cooccurrence(corpus, draws=draws, seed=seed)
    return {
        "corpus": name,
        "pairs": len(corpus),
        "source_words": len(np.unique(corpus.source)),
        "target_words": len(np.unique(corpus.target)),
        "table_entries": len(count_table(corpus)),
        "bits": round(learnable.bits, 4),
        "by_chance": round(learnable.chance, 4),
        "spread": round(learnable.spread, 5),
        "excess": round(learnable.excess, 4),
        "verdict": _verdict(learnable, len(corpus)),
    }


def diagnose_files(
    source: Path | str, target: Path | str | None = None, *, lines: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """The diagnosis of two parallel files, or of a tsv, by lower-cased words; empty pairs are left out and counted."""
    if lines is not None and lines < 2:
        raise ValueError(f"a diagnosis needs at least 2 lines, got {lines}")
    bad = Malformed("skip")
    pairs = read_parallel(source, target, malformed=bad, most=lines)
    if target is None and not pairs.source and bad.count:
        raise ValueError(f"{source} has no line with two fields between tabs; name the file of the translations too")
    sides = [_ids(side) for side in pairs]
    if len(sides[0]) < 2:
        raise ValueError(f"{source} has {len(sides[0])} sentence pairs; a diagnosis needs at least 2")
    name = Path(source).name if target is None else f"{Path(source).name} / {Path(target).name}"
    return diagnose(bitext(*sides), name=name, seed=seed) | {"left_out": bad.count}


def diagnosis_lines(diagnosis: dict[str, Any]) -> list[str]:
    """The diagnosis in words."""
    verdict = {
        "fine": "fine: the counts tell which words translate to which, so a model can learn it before it attends",
        "too little": f"too little text to tell: the counts do not tell yet which words translate to which; give some "
        f"{ENOUGH} pairs or more",
        "hopeless": "hopeless: the counts are those of sentences paired at random, so nothing tells where to attend",
    }[diagnosis["verdict"]]
    return [
        verdict,
        f"{diagnosis['excess']:.4f} bits a target word above chance ({diagnosis['bits']:.4f} against "
        f"{diagnosis['by_chance']:.4f}, spread {diagnosis['spread']:.5f})",
        f"{diagnosis['pairs']} pairs, {diagnosis['source_words']} and {diagnosis['target_words']} words, "
        f"{diagnosis['table_entries']} of their pairs co-occur; {diagnosis['left_out']} pairs left out",
    ]


def _verdict(learnable: Learnable, pairs: int) -> str:
    if not learnable.hopeless:
        return "fine"
    return "too little" if pairs < ENOUGH and learnable.chance > FLAT else "hopeless"


def _ids(texts: Sequence[str]) -> list[list[int]]:
    known: dict[str, int] = {}
    return [[known.setdefault(word, len(known)) for word in WORD.findall(text.lower())] for text in texts]
