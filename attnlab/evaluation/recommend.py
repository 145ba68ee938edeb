"""``attnlab compare --recommend``: which layers or heads of a model can take which mechanism, per loss of quality."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnlab.adapters import LoadedModel
from attnlab.adapters.plan import Plan
from attnlab.evaluation.plan_meter import PlanMeter
from attnlab.evaluation.plans import Move, Unit, greedy, plan_of, recommended, unbeaten
from attnlab.evaluation.quality import Windows
from attnlab.evaluation.sensitivity import ROUNDING, estimated_sensitivity, measured_sensitivity
from attnlab.measure import parameter_count
from attnlab.mechanisms.softmax import Softmax
from attnlab.progress import Progress
from attnlab.registry import mechanism
from attnlab.trace import Trace

__all__ = ["CANDIDATES", "MIX", "RecommendConfig", "choosing_and_held_out", "recommend"]

CANDIDATES = ("kernel:elu", "window:r=16", "window:r=64", "top-r:r=16")
# Plans that are tried to keep one budget; tokens of text that are enough to measure a single layer or head on.
CHECKS, ENOUGH = 5, 2048
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
    # Parameters times tokens that all forward passes together may cost: some minutes on two cores.
    work: float = 1e13

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


@torch.no_grad()
def recommend(
    loaded: LoadedModel,
    windows: Windows,
    trace: Trace,
    *,
    config: RecommendConfig,
    held_out: Windows | None = None,
    progress: Progress | None = None,
    on_result: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """The recommendation as JSON: each unit's sensitivity, the plans that no other beats, and one sentence.

    The loss is measured with one unit at a time on each candidate and all others exact, or estimated from its gradient
    where that would take too long (``sensitivity_is``). The increases are taken to add up, which gives the greedy
    choice; its true loss is then measured, and moves are undone until it is in the budget. ``held_out`` is text that
    plans are not chosen on; each plan's loss is measured there too. ``config.work`` bounds the forward passes: windows
    are left out where there are too many. ``on_result`` gets what there is after each plan, without times.
    """
    progress, keep = progress or Progress("recommending"), on_result or (lambda result: None)
    units = _units(trace, config.by)
    effort = _effort(loaded, windows, config, len(units))
    meter = PlanMeter(
        loaded, effort.cut(windows), held_out and effort.cut(held_out), trace, config.batch, config.repeats, progress
    )
    progress.expect(effort.passes)
    progress.stage("exact attention")
    exact = meter.quality(Plan({}))
    if exact is None or not math.isfinite(exact["loss"]) or exact["loss"] <= 0:
        raise ValueError(
            "a recommendation needs a model that predicts tokens (masked or causal), and a text to predict"
        )
    sense = measured_sensitivity if effort.measured else estimated_sensitivity
    sensitivity = sense(meter, units, config.candidates, exact["loss"])
    increase = {(s["of"], s["mechanism"]): s["increase"] for s in sensitivity if s["refused"] is None}
    result: dict[str, Any] = {
        "by": config.by,
        "candidates": list(config.candidates),
        "exact": exact,
        "tokens": {"chosen_on": meter.windows.tokens, "held_out": meter.held_out and meter.held_out.tokens},
        "sensitivity_is": "measured" if effort.measured else "estimated",
        "sensitivity": [{name: value for name, value in s.items() if name != "of"} for s in sensitivity],
        "rows": [],
        "left_out": [],
    }
    rows = _plans(meter, effort, increase, exact["loss"], config, lambda rows: keep(result | {"rows": rows}))
    progress.stage("timing the plans")
    meter.add_times(rows)
    result["rows"], result["left_out"] = unbeaten(rows)
    result |= recommended(result)
    keep(result)
    return result


def _plans(
    meter: PlanMeter,
    effort: _Effort,
    increase: Mapping[Move, float],
    exact: float,
    config: RecommendConfig,
    keep: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Exact attention, and the plan of each budget and choice of mechanisms; ``keep`` gets them as they come."""
    units = len(_units(meter.trace, config.by))
    rows = [{"budget": None, "mechanism": "softmax", **_row(meter, [], increase, units)}]
    for budget in config.budgets:
        for name, wanted in effort.choices.items():
            meter.progress.stage(f"{name}, {100 * budget:g} % of the loss")
            # Estimates give an order; how many of the moves the budget bears is measured.
            allowance = (budget + ROUNDING) * exact if effort.measured else math.inf
            moves = greedy(increase, wanted=wanted, allowance=allowance)
            moves = _verified(meter, moves, most=(1 + budget + ROUNDING) * exact, checks=effort.checks)
            rows.append({"budget": budget, "mechanism": name, **_row(meter, moves, increase, units)})
            replaced = f"{rows[-1]['replaced']} of {units} {config.by}"
            meter.progress.finished(f"{name} within +{100 * budget:g} %: {replaced}")
            keep(list(rows))
    return rows


