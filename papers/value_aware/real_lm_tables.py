"""The tables of ``python -m papers value-aware-lm`` that are computed from the losses of windows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attnlab.evaluation.intervals import paired_interval

__all__ = ["NOTES", "derived"]

Row = dict[str, Any]
Tables = Mapping[str, Sequence[Mapping[str, Any]]]
OBLIVIOUS = "top-r"
RIVALS = ("value-aware", "alpha-norm", "window", "window+sinks")
NOTES = {
    "windows": "The loss in nats per token of every window under every mechanism.",
    "perplexity": "Perplexity per token, and the loss above that of exact attention on the same windows: low and high "
    "are the ends of its 95 % interval over windows. r of LSH counts the keys of one round, that of ORF its features.",
    "against_top_r": "How much loss a family saves against the r largest weights, with as many keys, window by window: "
    "positive is better than top-r; low and high are the ends of its 95 % interval.",
    "output_error": "Relative errors of W, of W v, of W v after W_O with all heads together, and of effective "
    "attention, on the calls of exact attention in one window.",
}


def derived(tables: Tables) -> dict[str, list[Row]]:
    """``perplexity`` and ``against_top_r``."""
    groups: dict[tuple[int, str, int | None, str], dict[int, Mapping[str, Any]]] = {}
    for row in tables["windows"]:
        groups.setdefault((row["length"], row["family"], row["r"], row["spec"]), {})[row["window"]] = row
    return {"perplexity": _perplexity(groups), "against_top_r": _against_top_r(groups)}


def _perplexity(groups: Mapping[tuple[int, str, int | None, str], Mapping[int, Mapping[str, Any]]]) -> list[Row]:
    exact = {length: own for (length, family, *_), own in groups.items() if family == "softmax"}
    rows = []
    for (length, family, r, spec), own in groups.items():
        loss = _mean(own)
        above = _paired(own, exact[length])
        row = {"length": length, "family": family, "r": r, "spec": spec, "windows": len(own),
               "perplexity": math.exp(loss), "loss": loss}  # fmt: skip
        rows.append(row | ({} if family == "softmax" else above))
    return sorted(rows, key=lambda row: -row["length"])


def _against_top_r(groups: Mapping[tuple[int, str, int | None, str], Mapping[int, Mapping[str, Any]]]) -> list[Row]:
    top = {(length, r): own for (length, family, r, _), own in groups.items() if family == OBLIVIOUS}
    rows = []
    for (length, family, r, _), own in groups.items():
        if family not in RIVALS or (length, r) not in top:
            continue
        other = top[length, r]
        shared = own.keys() & other.keys()
        ours, theirs = ({w: losses[w] for w in shared} for losses in (own, other))
        saved = _paired(theirs, ours)
        rows.append({"length": length, "family": family, "r": r, "windows": len(shared), "loss": _mean(ours),
                     "loss_top_r": _mean(theirs), "saved": saved["above"], "low": saved["low"],
                     "high": saved["high"]})  # fmt: skip
    return sorted(rows, key=lambda row: (-row["length"], RIVALS.index(row["family"]), row["r"]))


def _mean(own: Mapping[int, Mapping[str, Any]]) -> float:
    return math.fsum(row["loss"] * row["predicted"] for row in own.values()) / sum(
        row["predicted"] for row in own.values()
    )


def _paired(own: Mapping[int, Mapping[str, Any]], other: Mapping[int, Mapping[str, Any]]) -> Row:
    """By how much ``own`` loses more than ``other`` on the windows of both, with its interval."""
    shared = sorted(own.keys() & other.keys())
    mine, theirs = ([losses[w]["loss"] for w in shared] for losses in (own, other))
    above, low, high, _ = paired_interval(mine, theirs, [own[w]["predicted"] for w in shared])
    return {"above": above, "low": low, "high": high}
