"""Which differences between translators the test sentences can tell: corpus BLEU with the sentences drawn again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnlab.experiments.abc.summaries import Rows
from attnlab.experiments.abc.translators import SEARCHES
from attnlab.experiments.translating import bleu_counts, bleu_of
from attnlab.reports.claims import paired_bootstrap

__all__ = ["Comparison", "differences", "undecided"]

# What a claim calls close.
WITHIN = 0.5


@dataclass(frozen=True)
class Comparison:
    """A claim's pairs of models: the first of each is better, or within half a BLEU of the second (``close``)."""

    pairs: tuple[tuple[str, str], ...]
    close: bool = False
    search: str = "beam"


def differences(
    folder: Path,
    comparisons: Mapping[str, Comparison],
    references: Mapping[str, Sequence[str]],
    *,
    resamples: int = 1000,
) -> Rows:
    """Each pair's difference in BLEU and its 95 % interval (Koehn, 2004); sentences of all shared seeds are one set."""
    counts: dict[Path, np.ndarray] = {}

    def counted(path: Path, split: str) -> np.ndarray:
        if path not in counts:
            said = path.read_text(encoding="utf-8").splitlines()
            counts[path] = bleu_counts(said, references[split][: len(said)])
        return counts[path]

    def gap(a: np.ndarray, b: np.ndarray) -> float:
        return bleu_of(a.sum(0)) - bleu_of(b.sum(0))

    found = []
    for claim, comparison in comparisons.items():
        for pair in comparison.pairs:
            seeds = [_seeds(folder, key, comparison.search) for key in pair]
            shared = sorted(set(seeds[0]) & set(seeds[1]))
            if not shared:
                continue
            split = SEARCHES[comparison.search]
            first, second = (
                np.concatenate([counted(folder / f"{key}.{seed}.{comparison.search}.txt", split) for seed in shared])
                for key in pair
            )
            interval = paired_bootstrap(first, second, statistic=gap, resamples=resamples)  # type: ignore[arg-type]
            found.append(
                {
                    "claim": claim, "first": pair[0], "second": pair[1], "difference": interval.estimate,
                    "low": interval.low, "high": interval.high, "seeds": len(shared), "sentences": len(first),
                }
            )  # fmt: skip
    return found


def _seeds(folder: Path, key: str, search: str) -> list[int]:
    return [int(path.name.split(".")[-3]) for path in folder.glob(f"{key}.*.{search}.txt")]


def undecided(rows: Rows, comparisons: Mapping[str, Comparison]) -> dict[str, str]:
    """The claims that the sentences cannot decide, and why: an interval on both sides, and none against the claim."""
    found = {}
    for claim, comparison in comparisons.items():
        mine = [row for row in rows if row["claim"] == claim]
        if any(_verdict(row, comparison.close) is False for row in mine):
            continue
        open_ = [row for row in mine if _verdict(row, comparison.close) is None]
        if open_:
            told = "; ".join(f"{r['first']} less {r['second']}: {r['low']:.1f} to {r['high']:.1f}" for r in open_)
            found[claim] = f"BLEU when the sentences are drawn again: {told}"
    return found


def _verdict(row: Mapping[str, float], close: bool) -> bool | None:
    """Whether the interval is on the claim's side (true), on the other (false) or on both (none)."""
    low, high = row["low"], row["high"]
    if close:
        if low >= -WITHIN and high <= WITHIN:
            return True
        return False if low > WITHIN or high < -WITHIN else None
    if low > 0:
        return True
    return False if high < 0 else None
