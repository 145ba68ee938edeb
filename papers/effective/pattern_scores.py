"""Answers against labels: confusion, F1, and how often two passes over the same maps agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.reading.pattern_data import CLASSES
from attnlab.shapes import Int
from papers.effective.labelled_maps import LabelledMaps

__all__ = ["annotator_agreement", "confusion_rows", "score_answers"]


def score_answers(answers: Int[Tensor, " n"], labels: Int[Tensor, " n"]) -> dict[str, Any]:
    """``scores`` of the answers of any classifier, such as those of a cross-validation."""
    n = len(CLASSES)
    confusion = torch.bincount(labels * n + answers, minlength=n * n).view(n, n)
    right, of_label, of_answer = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    f1 = {
        name: 2 * int(right[i]) / int(of_label[i] + of_answer[i]) if int(of_label[i]) else None
        for i, name in enumerate(CLASSES)
    }
    known = [value for value in f1.values() if value is not None]
    weighted = sum(int(of_label[i]) * (f1[name] or 0) for i, name in enumerate(CLASSES)) / max(1, len(labels))
    return {
        "confusion": confusion.tolist(),
        "f1": f1,
        "macro_f1": sum(known) / max(1, len(known)),
        "weighted_f1": weighted,
        "accuracy": int(right.sum()) / max(1, len(labels)),
        "maps": len(labels),
    }


def confusion_rows(result: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """The confusion matrix of ``scores`` as table rows."""
    return [
        {"label": name, **dict(zip(CLASSES, row, strict=True))}
        for name, row in zip(CLASSES, result["confusion"], strict=True)
    ]


def annotator_agreement(maps: LabelledMaps) -> list[dict[str, Any]]:
    """How often two passes gave a map the same label, by model: the share, and Cohen's kappa, corrected for chance.

    It bounds the score of a classifier: ``weighted_f1`` is the score of the second pass on the first pass's labels.
    """
    twice = [e for e in maps.entries if len(e.get("passes", ())) > 1]
    groups = {"all": twice} | {
        m: [e for e in twice if e["model"] == m] for m in dict.fromkeys(e["model"] for e in twice)
    }
    rows = []
    for name, entries in groups.items():
        first, second = (torch.tensor([CLASSES.index(e["passes"][i]) for e in entries]) for i in (0, 1))
        scores = score_answers(second, first)
        shares = [torch.bincount(one, minlength=len(CLASSES)) / max(1, len(entries)) for one in (first, second)]
        same, chance = scores["accuracy"], float(shares[0] @ shares[1])
        kappa = (same - chance) / (1 - chance)
        row = {"model": name, "maps": len(entries), "agreement": same, "kappa": kappa}
        rows.append(row | {"weighted_f1": scores["weighted_f1"]})
    return rows
