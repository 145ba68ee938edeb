"""How much a model's loss rises with a mechanism in one layer or head alone: measured, or estimated from a gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnlab.adapters import LoadedModel, record, swap
from attnlab.attention import AttentionCall, grouped
from attnlab.data import IGNORED
from attnlab.evaluation.plan_meter import PlanMeter
from attnlab.evaluation.plans import Unit, plan_of
from attnlab.evaluation.quality import batches, model_inputs
from attnlab.mechanisms.softmax import Softmax
from attnlab.reading.gradient import output_gradients
from attnlab.registry import mechanism
from attnlab.shapes import Float
from attnlab.trace import LayerTrace

__all__ = ["ROUNDING", "detached", "estimated_increase", "estimated_sensitivity", "measured_sensitivity"]

# A change of the loss below this share of it is rounding.
ROUNDING = 1e-5


def measured_sensitivity(
    meter: PlanMeter, units: Sequence[Unit], candidates: Sequence[str], exact: float
) -> list[dict[str, Any]]:
    """The increase of the loss with each candidate in one unit alone, measured."""
    rows = []
    for unit, spec in [(unit, spec) for unit in units for spec in candidates]:
        meter.progress.stage(f"{spec} in {unit} alone")
        row = {"of": unit, "kind": unit.kind, "layer": unit.layer, "head": unit.head, "mechanism": spec}
        try:
            measured = meter.quality(plan_of([(unit, spec)]))
        except ValueError as refusal:
            rows.append({**row, "loss": None, "increase": None, "refused": str(refusal)})
            continue
        assert measured is not None
        loss = measured["loss"]
        refused = None if math.isfinite(loss) else f"the model's loss becomes {loss}"
        # A gain on this text may be chance, so it does not allow for other losses.
        up = loss - exact if loss - exact > ROUNDING * exact else 0.0
        rows.append({**row, "loss": loss, "increase": None if refused else up, "refused": refused})
    return rows


def estimated_increase(
    slope: Float[Tensor, "b h q e"], off: Float[Tensor, "b h q e"], *, heads: int = 1
) -> tuple[Float[Tensor, " u"], Float[Tensor, " u"]]:
    """(sum_i s_i, sum_i s_i^2 / 2) of each unit of ``heads`` neighbours, with s_i = <dL/do_i, o^_i - o_i> of query i.

    The loss rises by their sum, to second order. The square has the empirical Fisher matrix in place of the Hessian.
    """
    s = grouped((slope * off).sum(-1).double(), heads).sum(2)
    return s.sum((0, 2)), s.square().sum((0, 2)) / 2


def estimated_sensitivity(
    meter: PlanMeter, units: Sequence[Unit], candidates: Sequence[str], exact: float
) -> list[dict[str, Any]]:
    """The same from one gradient: the sums of ``estimated_increase``."""
    heads: dict[tuple[str, int, str], Tensor] = {}
    refusals: dict[tuple[str, int, str], str] = {}
    predicted = 0
    for part in batches(meter.windows, size=1):
        meter.progress.stage("the gradient of the loss")
        layers, slopes, count = _slopes(meter.loaded, part)
        predicted += count
        for layer, slope in zip(layers, slopes, strict=True):
            for spec in candidates:
                key: tuple[str, int, str] = (layer.kind, layer.layer, spec)
                try:
                    off = mechanism(spec).in_layer(layer.kind, layer.layer)(layer.call) - layer.output
                except ValueError as refusal:
                    refusals[key] = str(refusal)
                    continue
                first, second = estimated_increase(slope, off)
                heads[key] = heads.get(key, 0) + first + second
    meter.progress.step(4 * len(candidates))
    rows = []
    for unit, spec in [(unit, spec) for unit in units for spec in candidates]:
        key = (unit.kind, unit.layer, spec)
        row = {"of": unit, "kind": unit.kind, "layer": unit.layer, "head": unit.head, "mechanism": spec, "loss": None}
        if key in refusals:
            rows.append({**row, "increase": None, "refused": refusals[key]})
            continue
        up = float(heads[key].sum() if unit.head is None else heads[key][unit.head]) / max(1, predicted)
        refused = None if math.isfinite(up) else f"the estimated increase of the loss is {up}"
        up = up if up > ROUNDING * exact else 0.0
        rows.append({**row, "increase": None if refused else up, "refused": refused})
    return rows


def _slopes(loaded: LoadedModel, batch: Mapping[str, Tensor]) -> tuple[list[LayerTrace], list[Tensor], int]:
    """(the recorded layers, the gradient of the summed loss at their outputs, how many tokens are predicted)."""
    labels = batch["labels"]
    with torch.enable_grad(), swap(loaded.model, Softmax()), record(loaded.model) as trace:
        logits = loaded.model(**model_inputs(loaded, dict(batch))).logits
        if loaded.task == "causal":
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        slopes = output_gradients(trace, loss)
    layers = [replace(layer, call=detached(layer.call), output=layer.output.detach()) for layer in trace]
    return layers, slopes, int((labels != IGNORED).sum())


def detached(call: AttentionCall) -> AttentionCall:
    """The call without the graph that its tensors stand in."""
    parts = {
        name: t.detach() for name in ("q", "k", "v", "x", "bias", "memory") if (t := getattr(call, name)) is not None
    }
    return replace(call, **parts)
