"""Plans as a choice: moves of layers or heads to mechanisms, which plans pay, and the one that is recommended."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnlab.adapters.plan import Plan
from attnlab.mechanisms.per_group import PerGroup
from attnlab.mechanisms.per_head import PerHead, per_head, split_specs
from attnlab.pages.numbers import with_interval
from attnlab.registry import mechanism

__all__ = [
    "Move",
    "Unit",
    "greedy",
    "head_specs",
    "plan_name",
    "plan_of",
    "recommended",
    "unbeaten",
    "within_bytes",
    "write_plans",
]

# A plan that adds no more than this share of the loss may be recommended.
ACCEPTED = 0.02
# Times within this factor of each other are the same.
NOISE = 1.05


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


def within_bytes(options: Mapping[Unit, Mapping[str, tuple[int, float]]], limit: int) -> dict[Unit, str]:
    """The option of each unit, {spec: (bytes, cost)}, so that bytes add up to at most ``limit`` and costs to little.

    Every unit begins with its smallest option. Then bytes are spent where they save most cost each, along the lower
    convex hull of each unit's options, and what is left on any option that fits (the greedy multiple-choice knapsack).

    >>> a, b = Unit("decoder", 0, 2, 0), Unit("decoder", 0, 2, 1)
    >>> options = {a: {"window": (1, 0.5), "softmax": (8, 0.0)}, b: {"window": (1, 0.1), "softmax": (8, 0.0)}}
    >>> list(within_bytes(options, 10).values())
    ['softmax', 'window']
    """
    chosen = {unit: min(own, key=lambda spec: own[spec]) for unit, own in options.items()}
    left = limit - sum(options[unit][spec][0] for unit, spec in chosen.items())
    if left < 0:
        raise ValueError(
            f"the smallest candidates take {limit - left} bytes for a sequence, and the budget is {limit}; name "
            "smaller candidates, or raise the budget"
        )

    def best(unit: Unit) -> tuple[float, str] | None:
        """(cost saved per byte, the option) of the step that saves most among those that fit."""
        own, (held, cost) = options[unit], options[unit][chosen[unit]]
        steps = [
            ((cost - c) / max(1, size - held), spec)
            for spec, (size, c) in own.items()
            if c < cost and size - held <= left
        ]
        return max(steps, default=None)

    while steps := [(step, unit) for unit in options if (step := best(unit)) is not None]:
        (_, spec), unit = max(steps, key=lambda one: one[0][0])
        left -= options[unit][spec][0] - options[unit][chosen[unit]][0]
        chosen[unit] = spec
    return chosen


def plan_of(moves: Iterable[Move], *, join: Callable[[list[str]], str] = per_head) -> Plan:
    """The plan that the moves lead to; a layer of which no head has moved is left out.

    ``join`` makes one spec of those of a layer's heads: of its query heads, or ``per_group`` of its key/value heads.
    """
    specs: dict[tuple[str, int], list[str]] = {}
    for unit, spec in moves:
        layer = specs.setdefault((unit.kind, unit.layer), ["softmax"] * unit.heads)
        for head in range(unit.heads) if unit.head is None else [unit.head]:
            layer[head] = spec
    return Plan({key: join(specs[key]) for key in sorted(specs)})


def head_specs(spec: str, heads: int) -> list[str]:
    """The specs of a layer's heads, or of its key/value heads, whose spec this is.

    >>> head_specs("per-group:groups=softmax/lsh:r=4;rounds=2", 4)
    ['softmax', 'softmax', 'lsh:r=4,rounds=2', 'lsh:r=4,rounds=2']
    >>> head_specs("top-r:r=2", 2)
    ['top-r:r=2', 'top-r:r=2']
    """
    mech = mechanism(spec)
    if isinstance(mech, PerGroup):
        return [own for own in split_specs("groups", mech.groups) for _ in range(heads // len(mech.parts))]
    own = split_specs("heads", mech.heads) if isinstance(mech, PerHead) else [spec]
    return [own[head % len(own)] for head in range(heads)]


def unbeaten(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(softmax and the plans that pay, the others with the reason why they are left out).

    A plan pays if no other row has at most its loss and reads no more bytes and is no slower, up to the clock's noise.
    """
    kept: list[dict[str, Any]] = []
    left_out = []
    names: dict[str, str] = {}
    for row in rows:
        same = names.setdefault(str(row["plan"]), plan_name(row))
        beaten_by = next((plan_name(other) for other in rows if other is not row and _beats(other, row)), None)
        if row["budget"] is None or (same == plan_name(row) and row["replaced"] and beaten_by is None):
            kept.append(row)
            continue
        why = f"the same plan as {same}" if same != plan_name(row) else f"{beaten_by} is as good, as small and as fast"
        shown = ("budget", "mechanism", "replaced", "loss_increase", "attention_bytes", "time_ratio")
        left_out.append({key: row[key] for key in shown} | {"why": why})
    return kept, left_out


