"""``attnlab compare --recommend``: which layers or heads of a model can take which mechanism, per loss of quality."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from attnlab.adapters import LoadedModel, swap
from attnlab.adapters.plan import Plan, swap_plan
from attnlab.evaluation.quality import Windows, batches, model_inputs, quality
from attnlab.measure import median_seconds, peak_bytes
from attnlab.mechanisms.per_head import per_head
from attnlab.mechanisms.softmax import Softmax
from attnlab.registry import mechanism
from attnlab.trace import Trace

__all__ = [
    "CANDIDATES",
    "MIX",
    "RecommendConfig",
    "Unit",
    "choosing_and_held_out",
    "greedy",
    "recommend",
    "write_plans",
]

CANDIDATES = ("kernel:elu", "window:r=16", "window:r=64", "top-r:r=16")
# A change of the loss below this share of it is rounding.
ROUNDING = 1e-5
# What a plan is called that may put any of the candidates in place.
MIX = "mix"


@dataclass(frozen=True)
class RecommendConfig:
    """Candidates, the most wanted first; budgets as shares of the exact loss; what is replaced at once."""

    mechanisms: tuple[str, ...] = CANDIDATES
    budgets: tuple[float, ...] = (0.0, 0.01, 0.02, 0.05, 0.1)
    by: str = "layers"
    batch: int = 8
    repeats: int = 3

    def __post_init__(self) -> None:
        if not self.candidates:
            raise ValueError("a recommendation needs a mechanism other than softmax to choose from; name one with -m")
        if not self.budgets or not all(math.isfinite(b) and b >= 0 for b in self.budgets):
            raise ValueError(f"budgets are shares of the exact loss, 0 or more, got {self.budgets}")
        if self.by not in ("layers", "heads"):
            raise ValueError(f"what is replaced at once is 'layers' or 'heads', got {self.by!r}")

    @property
    def candidates(self) -> tuple[str, ...]:
        """The mechanisms without exact attention, which every plan may use."""
        return tuple(dict.fromkeys(spec for spec in self.mechanisms if not isinstance(mechanism(spec), Softmax)))


@dataclass(frozen=True)
class Unit:
    """What a mechanism is put in place of: a layer, or one of its heads; ``heads`` is the layer's number of them."""

    kind: str
    layer: int
    heads: int
    head: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.layer}" + ("" if self.head is None else f", head {self.head}")


Move = tuple[Unit, str]


def greedy(increase: Mapping[Move, float], *, wanted: Sequence[str], allowance: float) -> list[Move]:
    """Moves to mechanisms that are more wanted, the smallest increase first, that add up to at most ``allowance``.

    A unit that has no move keeps exact attention; a later move of a unit takes the place of its earlier one.

    >>> a, b = Unit("encoder", 0, 4), Unit("encoder", 1, 4)
    >>> increase = {(a, "window"): 0.25, (a, "top-r"): 0.1, (b, "window"): 0.5, (b, "top-r"): 0.1}
    >>> [(str(unit), spec) for unit, spec in greedy(increase, wanted=["window", "top-r"], allowance=0.4)]
    [('encoder 0', 'top-r'), ('encoder 1', 'top-r'), ('encoder 0', 'window')]
    """
    rank = {spec: i for i, spec in enumerate(wanted)}
    chosen: dict[Unit, str] = {}
    moves: list[Move] = []
    while True:
        spent = sum(increase[move] for move in chosen.items())
        possible: list[tuple[float, int, int, Move]] = []
        for (unit, spec), up in increase.items():
            current = chosen.get(unit)
            if spec not in rank or (current is not None and rank[current] <= rank[spec]):
                continue
            extra = up if current is None else up - increase[unit, current]
            if spent + extra <= allowance:
                possible.append((extra, rank[spec], len(possible), (unit, spec)))
        if not possible:
            return moves
        unit, spec = min(possible)[-1]
        chosen[unit] = spec
        moves.append((unit, spec))


