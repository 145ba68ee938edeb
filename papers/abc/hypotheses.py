"""What trained translators say of held-out sets, in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from papers.abc.translators import Variant

__all__ = ["SEARCHES", "Place", "hypotheses_file", "hypotheses_in", "split_of"]

Split = TypeVar("Split")
# A variant's key, its seed, and how it translates.
Place = tuple[str, int, str]
# Ways of translating, and the set that is translated: greedily by the last weights, or with beams by averaged ones.
SEARCHES = {"greedy": "valid", "beam": "tests"}


def split_of(splits: Mapping[str, Split], how: str) -> Split:
    """What is translated this way: all of the test sets where there are several."""
    return splits[SEARCHES[how] if SEARCHES[how] in splits else "test"]


def hypotheses_file(out: Path, data: str, v: Variant, seed: int, how: str) -> Path:
    """Where a variant's translations lie."""
    return out / data / f"{v.key}.{seed}.{how}.txt"


def hypotheses_in(outs: Sequence[Path], data: str) -> dict[Place, list[str]]:
    """What was said of a corpus, by variant, seed and search; later folders win."""
    found = {}
    for path in (path for out in outs for path in sorted((out / data).glob("*.txt"))):
        key, seed, how, _ = path.name.rsplit(".", 3)
        found[key, int(seed), how] = path.read_text(encoding="utf-8").splitlines()
    return found