def _beats(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one["plan"] == other["plan"]:
        return False
    smaller = one["attention_bytes"] < other["attention_bytes"]
    as_small = one["attention_bytes"] <= other["attention_bytes"] * (1 + 1e-9)
    loss, other_loss = one["quality"]["loss"], other["quality"]["loss"]
    faster = one["time_ratio"] * NOISE < other["time_ratio"]
    better = smaller or faster or loss < other_loss
    return bool(better and as_small and loss <= other_loss and one["time_ratio"] <= other["time_ratio"] * NOISE)


def recommended(result: Mapping[str, Any]) -> dict[str, Any]:
    """``sentence``, and ``recommended``: the plan that it names, or None."""
    most = ACCEPTED
    pays = [
        row
        for row in result["rows"]
        if row["budget"] is not None
        and max(row["loss_increase"], row["held_out_increase"] or 0.0) <= most
        and (row["attention_bytes"] < 1 or row["time_ratio"] * NOISE < 1)
    ]
    if not pays:
        reason = f"no plan within +{100 * most:g} % of the loss reads fewer bytes or is faster"
        return {"recommended": None, "sentence": f"keep softmax: {reason}"}
    best = min(pays, key=lambda row: (row["attention_bytes"], row["quality"]["loss"]))
    loss = with_interval(best["loss_above"], best["loss_above_low"], best["loss_above_high"], sign=True)
    costs = f"attention bytes {best['attention_bytes']:.2g}, time {best['time_ratio']:.2g} x"
    return {"recommended": best["plan"], "sentence": f"use {_placed(best, result['by'])}: loss {loss}, {costs}"}


def _placed(row: Mapping[str, Any], by: str) -> str:
    """Which mechanisms a plan puts where, in a few words."""
    if by == "heads":
        return " and ".join(f"{spec} in {count} of {row['units']} heads" for spec, count in row["placed"].items())
    places: dict[str, list[str]] = {}
    for layer, spec in row["plan"]["layers"].items():
        places.setdefault(spec, []).append(layer)
    return " and ".join(f"{spec} in {_numbers(layers)}" for spec, layers in places.items())


def _numbers(layers: Sequence[str]) -> str:
    """Layers as ranges.

    >>> _numbers(["decoder 0", "decoder 1", "decoder 2", "decoder 5"])
    'decoder layers 0-2, 5'
    """
    by_kind: dict[str, list[int]] = {}
    for name in layers:
        kind, _, number = name.rpartition(" ")
        by_kind.setdefault(kind, []).append(int(number))
    parts = []
    for kind, numbers in by_kind.items():
        runs: list[list[int]] = []
        for i in sorted(numbers):
            follows = bool(runs) and runs[-1][1] == i - 1
            runs = [*runs[:-1], [runs[-1][0], i]] if follows else [*runs, [i, i]]
        shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
        parts.append(f"{kind} layer{'s' * (len(numbers) > 1)} {shown}".strip())
    return " and ".join(parts)


def plan_name(row: Mapping[str, Any]) -> str:
    """A plan by its mechanism and budget."""
    return str(row["mechanism"]) if row["budget"] is None else f"{row['mechanism']} within +{100 * row['budget']:g} %"


def write_plans(folder: Path, recommendation: Mapping[str, Any]) -> list[Path]:
    """One JSON file per recommended plan that replaces anything, named by its budget and mechanism; their paths."""
    written = []
    for row in recommendation["rows"]:
        if row["replaced"]:
            name = re.sub(r"[^\w.+=-]+", "_", f"{100 * row['budget']:g}-percent-{row['mechanism']}")
            written.append(Plan.from_json(row["plan"]).save(folder / f"{name}.json"))
    return written
