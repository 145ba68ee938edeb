"""The registry of readings: ``@reading("norm", ...)`` adds one, from this folder, an entry point or a file's path."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnlab.discovery import existing_file, import_all, nearest_name, run_file
from attnlab.fields import expect
from attnlab.trace import LayerTrace

__all__ = ["NEEDS", "Reading", "named_reading", "reading", "reading_names", "recorded_reading"]

ENTRY_POINT_GROUP = "attnlab.readings"
NEEDS = {
    "values": "looks at the values as well as at the weights",
    "all layers": "follows attention through the layers; its function takes all of them and yields a map for each",
    "gradients": "explains one number of the forward pass; its function also takes output_gradient",
    "noise": "draws random numbers; its function also takes generator",
}

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Reading:
    """A reading of recorded attention: a map (b, h, q, k) per layer, or with ``per_query`` one number (b, h, q)."""

    name: str
    # One sentence that says what a number of it means.
    summary: str
    function: Callable[..., Any]
    # Keys of ``NEEDS``.
    needs: frozenset[str] = frozenset()
    # What it cannot do, with the reason.
    cannot: str = ""
    per_query: bool = False
    # Whether positive and negative numbers cancel when it is summed over heads and queries.
    signed: bool = False
    # A control is there to compare other readings with; a list of everything worth looking at leaves it out.
    control: bool = False

    @property
    def shows_maps(self) -> bool:
        """Whether a recorded forward pass alone is enough for its maps."""
        return not self.per_query and "gradients" not in self.needs

    def of_layers(
        self, layers: Sequence[LayerTrace], *, target: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Iterator[Tensor | None]:
        """The reading of each layer, made when it is asked for; None for a layer that the reading cannot be made of.

        ``target`` is the number that a reading with gradients explains; ``generator`` is seeded with 0 by default.
        """
        slopes: Sequence[Tensor] | None = None
        if "gradients" in self.needs:
            slopes = self._slopes(layers, target)
        more: dict[str, Any] = {}
        if "noise" in self.needs:
            more["generator"] = generator or torch.Generator().manual_seed(0)
        if "all layers" in self.needs:
            if slopes is not None:
                more["output_gradient"] = slopes
            return iter(self.function(layers, **more))
        return self._layer_by_layer(layers, slopes, more)

    def _layer_by_layer(
        self, layers: Sequence[LayerTrace], slopes: Sequence[Tensor] | None, more: dict[str, Any]
    ) -> Iterator[Tensor | None]:
        for i, layer in enumerate(layers):
            yield self.function(layer, **more, **({} if slopes is None else {"output_gradient": slopes[i]}))

    def _slopes(self, layers: Sequence[LayerTrace], target: Tensor | None) -> list[Tensor]:
        from attnlab.reading.gradient import output_gradients

        if target is None:
            raise ValueError(
                f"reading {self.name!r} explains one number: pass target=, a logit of the recorded forward pass"
            )
        return output_gradients(layers, target)


_readings: dict[str, Reading] = {}


def reading(
    name: str,
    summary: str,
    *,
    needs: Sequence[str] = (),
    cannot: str = "",
    per_query: bool = False,
    signed: bool = False,
    control: bool = False,
) -> Callable[[F], F]:
    """Function decorator: make a reading known as ``name``; the function maps a ``LayerTrace`` to a tensor.

    ``needs`` are keys of ``NEEDS``, which also say what more the function takes.
    """
    unknown = sorted(set(needs) - set(NEEDS))
    if unknown:
        raise ValueError(f"reading {name!r} needs {unknown}; what a reading can need: {', '.join(NEEDS)}")

    def add(function: F) -> F:
        known = _readings.get(name)
        if known is not None and known.function.__qualname__ != function.__qualname__:
            raise ValueError(f"reading name {name!r} is taken by {known.function.__qualname__}; choose another")
        _readings[name] = Reading(name, summary, function, frozenset(needs), cannot, per_query, signed, control)
        return function

    return add


def named_reading(name: str | Reading) -> Reading:
    """The reading of this name, or the function in a file: ``named_reading("./my_readings.py:largest")``.

    >>> named_reading("norm").summary
    'The length of the vector that a key adds to a query, after W_O (Kobayashi et al., 2020).'
    """
    if isinstance(name, Reading):
        return name
    expect("reading", name, str, 'the name of a reading, such as "effective", or "./file.py:function"')
    path, colon, function = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _in_file(path, function)
    readings = _load()
    if name not in readings:
        hint = nearest_name(name, readings)
        raise ValueError(f"no reading named {name!r}; {hint}the readings are {', '.join(reading_names())}")
    return readings[name]


def recorded_reading(name: str) -> Reading:
    """The reading of this name; a ValueError where it needs more than a recorded forward pass."""
    chosen = named_reading(name)
    if "gradients" in chosen.needs:
        raise ValueError(f"reading {name!r} explains one number, and none is named here; use attnlab.read with target=")
    return chosen


def reading_names(*, maps: bool = False, controls: bool = True) -> list[str]:
    """Every registered name: "standard", then the others sorted.

    ``maps=True`` leaves out readings with one number per query and those that need gradients; ``controls=False`` leaves
    out those that are there to compare others with.
    """
    chosen = [r.name for r in _load().values() if (r.shows_maps or not maps) and (controls or not r.control)]
    return sorted(chosen, key=lambda name: (name != "standard", name))


@functools.cache
def _load() -> dict[str, Reading]:
    import_all("attnlab.reading", ENTRY_POINT_GROUP)
    return _readings


def _in_file(path: str, name: str) -> Reading:
    """The function ``name`` of a Python file; a plain function is a reading of single layers named by its place."""
    file = existing_file(path, "a reading is a name or ./file.py:function")
    # The registered readings first, so that a name that is taken is an error in the user's file.
    _load()
    function = getattr(run_file(file), name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")
    for known in _readings.values():
        if known.function is function:
            return known
    summary = (function.__doc__ or f"What {name} in {file.name} says.").strip().splitlines()[0]
    return Reading(f"{file.name}:{name}", summary, function)
