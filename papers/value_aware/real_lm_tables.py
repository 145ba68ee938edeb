"""The tables of ``python -m papers value-aware-lm`` that are computed from the losses of windows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from attnlab.evaluation.intervals import Interval, paired_interval

__all__ = ["NOTES", "derived"]

Row = dict[str, Any]
Tables = Mapping[str, Sequence[Mapping[str, Any]]]
OBLIVIOUS = "top-r"
RIVALS = ("value-aware", "alpha-norm", "window", "window+sinks")
NOTES = {
    "windows": "Losses in nats per token of the windows from ``window`` on, under every mechanism.",
    "perplexity": "Perplexity per token, and the loss above that of exact attention on the same windows: low and high "
    "are the ends of its 95 % interval over windows. r of LSH counts the keys of one round, that of ORF its features.",
    "against_top_r": "How much loss a family saves against the r largest weights, with as many keys, window by window: "
    "positive is better than top-r; low and high are the ends of its 95 % interval.",
    "output_error": "Relative errors of W, of W v, of W v after W_O with all heads together, and of effective "
    "attention, on the calls of exact attention in one window.",
}


# The losses of windows, by length, family, r and spec.
Losses = dict[tuple[int, str, int | None, str], dict[int, float]]


def derived(tables: Tables) -> dict[str, list[Row]]:
    """``perplexity`` and ``against_top_r``."""
    losses: Losses = {}
    for row in tables["windows"]:
        own = losses.setdefault((row["length"], row["family"], row["r"], row["spec"]), {})
        own |= {row["window"] + i: loss for i, loss in enumerate(row["losses"])}
    return {"perplexity": _perplexity(losses), "against_top_r": _against_top_r(losses)}


def _perplexity(losses: Losses) -> list[Row]:
    exact = {length: own for (length, family, *_), own in losses.items() if family == "softmax"}
    rows = []
    for (length, family, r, spec), own in losses.items():
        loss = fmean(own.values())
        row = {"length": length, "family": family, "r": r, "spec": spec, "windows": len(own)}
        row |= {"perplexity": math.exp(loss), "loss": loss}
        above, low, high, _ = _paired(own, exact[length])
        rows.append(row | ({} if family == "softmax" else {"above": above, "low": low, "high": high}))
    return sorted(rows, key=lambda row: -row["length"])


def _against_top_r(losses: Losses) -> list[Row]:
    top = {(length, r): own for (length, family, r, _), own in losses.items() if family == OBLIVIOUS}
    rows = []
    for (length, family, r, _), own in losses.items():
        if family not in RIVALS or (length, r) not in top:
            continue
        other = top[length, r]
        saved, low, high, shared = _paired(other, own)
        mine, theirs = (fmean(values[w] for w in own.keys() & other.keys()) for values in (own, other))
        row = {"length": length, "family": family, "r": r, "windows": shared, "loss": mine, "loss_top_r": theirs}
        rows.append(row | {"saved": saved, "low": low, "high": high})
    return sorted(rows, key=lambda row: (-row["length"], RIVALS.index(row["family"]), row["r"]))


def _paired(own: Mapping[int, float], other: Mapping[int, float]) -> Interval:
    """By how much ``own`` loses more than ``other`` on the windows of both; windows have equally many tokens."""
    shared = sorted(own.keys() & other.keys())
    return paired_interval([own[w] for w in shared], [other[w] for w in shared])