@torch.no_grad()
def recommend(
    loaded: LoadedModel, windows: Windows, trace: Trace, *, config: RecommendConfig, held_out: Windows | None = None
) -> dict[str, Any]:
    """The recommendation as JSON: each unit's sensitivity, and per budget the plans with their measured quality.

    The loss is measured with one unit at a time on each candidate and all others exact. The increases are taken to add
    up, which gives the greedy choice; its true loss is then measured, and moves are undone until it is in the budget.
    ``held_out`` is text that plans are not chosen on; each plan's increase of the loss is measured there too.
    """
    meter = _PlanMeter(loaded, windows, held_out, trace, config)
    exact = meter.quality(Plan({}))
    if exact is None or not math.isfinite(exact["loss"]) or exact["loss"] <= 0:
        raise ValueError(
            "a recommendation needs a model that predicts tokens (masked or causal), and a text to predict"
        )
    units = _units(trace, config.by)
    sensitivity = _sensitivity(meter, units, config.candidates, exact["loss"])
    increase = {(s["of"], s["mechanism"]): s["increase"] for s in sensitivity if s["refused"] is None}

    choices = {spec: [spec] for spec in config.candidates}
    if len(choices) > 1:
        choices = {MIX: list(config.candidates), **choices}
    rows = [{"budget": None, "mechanism": "softmax", **_row(meter, [], increase, len(units))}]
    todo = [(budget, name) for budget in config.budgets for name in choices]
    for budget, name in tqdm(todo, desc="verifying plans", unit="plan", disable=None):
        moves = greedy(increase, wanted=choices[name], allowance=(budget + ROUNDING) * exact["loss"])
        moves = _verified(meter, moves, most=(1 + budget + ROUNDING) * exact["loss"])
        rows.append({"budget": budget, "mechanism": name, **_row(meter, moves, increase, len(units))})
    _mark_front(rows)
    return {
        "by": config.by,
        "candidates": list(config.candidates),
        "exact": exact,
        "sensitivity": [{name: value for name, value in s.items() if name != "of"} for s in sensitivity],
        "rows": rows,
    }


@dataclass(eq=False)
class _PlanMeter:
    """Measures plans in one model on one text, each plan once."""

    loaded: LoadedModel
    windows: Windows
    held_out: Windows | None
    trace: Trace
    config: RecommendConfig
    qualities: dict[tuple[Any, ...], dict[str, Any] | None] = field(default_factory=dict)
    costs: dict[tuple[Any, ...], dict[str, float]] = field(default_factory=dict)
    peaks: dict[tuple[Any, ...], int] = field(default_factory=dict)
    held_out_losses: dict[tuple[Any, ...], float | None] = field(default_factory=dict)

    def quality(self, plan: Plan) -> dict[str, Any] | None:
        key = tuple(plan.layers.items())
        if key not in self.qualities:
            with self._attending(plan):
                self.qualities[key] = quality(self.loaded, self.windows, batch=self.config.batch)
        return self.qualities[key]

    def held_out_increase(self, plan: Plan) -> float | None:
        """The increase of the loss, as a share of it, on text that plans were not chosen on."""
        key = tuple(plan.layers.items())
        if self.held_out is not None and key not in self.held_out_losses:
            with self._attending(plan):
                measured = quality(self.loaded, self.held_out, batch=self.config.batch)
            self.held_out_losses[key] = None if measured is None else measured["loss"]
        loss, exact = self.held_out_losses.get(key), self.held_out_losses.get(())
        return None if loss is None or not exact else loss / exact - 1

    def cost(self, plan: Plan) -> dict[str, float]:
        """Time of a forward pass and the most memory that a layer's attention needs, relative to softmax everywhere."""
        key = tuple(plan.layers.items())
        if not key:
            return {"time_ratio": 1.0, "memory_ratio": 1.0}
        if key not in self.costs:
            batch = next(batches(self.windows, size=self.config.batch))
            device = batch["input_ids"].device

            def forward(plan: Plan) -> None:
                with torch.no_grad(), self._attending(plan):
                    self.loaded.model(**model_inputs(self.loaded, batch))

            jobs = {"softmax": lambda: forward(Plan({})), "plan": lambda: forward(plan)}
            seconds = median_seconds(jobs, repeats=self.config.repeats, device=device)
            self.costs[key] = {
                "time_ratio": seconds["plan"] / seconds["softmax"],
                "memory_ratio": self._peak(plan) / max(1, self._peak(Plan({}))),
            }
        return self.costs[key]

    def _peak(self, plan: Plan) -> int:
        """The most memory that one layer's attention needs, since layers run in turn; equal calls are measured once."""
        peaks = []
        for layer in self.trace:
            spec = plan.layers.get((layer.kind, layer.layer), "softmax")
            key = (spec, layer.call.sizes, layer.call.causal)
            if key not in self.peaks:
                attend = partial(mechanism(spec), layer.call)
                self.peaks[key] = peak_bytes(attend, device=layer.call.q.device)
            peaks.append(self.peaks[key])
        return max(peaks)

    @contextmanager
    def _attending(self, plan: Plan) -> Iterator[None]:
        with swap(self.loaded.model, Softmax()), swap_plan(self.loaded.model, plan):
            yield


