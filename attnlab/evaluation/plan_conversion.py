"""``plan_conversion``: a memory for every key/value head of a model, chosen by what it costs, within so many bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from attnlab.adapters.cache_bytes import LayerShape, layer_shapes
from attnlab.adapters.convert import is_converted
from attnlab.adapters.load import LoadedModel, check_length
from attnlab.adapters.plan import Plan, PlannedFor
from attnlab.adapters.protocol import Frame, adapter_of
from attnlab.attention import Mechanism
from attnlab.evaluation.candidates import fitting, reach, sized_candidates
from attnlab.evaluation.plan_windows import plain_and_recall_windows
from attnlab.evaluation.plans import Unit, head_specs, plan_of, within_bytes
from attnlab.evaluation.quality import Predictions, Windows, predict
from attnlab.evaluation.recorded_costs import (
    Place,
    RecordedCosts,
    mechanisms_of,
    record_costs,
    start_controls,
    started_candidates,
)
from attnlab.fields import check_int
from attnlab.mechanisms.per_group import per_group
from attnlab.progress import Progress
from attnlab.registry import mechanism

__all__ = ["plan_conversion"]

MEASURES = ("loss", "error")


def plan_conversion(
    model: nn.Module,
    texts: Sequence[str],
    *,
    tokenizer: Any,
    budget: float | None = None,
    bytes: int | None = None,
    length: int = 2048,
    candidates: Sequence[str] | None = None,
    tokens: int = 8192,
    by: str = "loss",
    seed: int = 0,
) -> Plan:
    """The plan that gives every key/value head of a causal model the memory where it buys most; convert() takes it.

    ``budget`` is a share of the bytes that softmax's cache takes at ``length`` tokens, or ``bytes`` a number for
    one sequence. ``candidates`` are specs beside softmax; by default abc-select, and sinks and a window alone
    (abc-hybrid without slots), in sizes that follow from budget and length. About ``tokens`` tokens of the texts
    are read, half of them in windows that repeat what was read long ago, where only the repetition is to be
    predicted, so that heads which retrieve are seen to matter; the last windows are held out.

    Of every head and candidate two costs are measured on the model's own calls: how much the loss rises, estimated
    from one gradient (``by="loss"``), and |W_O (o^ - o)|^2 as a share of the layer's |W_O o|^2 (``by="error"``).
    The controls of a candidate begin on the same plain windows. The plan has the least sum of costs within the
    budget, as far as a greedy choice finds it. ``plan.report`` has the costs, and the loss on held-out windows of
    this plan, of the one by the other measure, and of one size for all heads at equal bytes.
    """
    for name, value, least in (("length", length, 64), ("tokens", tokens, 1), ("seed", seed, 0)):
        check_int(name, value, least=least)
    if by not in MEASURES:
        raise ValueError(f"by must be one of {', '.join(MEASURES)}, got {by!r}")
    shapes = _decoder_shapes(model, length)
    allowance = _allowance(shapes, budget, bytes, length)
    one = shapes[0]
    if candidates is None:
        candidates = sized_candidates(one, length, allowance.of_unit)
    specs = ["softmax", *(spec for spec in dict.fromkeys(candidates) if spec != "softmax")]
    search = _Search(shapes, length, specs, allowance)
    search.refuse_large()
    windows = _windows(texts, tokenizer, specs, length=length, tokens=tokens, seed=seed)
    device = next(model.parameters()).device
    chosen_on, held_out = ([each.to(device) for each in part] for part in windows)
    progress = Progress("planning", plain=True)
    progress.expect(sum(len(windows.input_ids) for windows in chosen_on) * len(shapes))
    progress.stage(f"{len(specs) - 1} candidates in {len(shapes)} layers")
    started = started_candidates(model, chosen_on[0], specs[1:])
    for each in chosen_on:
        search.costs.append(record_costs(model, each, started, after_layer=progress.step))
    plans = {measure: search.plan(measure) for measure in MEASURES}
    progress.stage("the chosen plans")
    compared = {"softmax": Plan({}), **{f"by {measure}": plans[measure] for measure in MEASURES}}
    for spec in fitting(one, length, allowance.of_unit):
        compared[spec] = Plan({(shape.kind, shape.layer): spec for shape in shapes})
    meter = _Meter(LoadedModel(model, tokenizer, "causal"), shapes, length, chosen_on[0], held_out)
    rows = meter.rows(compared)
    progress.close()
    planned_for = PlannedFor(len(shapes), one.groups, one.d, length, allowance.share)
    report = {"by": by, "bytes": allowance.bytes, **search.report(plans[by]), "measured": rows}
    return Plan(plans[by].layers, planned_for, report)


def _windows(
    texts: Sequence[str], tokenizer: Any, specs: Sequence[str], *, length: int, tokens: int, seed: int
) -> tuple[list[Windows], list[Windows]]:
    """(plain and recall windows to choose on, those that are held out: a quarter, at least one of each)."""
    far = max((reach(mechanism(spec), length) for spec in specs[1:]), default=0)
    count = max(2, tokens // (2 * length))
    kinds = plain_and_recall_windows(texts, tokenizer, length=length, count=count, reach=far, seed=seed)
    kept = count - max(1, count // 4)
    return [windows.part(slice(kept)) for windows in kinds], [windows.part(slice(kept, count)) for windows in kinds]


@dataclass(frozen=True)
class _Allowance:
    """The bytes that a cache may take, and as a share of softmax's; ``units`` key/value heads share them."""

    bytes: int
    share: float
    units: int

    @property
    def of_unit(self) -> int:
        """The bytes of each, if all had the same."""
        return self.bytes // self.units


