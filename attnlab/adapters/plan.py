"""A plan: which layers of a model attend by which mechanism, as one object that can be saved and swapped in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from attnlab.adapters.contexts import swap
from attnlab.fields import expect
from attnlab.provenance import write_json
from attnlab.registry import mechanism, stored_mechanism

__all__ = ["Plan", "swap_plan"]

# A layer as ``swap(layers=...)`` takes it: 3, or ("cross", 3).
LayerKey = int | tuple[str, int]


@dataclass(frozen=True)
class Plan:
    """Layers and the spec strings they attend by; layers that are not named keep the model's own attention.

    >>> plan = Plan({0: "top-r:r=16", ("cross", 1): "kernel:elu"})
    >>> plan.to_json()
    {'layers': {'0': 'top-r:r=16', 'cross 1': 'kernel:elu'}}
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    layers: Mapping[LayerKey, str]

    def __post_init__(self) -> None:
        expect("layers", self.layers, Mapping, 'a mapping such as {0: "top-r:r=16", ("cross", 1): "kernel:elu"}')
        for key, spec in self.layers.items():
            _name(key)
            if not isinstance(spec, str):
                raise ValueError(f"layer {key!r}: a plan holds spec strings, got {type(spec).__name__}")
            mechanism(spec)
        object.__setattr__(self, "layers", dict(self.layers))

    def to_json(self) -> dict[str, dict[str, str]]:
        """The plan as JSON holds it, with layers named "3" or "cross 3"."""
        return {"layers": {_name(key): spec for key, spec in self.layers.items()}}

    @staticmethod
    def from_json(content: Any) -> Plan:
        """The plan that ``to_json`` wrote."""
        if not isinstance(content, Mapping) or not isinstance(content.get("layers"), Mapping):
            raise ValueError('a plan is {"layers": {"0": "top-r:r=16", "cross 1": ...}}, got something else')
        for spec in filter(lambda spec: isinstance(spec, str), content["layers"].values()):
            stored_mechanism(spec)
        return Plan({_key(name): spec for name, spec in content["layers"].items()})

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
    with ExitStack() as undo:
        for key, spec in plan.layers.items():
            undo.enter_context(swap(model, spec, layers=[key], dropout=dropout))
        yield model


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
