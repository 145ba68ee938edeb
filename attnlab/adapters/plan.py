"""A plan: which layers of a model attend by which mechanism, as one object that can be saved and swapped in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from attnlab.adapters.cache_bytes import layer_shapes
from attnlab.adapters.contexts import swap
from attnlab.fields import check_fields, check_int, expect
from attnlab.provenance import write_json
from attnlab.registry import mechanism, stored_mechanism
from attnlab.summaries import notebook_view

__all__ = ["Plan", "PlannedFor", "refuse_other_model", "swap_plan"]

# A layer as ``swap(layers=...)`` takes it: 3, or ("cross", 3).
LayerKey = int | tuple[str, int]


@dataclass(frozen=True)
class PlannedFor:
    """The model that a plan is for, and the length and the share of softmax's cache at which it was chosen.

    >>> print(PlannedFor(layers=30, key_value_heads=3, head_size=64))
    30 layers with 3 key/value heads of 64
    """

    layers: int
    key_value_heads: int
    head_size: int
    length: int | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("layers", "key_value_heads", "head_size"):
            check_int(name, getattr(self, name), least=1)

    def __str__(self) -> str:
        return f"{self.layers} layers with {self.key_value_heads} key/value heads of {self.head_size}"


@dataclass(frozen=True)
class Plan:
    """Layers and the spec strings they attend by; layers that are not named keep the model's own attention.

    ``planned_for`` says which model the plan is for, where that is known; another is refused. ``report`` is what
    ``plan_conversion`` measured; it is not saved with the plan.

    >>> plan = Plan({0: "top-r:r=16", ("cross", 1): "kernel:elu"})
    >>> plan.to_json()
    {'layers': {'0': 'top-r:r=16', 'cross 1': 'kernel:elu'}}
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    layers: Mapping[LayerKey, str]
    planned_for: PlannedFor | None = None
    report: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.planned_for is not None:
            expect("planned_for", self.planned_for, PlannedFor, "a PlannedFor")
        expect("layers", self.layers, Mapping, 'a mapping such as {0: "top-r:r=16", ("cross", 1): "kernel:elu"}')
        for key, spec in self.layers.items():
            _name(key)
            if not isinstance(spec, str):
                raise ValueError(f"layer {key!r}: a plan holds spec strings, got {type(spec).__name__}")
            mechanism(spec)
        object.__setattr__(self, "layers", dict(self.layers))

    def _repr_html_(self) -> str:
        rows = [{"layer": _name(key), "mechanism": spec} for key, spec in self.layers.items()]
        about = f"For {self.planned_for}." if self.planned_for is not None else ""
        measured = (
            ""
            if self.report is None
            else "; ".join(
                f"{row['name']} {row['bytes']:,} bytes, loss {row['loss']:.3f}" for row in self.report["measured"]
            )
        )
        note = f"On held-out text: {measured}." if measured else ""
        return notebook_view("Plan: layers not named keep the model's own attention", rows, about=about, note=note)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON holds it, with layers named "3" or "cross 3"."""
        known = {} if self.planned_for is None else {"planned_for": asdict(self.planned_for)}
        return {"layers": {_name(key): spec for key, spec in self.layers.items()}} | known

    @staticmethod
    def from_json(content: Any) -> Plan:
        """The plan that ``to_json`` wrote."""
        if not isinstance(content, Mapping) or not isinstance(content.get("layers"), Mapping):
            raise ValueError('a plan is {"layers": {"0": "top-r:r=16", "cross 1": ...}}, got something else')
        for spec in filter(lambda spec: isinstance(spec, str), content["layers"].values()):
            stored_mechanism(spec)
        planned_for = content.get("planned_for")
        if planned_for is not None:
            try:
                planned_for = PlannedFor(**planned_for)
            except TypeError:
                fields = ", ".join(PlannedFor.__dataclass_fields__)
                raise ValueError(f"planned_for names the model by {fields}, got {planned_for!r}") from None
        return Plan({_key(name): spec for name, spec in content["layers"].items()}, planned_for)

    def save(self, path: Path | str) -> Path:
        """Write the plan as JSON."""
        return write_json(path, self.to_json())

    @staticmethod
    def load(path: Path | str) -> Plan:
        """Read a plan that ``save`` wrote."""
        try:
            return Plan.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: not a plan ({error})") from None


@contextmanager
def swap_plan(model: nn.Module, plan: Plan, *, dropout: str = "refuse") -> Iterator[nn.Module]:
    """Inside the context, each layer that ``plan`` names attends by its mechanism; undone on exit like ``swap``."""
    expect("plan", plan, Plan, "a Plan of layers and specs")
    refuse_other_model(model, plan)
    with ExitStack() as undo:
        for key, spec in plan.layers.items():
            undo.enter_context(swap(model, spec, layers=[key], dropout=dropout))
        yield model


def refuse_other_model(model: nn.Module, plan: Plan) -> None:
    """Raise a ValueError if the plan says that it is for a model of other sizes."""
    if plan.planned_for is None:
        return
    shapes = layer_shapes(model)
    sizes = {(shape.groups, shape.d) for shape in shapes}
    has = str(PlannedFor(len(shapes), *sizes.pop())) if len(sizes) == 1 else f"{len(shapes)} layers of several sizes"
    if has != str(plan.planned_for):
        raise ValueError(f"this plan is for {plan.planned_for}; the model has {has}; make a plan for this model")


def _name(key: Any) -> str:
    match key:
        case bool():
            pass
        case int():
            return str(key)
        case (str() as kind, int() as layer):
            return f"{kind} {layer}"
    raise ValueError(f'a layer is a number or a pair such as ("cross", 1), got {key!r}')


def _key(name: str) -> LayerKey:
    kind, _, layer = name.rpartition(" ")
    try:
        return (kind, int(layer)) if kind else int(layer)
    except ValueError:
        raise ValueError(f'a layer is named "3" or "cross 3", got {name!r}') from None
