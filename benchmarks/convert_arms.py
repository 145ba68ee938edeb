"""The arms of benchmarks/convert.py: what each student attends by, all at the same share of softmax's cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import storing  # noqa: F401  the repository on the path
import torch

from attnlab.adapters import LoadedModel, Plan, convert, load_model, swap
from attnlab.adapters.cache_bytes import LayerShape, layer_shapes
from attnlab.adapters.distillation import HeldOut, Predictions
from attnlab.adapters.initialise import initialise_control
from attnlab.adapters.plan import PlannedFor
from attnlab.evaluation.candidates import fitting, largest, reach, sized
from attnlab.evaluation.plan_windows import plain_and_recall_windows
from attnlab.registry import mechanism

__all__ = ["ARMS", "PLANNED", "layers_plan", "spec_for"]

# What the table calls the students.
ARMS = {
    "bounded": "every head bounded",
    "plan": "plan",
    "uniform": "one size for all heads",
    "layers": "whole layers softmax",
    "window": "sinks and window",
    "hybrid": "abc-hybrid",
    "mlp": "abc-mlp",
}
# Those with several mechanisms in one model.
PLANNED = ("plan", "layers")


def spec_for(arm: str, model: str, *, bounded: str, budget: float, length: int, dtype: str) -> str | None:
    """The one mechanism of a student, of the size that the budget allows; None where there are several."""
    if arm == "bounded" or arm in PLANNED:
        return bounded if arm == "bounded" else None
    shapes = layer_shapes(load_model(model, dtype=getattr(torch, dtype)).model)
    of_head = int(budget * _softmax_bytes(shapes, length)) // sum(shape.groups for shape in shapes)
    with_slots, without = fitting(shapes[0], length, of_head)
    made: dict[str, Callable[[], str | None]] = {
        "uniform": lambda: with_slots,
        "window": lambda: without,
        # Its slots are sums in float32.
        "hybrid": lambda: largest(shapes[0], length, of_head, partial(sized, slots_of="abc-hybrid")),
        "mlp": lambda: largest(shapes[0], length, of_head, lambda slots: f"abc-mlp:slots={slots}"),
    }
    return made[arm]()


def _softmax_bytes(shapes: Sequence[LayerShape], length: int) -> int:
    return sum(shape.bytes(mechanism("softmax"), length) for shape in shapes)


def layers_plan(
    loaded: LoadedModel, texts: Sequence[str], *, bounded: str, budget: float, length: int, tokens: int, seed: int
) -> Plan:
    """Some layers keep softmax whole, all others have one bounded memory, at the budget's bytes.

    As many layers keep softmax as fit beside memories of the size of ``bounded``; the memories then take what is left.
    The layers are those whose return to softmax, one at a time, brings the bounded model nearest to itself, by
    KL(model || bounded model) on windows as they stand and on windows that repeat what was read long ago.
    """
    shapes = layer_shapes(loaded.model)
    one, whole = shapes[0], _softmax_bytes(shapes, length)
    of_layer, small = whole // len(shapes), one.bytes(mechanism(bounded), length)
    if small * len(shapes) > budget * whole:
        raise ValueError(f"{bounded} in all layers takes more than {budget} of softmax's cache: name a smaller one")
    count = int((budget * whole - small * len(shapes)) // (of_layer - small))
    rest = int(budget * whole - count * of_layer) // ((len(shapes) - count) * one.groups)
    spec = fitting(one, length, rest)[0]
    ranked = _ranked(loaded, texts, spec, length=length, tokens=tokens, seed=seed)
    kept = [layer for _, layer in ranked[:count]]
    layers = {(shape.kind, shape.layer): spec for shape in shapes if shape.layer not in kept}
    planned_for = PlannedFor(len(shapes), one.groups, one.d, length, budget)
    report = {"by": "KL with one layer as softmax", "layers": [{"layer": n, "kl": kl} for kl, n in ranked]}
    return Plan(layers, planned_for, report)


def _ranked(
    loaded: LoadedModel, texts: Sequence[str], spec: str, *, length: int, tokens: int, seed: int
) -> list[tuple[float, int]]:
    """(KL of the bounded model with one layer as softmax, that layer), the least first."""
    far, count = reach(mechanism(spec), length), max(2, tokens // (2 * length))
    windows = plain_and_recall_windows(
        texts, loaded.tokenizer, length=length, count=count, reach=far, seed=seed
    )  # fmt: skip
    batches: list[dict[str, Any]] = [{"input_ids": row} for part in windows for row in part.input_ids.split(1)]
    student = convert(loaded.model, spec, copy=True)
    initialise_control(student, list(texts), tokenizer=loaded.tokenizer, length=min(1024, length), seed=seed)
    distance = HeldOut(Predictions(loaded.model, student), batches)
    ranked = []
    for shape in layer_shapes(loaded.model):
        with swap(student, "softmax", layers=[shape.layer]):
            ranked.append((distance.losses()["held-out/kl"], shape.layer))
    return sorted(ranked)