@dataclass(frozen=True)
class _Effort:
    """How much is measured, so that a recommendation takes minutes whatever the model's size."""

    measured: bool
    windows: int
    checks: int
    passes: int
    choices: Mapping[str, list[str]]

    def cut(self, windows: Windows) -> Windows:
        """The first windows, as many as are affordable."""
        return windows.part(slice(self.windows))


def _effort(loaded: LoadedModel, windows: Windows, config: RecommendConfig, units: int) -> _Effort:
    """Single increases are measured if that leaves ENOUGH tokens for each pass; else a gradient estimates them."""
    parameters, length = parameter_count(loaded.model), windows.input_ids.shape[1]
    single = {spec: [spec] for spec in config.candidates}
    mixed = {MIX: list(config.candidates), **single} if len(single) > 1 else single
    for measured in (True, False):
        choices = mixed if measured else dict(list(mixed.items())[:1])
        checks = CHECKS if measured else 2 * CHECKS
        # For each plan also one pass over the held-out text; without measuring, a pass and its gradient stand for some.
        passes = 2 + len(choices) * len(config.budgets) * (checks + 1)
        passes += units * len(config.candidates) if measured else 4 * len(config.candidates)
        tokens = int(config.work / (passes * max(1, parameters)))
        if tokens >= min(ENOUGH, windows.tokens):
            break
    return _Effort(measured, max(1, tokens // length), checks, passes, choices)


def _units(trace: Trace, by: str) -> list[Unit]:
    layers = [Unit(layer.kind, layer.layer, layer.call.q.shape[1]) for layer in trace]
    if by == "layers":
        return layers
    return [Unit(unit.kind, unit.layer, unit.heads, head) for unit in layers for head in range(unit.heads)]


def _verified(meter: PlanMeter, moves: list[Move], *, most: float, checks: int) -> list[Move]:
    """As many of the moves, from the first on, as keep the measured loss at ``most``: found by halving."""

    def fits(count: int) -> bool:
        measured = meter.quality(plan_of(moves[:count]))
        return measured is not None and measured["loss"] <= most

    fitting, beyond = 0, len(moves) + 1
    tried = len(moves)
    for _ in range(checks):
        if beyond - fitting <= 1:
            break
        fitting, beyond = (tried, beyond) if fits(tried) else (fitting, tried)
        tried = (fitting + beyond) // 2
    return moves[:fitting]


def _row(meter: PlanMeter, moves: list[Move], increase: Mapping[Move, float], units: int) -> dict[str, Any]:
    plan, chosen, exact = plan_of(moves), dict(moves), meter.quality(Plan({}))
    measured = meter.quality(plan)
    assert measured is not None
    assert exact is not None
    return {
        "replaced": len(chosen),
        "placed": dict(Counter(chosen.values()).most_common()),
        "units": units,
        "quality": measured | {"exact": exact["value"]},
        "loss_increase": measured["loss"] / exact["loss"] - 1,
        "held_out_increase": meter.held_out_increase(plan),
        "predicted_increase": sum(increase[move] for move in chosen.items()) / exact["loss"],
        **meter.loss_above(plan),
        "attention_bytes": meter.attention_bytes(plan),
        "time_ratio": None,
        "plan": plan.to_json(),
    }


def choosing_and_held_out(windows: Windows) -> tuple[Windows, Windows | None]:
    """Every other window to choose plans on, and the rest to measure them on; None where there is only one window."""
    choosing, held_out = (windows.part(slice(i, None, 2)) for i in range(2))
    return choosing, held_out if len(held_out.input_ids) else None