def _decoder_shapes(model: nn.Module, length: int) -> list[LayerShape]:
    """The layers of a model that can be planned for."""
    if is_converted(model):
        raise ValueError("this model is converted already; plan with the model whose attention is softmax")
    if any(site.kind != "decoder" for site in adapter_of(model).sites()):
        raise ValueError(f"{type(model).__name__} is no decoder-only language model, and only those can be planned for")
    check_length(model, length)
    shapes = layer_shapes(model)
    if len({(shape.groups, shape.d, shape.e) for shape in shapes}) > 1:
        raise ValueError("the layers of this model have heads of several sizes or numbers, which no plan names yet")
    return shapes


def _allowance(shapes: Sequence[LayerShape], share: float | None, limit: int | None, length: int) -> _Allowance:
    softmax, units = mechanism("softmax"), sum(shape.groups for shape in shapes)
    whole, one_key = (sum(shape.bytes(softmax, n) for shape in shapes) for n in (length, 1))
    if (share is None) == (limit is None):
        raise ValueError("give either budget, a share of softmax's cache such as 0.25, or bytes for one sequence")
    if share is not None:
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(f"budget must be a share of softmax's cache between 0 and 1, got {share!r}")
        limit = math.floor(share * whole)
    assert limit is not None
    check_int("bytes", limit, least=0)
    if limit < one_key:
        raise ValueError(
            f"the budget is {limit} bytes for a sequence, and one key for each of {units} heads takes {one_key}; "
            f"give at least {one_key} bytes, a share of {one_key / whole:.2g} of softmax's cache at {length} tokens"
        )
    return _Allowance(limit, limit / whole, units)