def _units(trace: Trace, by: str) -> list[Unit]:
    layers = [Unit(layer.kind, layer.layer, layer.call.q.shape[1]) for layer in trace]
    if by == "layers":
        return layers
    return [Unit(unit.kind, unit.layer, unit.heads, head) for unit in layers for head in range(unit.heads)]


def _sensitivity(
    meter: _PlanMeter, units: Sequence[Unit], candidates: Sequence[str], exact: float
) -> list[dict[str, Any]]:
    rows = []
    todo = [(unit, spec) for unit in units for spec in candidates]
    for unit, spec in tqdm(todo, desc="measuring sensitivity", unit="swap", disable=None):
        row = {"of": unit, "kind": unit.kind, "layer": unit.layer, "head": unit.head, "mechanism": spec}
        try:
            measured = meter.quality(_plan([(unit, spec)]))
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


def _plan(moves: Iterable[Move]) -> Plan:
    """The plan that the moves lead to; a layer of which no head has moved is left out."""
    specs: dict[tuple[str, int], list[str]] = {}
    for unit, spec in moves:
        layer = specs.setdefault((unit.kind, unit.layer), ["softmax"] * unit.heads)
        for head in range(unit.heads) if unit.head is None else [unit.head]:
            layer[head] = spec
    return Plan({key: per_head(specs[key]) for key in sorted(specs)})


def _verified(meter: _PlanMeter, moves: list[Move], *, most: float) -> list[Move]:
    """As many of the moves, from the first on, as keep the measured loss at ``most``."""
    while moves:
        measured = meter.quality(_plan(moves))
        if measured is not None and measured["loss"] <= most:
            break
        moves = moves[: -max(1, len(moves) // 16)]
    return moves


def _row(meter: _PlanMeter, moves: list[Move], increase: Mapping[Move, float], units: int) -> dict[str, Any]:
    plan, chosen, exact = _plan(moves), dict(moves), meter.quality(Plan({}))
    measured = meter.quality(plan)
    assert measured is not None
    assert exact is not None
    return {
        "replaced": len(chosen),
        "units": units,
        "quality": measured | {"exact": exact["value"]},
        "loss_increase": measured["loss"] / exact["loss"] - 1,
        "held_out_increase": meter.held_out_increase(plan),
        "predicted_increase": sum(increase[move] for move in chosen.items()) / exact["loss"],
        **meter.cost(plan),
        "plan": plan.to_json(),
    }


def _mark_front(rows: list[dict[str, Any]]) -> None:
    """``pareto``: no other row is as good in loss, time and memory and better in one of them."""
    points = [(row["quality"]["loss"], row["time_ratio"], row["memory_ratio"]) for row in rows]
    for row, point in zip(rows, points, strict=True):
        row["pareto"] = not any(
            other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points
        )


def choosing_and_held_out(windows: Windows) -> tuple[Windows, Windows | None]:
    """Every other window to choose plans on, and the rest to measure them on; None where there is only one window."""
    parts = [
        Windows(windows.input_ids[i::2], mask := windows.attention_mask[i::2], windows.labels[i::2], int(mask.sum()))
        for i in range(2)
    ]
    return parts[0], parts[1] if len(parts[1].input_ids) else None


def write_plans(folder: Path, recommendation: Mapping[str, Any]) -> list[Path]:
    """One JSON file per recommended plan that replaces anything, named by its budget and mechanism; their paths."""
    written = []
    for row in recommendation["rows"]:
        if row["replaced"]:
            name = re.sub(r"[^\w.+=-]+", "_", f"{100 * row['budget']:g}-percent-{row['mechanism']}")
            written.append(Plan.from_json(row["plan"]).save(folder / f"{name}.json"))
    return written
