"""One head that shows how attention differs from effective attention, chosen among all heads of a model by a rule."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlab.adapters import LoadedModel, record
from attnlab.reading.effective import effective_attention
from attnlab.reading.pattern_classifier import classify, load_classifier
from attnlab.reading.pattern_data import CLASSES
from attnlab.trace import Trace

__all__ = ["RULES", "choose_head", "telling_head"]

# The decimal places of a map's weights, which a picture shows no better.
PLACES = 4
# What a map is called that shows no pattern.
NO_PATTERN = "heterogeneous"
# The first rule that any head fits; of its heads, the one of whose weights most is cancelled.
RULES = {
    "changes": "its pattern changes",
    "pattern": "both of its maps show a pattern",
    "any": "any",
}


class Head(NamedTuple):
    """A head: the share of its squared weights that the values cancel, and the patterns of both of its maps."""

    place: int
    head: int
    removed: float
    standard: str
    effective: str

    def fits(self, rule: str) -> bool:
        """Whether a rule of ``RULES`` may choose it."""
        readable = NO_PATTERN not in (self.standard, self.effective)
        return rule == "any" or (readable and (rule == "pattern" or self.standard != self.effective))


def choose_head(heads: list[Head]) -> tuple[Head, str]:
    """(the head, the rule that chose it).

    >>> heads = [Head(0, 0, 0.9, "vertical", "vertical"), Head(0, 1, 0.4, "vertical+diagonal", "diagonal")]
    >>> choose_head(heads)[0].head, choose_head(heads[:1])[1]
    (1, 'pattern')
    """
    for rule in RULES:
        fitting = [head for head in heads if head.fits(rule)]
        if fitting:
            return max(fitting, key=lambda head: head.removed), rule
    raise ValueError("the model has no head to choose from")


@torch.no_grad()
def telling_head(loaded: LoadedModel, passage: str) -> dict[str, Any]:
    """The chosen head's two maps over ``passage`` with their tokens, and the removed share of every head.

    A passage must be longer than a head is wide: over a shorter one every weight reaches the output.
    """
    device = next(loaded.model.parameters()).device
    inputs = loaded.tokenizer(passage, return_tensors="pt").to(device)
    with record(loaded.model) as trace:
        loaded.model(**inputs)
    tokens = loaded.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    heads, maps = _heads(trace)
    chosen, rule = choose_head(heads)
    standard, effective = (t[chosen.head] for t in maps[chosen.place])
    change = (standard - effective).mean(0)
    at = int(change.abs().argmax())
    by_layer = [[head.removed for head in heads if head.place == place] for place in range(len(maps))]
    return {
        "layer": list(trace)[chosen.place].layer,
        "head": chosen.head,
        "rule": rule,
        "removed": chosen.removed,
        "patterns": {"standard": chosen.standard, "effective": chosen.effective},
        # The token whose share of the weight, averaged over the tokens that look, changes most.
        "most_changed": {
            "token": tokens[at],
            "place": at,
            "standard": float(standard[:, at].mean()),
            "effective": float(effective[:, at].mean()),
        },
        "removed_by_head": by_layer,
        "removed_mean": sum(map(sum, by_layer)) / max(1, sum(map(len, by_layer))),
        "tokens": tokens,
        "maps": {"standard": _rounded(standard), "effective": _rounded(effective)},
    }


def _heads(trace: Trace) -> tuple[list[Head], list[tuple[Tensor, Tensor]]]:
    """Every head, and each layer's maps (head, query, key), standard and effective."""
    net = load_classifier()
    heads: list[Head] = []
    maps: list[tuple[Tensor, Tensor]] = []
    for place, layer in enumerate(trace):
        read = effective_attention(layer)
        both = layer.weights()[0].float(), read.weights[0].float()
        maps.append(both)
        patterns = [[CLASSES[i] for i in classify(each[None], net=net)[0].tolist()] for each in both]
        for head, removed in enumerate(read.removed[0].tolist()):
            heads.append(Head(place, head, removed, patterns[0][head], patterns[1][head]))
    return heads, maps


def _rounded(weights: Tensor) -> list[list[float]]:
    return [[round(weight, PLACES) for weight in row] for row in weights.tolist()]