@dataclass(frozen=True, eq=False)
class _Search:
    """The choice of a mechanism for each key/value head."""

    shapes: Sequence[LayerShape]
    length: int
    specs: Sequence[str]
    allowance: _Allowance
    # Of plain windows and of recall windows.
    costs: list[RecordedCosts] = field(default_factory=list)

    def units(self) -> Iterator[tuple[LayerShape, Unit]]:
        for shape in self.shapes:
            for head in range(shape.groups):
                yield shape, Unit(shape.kind, shape.layer, shape.groups, head)

    def refuse_large(self) -> None:
        """Raise a ValueError, before anything is measured, if no candidates fit into the budget."""
        within_bytes(
            {unit: {spec: (self.bytes(shape, spec), 0.0) for spec in self.specs} for shape, unit in self.units()},
            self.allowance.bytes,
        )

    def cost(self, measure: str, shape: LayerShape, head: int, spec: str) -> float | None:
        """What a candidate costs a head by one measure, plain and recall windows weighing the same; None: refused."""
        place = (shape.kind, shape.layer)
        if spec == "softmax":
            return 0.0
        if any((place, spec) in costs.refusals for costs in self.costs):
            return None
        if measure == "error":
            return sum(float(costs.error[place, spec][head]) / max(costs.output[place], 1e-30) for costs in self.costs)
        return sum(float(costs.second[place, spec][head]) / max(1, costs.predicted) for costs in self.costs)

    def plan(self, measure: str) -> Plan:
        """The plan of least cost within the allowance."""
        options: dict[Unit, dict[str, tuple[int, float]]] = {}
        for shape, unit in self.units():
            assert unit.head is not None
            taken = {spec: self.cost(measure, shape, unit.head, spec) for spec in self.specs}
            options[unit] = {
                spec: (self.bytes(shape, spec), cost)
                for spec, cost in taken.items()
                if cost is not None and math.isfinite(cost)
            }
        chosen = within_bytes(options, self.allowance.bytes)
        moves = [(unit, spec) for unit, spec in chosen.items() if spec != "softmax"]
        return plan_of(moves, join=per_group)

    def bytes(self, shape: LayerShape, spec: str) -> int:
        """What one key/value head holds."""
        return shape.bytes(mechanism(spec), self.length) // shape.groups

    def report(self, plan: Plan) -> dict[str, Any]:
        """What each head attends by in a plan, and what every candidate would have cost it."""
        units = []
        for shape, unit in self.units():
            head = unit.head
            assert head is not None
            spec = head_specs(plan.layers.get((shape.kind, shape.layer), "softmax"), shape.groups)[head]
            costs = {
                name: {other: self.cost(measure, shape, head, other) for other in self.specs[1:]}
                for measure, name in (("loss", "loss_increase"), ("error", "output_error"))
            }
            row = {"layer": shape.layer, "group": head, "mechanism": spec, "bytes": self.bytes(shape, spec)}
            units.append(row | costs)
        plain, recall = self.costs
        refused = {f"{kind} {layer}, {spec}": why for ((kind, layer), spec), why in plain.refusals.items()}
        predicted = {"plain": plain.predicted, "recall": recall.predicted}
        return {"candidates": list(self.specs), "predicted": predicted, "units": units, "refused": refused}


@dataclass(frozen=True, eq=False)
class _Meter:
    """Measures plans on held-out windows; controls begin on the windows of ``start``."""

    loaded: LoadedModel
    shapes: Sequence[LayerShape]
    length: int
    start: Windows
    # Plain windows and recall windows.
    held_out: Sequence[Windows]

    def rows(self, plans: Mapping[str, Plan]) -> list[dict[str, Any]]:
        """A row for each plan, the first of which is softmax's: its bytes, and its losses on held-out windows."""
        places = [(shape.kind, shape.layer) for shape in self.shapes]
        mechanisms = {
            name: mechanisms_of(
                self.loaded.model, {place: plan.layers[place] for place in places if place in plan.layers}
            )
            for name, plan in plans.items()
        }
        start_controls(self.loaded.model, self.start, list(mechanisms.values()))
        exact: list[Predictions] = []
        rows = []
        for name, plan in plans.items():
            predictions = self._predictions(mechanisms[name])
            exact = exact or predictions
            row: dict[str, Any] = {"name": name, "bytes": self._bytes(plan)}
            for kind, predicted, softmax in zip(("loss", "recall_loss"), predictions, exact, strict=True):
                above = zip(("above", "above_low", "above_high"), predicted.loss_above(softmax), strict=True)
                row |= {kind: predicted.mean_loss} | {f"{kind}_{part}": value for part, value in above}
            rows.append(row | {"plan": plan.to_json()})
        return rows

    def _bytes(self, plan: Plan) -> int:
        specs = [plan.layers.get((shape.kind, shape.layer), "softmax") for shape in self.shapes]
        return sum(shape.bytes(mechanism(spec), self.length) for shape, spec in zip(self.shapes, specs, strict=True))

    def _predictions(self, mechanisms: Mapping[Place, Mechanism]) -> list[Predictions]:
        """Of plain and of recall windows, with these mechanisms in place."""
        sites = {(site.kind, site.layer): site for site in adapter_of(self.loaded.model).sites()}
        frames = {sites[place]: Frame(mechanism=mech, skip_dropout=True) for place, mech in mechanisms.items()}
        predictions = []
        with adapter_of(self.loaded.model).attach(frames):
            for windows in self.held_out:
                predicted = predict(self.loaded, windows, batch=1)
                assert predicted is not None, "every window has tokens to predict"
                predictions.append(predicted)
        return predictions
