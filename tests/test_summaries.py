"""Printing a result never fills pages."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

import attnlab as al
from attnlab.attention import Mechanism
from attnlab.summaries import short_repr

# Rooms whose records a user meets; those of linalg, kernels and mechanisms stay inside.
ROOMS = ("adapters", "data", "dynamics", "evaluation", "guidance", "models", "reading", "training")
MODULES = ("attention", "trace", "patterns", "loss")
ARRAYS = ("Tensor", "ndarray", "Float[", "Int[", "Bool[")


def public_classes() -> Iterator[type]:
    names = [f"attnlab.{name}" for name in MODULES]
    for room in ROOMS:
        package = importlib.import_module(f"attnlab.{room}")
        names += [f"attnlab.{room}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    for name in names:
        for cls in vars(importlib.import_module(name)).values():
            if isinstance(cls, type) and cls.__module__ == name and not cls.__name__.startswith("_"):
                yield cls


def shown_arrays(cls: type) -> list[str]:
    """The fields of a record that hold tensors or arrays and are part of its repr."""
    if dataclasses.is_dataclass(cls):
        fields = {f.name: str(f.type) for f in dataclasses.fields(cls) if f.repr}
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        fields = {name: str(kind) for name, kind in cls.__annotations__.items()}
    else:
        return []
    return [name for name, kind in fields.items() if any(word in kind for word in ARRAYS) and "Callable" not in kind]


def records() -> list[type]:
    return [cls for cls in public_classes() if shown_arrays(cls) and not issubclass(cls, Mechanism)]


def test_the_law_finds_records() -> None:
    assert {al.LayerTrace, al.EffectiveAttention, al.AttentionCall} <= set(records())


@pytest.mark.parametrize("cls", records(), ids=lambda cls: cls.__name__)
def test_a_record_of_tensors_has_a_short_repr(cls: type) -> None:
    own = cls.__repr__ is short_repr or "short_repr" in cls.__repr__.__code__.co_names
    assert own, f"{cls.__module__}: {cls.__name__} needs __repr__ = short_repr"


def test_what_is_shown() -> None:
    class Pair(NamedTuple):
        left: torch.Tensor
        right: object

        __repr__ = short_repr

    assert repr(Pair(torch.zeros(2, 3), [np.zeros(4)])) == "Pair(left=float32(2, 3), right=<list of 1>)"
    assert repr(Pair(torch.zeros(1).long(), "x" * 300)).endswith("x…)")
    model = al.shipped_model().model
    with torch.no_grad(), al.record(model) as trace:
        model(torch.arange(90)[None] + 5)
    for shown in (repr(trace[0]), repr(trace), repr(al.effective_attention(trace[0]))):
        assert len(shown) < 700
        assert "\n" not in shown
    assert "(1, 8, 90, 32)" in repr(trace[0])
