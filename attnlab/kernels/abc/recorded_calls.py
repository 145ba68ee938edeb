"""Calls that are repeated: the first of a kind is recorded as the memory it took and the launches it made.

A later call with the same shapes, strides and dtypes takes fresh memory of the same form and hands its addresses to the
recorded launches. It does nothing else on the host.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlab.kernels.launching import (
    Launched,
    Numbers,
    Options,
    Tensors,
    current_device,
    current_stream,
    direct_call,
    launch,
    launches_plainly,
)

__all__ = ["CallRecorder", "Layout", "RecordedCall", "bytes_before", "bytes_of", "is_recorded", "repeat"]

Grid = tuple[int, int, int]
# The names, shapes and dtypes of tensors that share a buffer.
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
# The index of a tensor that has memory of its own, and an offset in it in bytes.
Place = tuple[int, int]
# Tensors in a buffer begin at multiples of so many bytes: a line of the cache, and more than any load takes.
LINE = 256
# Calls remembered. Where sizes never repeat, all are forgotten whenever there are so many.
MOST = 1024
_RECORDED: dict[Hashable, RecordedCall] = {}


class RecordedCall(NamedTuple):
    """What a call takes and does.

    ``shapes`` are tensors of the form of its fresh ones, without memory. ``places`` are the addresses that it needs,
    among the inputs and then the fresh tensors. A launch is a function and what picks its arguments from the stream,
    the addresses and ``constants``. ``results`` says which fresh tensors are returned, and ``alive`` holds objects
    whose ids must stay theirs.
    """

    device: int | None
    shapes: list[Tensor]
    places: list[Place]
    constants: list[Any]
    launches: list[tuple[Any, Any]]
    results: list[int]
    alive: list[Any]


class CallRecorder:
    """Makes the launches and fresh tensors of one call, and keeps account of them for its record."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.launched: list[tuple[Launched | None, Grid, tuple[Tensor | None, ...]]] = []
        self.fresh: list[Tensor] = []
        # Tensors in a buffer, the buffer, and where they begin in it.
        self.in_buffers: list[tuple[Tensor, Tensor, int]] = []

    def launch(self, kernel: Any, grid: Grid, tensors: Tensors, numbers: Numbers, options: Options) -> None:
        """``launching.launch``."""
        self.launched.append((launch(kernel, grid, tensors, numbers, options), grid, tuple(tensors.values())))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """``torch.empty`` on the call's device."""
        self.fresh.append(torch.empty(shape, dtype=dtype, device=self.device))
        return self.fresh[-1]

    def empty_like(self, t: Tensor) -> Tensor:
        """``torch.empty_like``: a tensor that lies in memory as ``t`` does."""
        self.fresh.append(torch.empty_like(t))
        return self.fresh[-1]

    def empties(self, layout: Layout) -> dict[str, Tensor]:
        """Tensors that share one fresh buffer."""
        return self.views(self.empty((bytes_of(layout),), torch.uint8), layout)

    def views(self, buffer: Tensor, layout: Layout, begin: int = 0) -> dict[str, Tensor]:
        """The tensors of a layout in a buffer, the first of them at ``begin``."""
        views: dict[str, Tensor] = {}
        as_dtype: dict[torch.dtype, Tensor] = {}
        for (name, (shape, dtype)), at in zip(layout.items(), _begins(layout, begin), strict=False):
            if dtype not in as_dtype:
                as_dtype[dtype] = buffer[: len(buffer) // dtype.itemsize * dtype.itemsize].view(dtype)
            strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
            views[name] = as_dtype[dtype].as_strided(shape, strides, at // dtype.itemsize)
            self.in_buffers.append((views[name], buffer, at))
        return views

    def save(self, key: Hashable, inputs: Sequence[Tensor | None], results: Sequence[Tensor]) -> None:
        """Record under ``key`` how ``results`` come from ``inputs``, if direct launches are all there is to it."""
        place_of = self._places(inputs)
        if place_of is None:
            return
        places = sorted({place_of[id(t)] for _, _, tensors in self.launched for t in tensors})
        # The list from which arguments are picked has the stream, then addresses, then constants.
        index = {place: 1 + i for i, place in enumerate(places)}
        constants: list[Any] = []
        launches, alive = [], []
        for launched, grid, tensors in self.launched:
            assert launched is not None
            at = [index[place_of[id(t)]] for t in tensors]
            launches.append(_picked_launch(launched, grid, at, constants, 1 + len(places)))
            alive.append(launched)
        if len(_RECORDED) >= MOST:
            _RECORDED.clear()
        shapes = [torch.empty_like(t) for t in self.fresh]
        for t in shapes:
            t.untyped_storage().resize_(0)
        returned = [place_of[id(t)][0] - len(inputs) for t in results]
        _RECORDED[key] = RecordedCall(self.device.index, shapes, places, constants, launches, returned, alive)

    def _places(self, inputs: Sequence[Tensor | None]) -> dict[int, Place] | None:
        """Where each tensor of the launches lies, by its id; None where that does not hold for other inputs."""
        present = [id(t) for t in inputs if t is not None]
        if len(set(present)) < len(present) or any(launched is None for launched, _, _ in self.launched):
            # One tensor as two inputs would look as if both were always the same.
            return None
        places: dict[int, Place] = {id(t): (i, 0) for i, t in enumerate([*inputs, *self.fresh])}
        places |= {id(t): (places[id(buffer)][0], begin) for t, buffer, begin in self.in_buffers}
        # None has no address, and an empty tensor needs none.
        no_address = (len(inputs) + len(self.fresh), 0)
        places |= {id(t): no_address for t in (None, *(t for t, _, _ in self.in_buffers if t.numel() == 0))}
        known = all(id(t) in places for _, _, tensors in self.launched for t in tensors)
        return places if known else None


def _picked_launch(
    launched: Launched, grid: Grid, at: list[int], constants: list[Any], constants_from: int
) -> tuple[Any, Any]:  # fmt: skip
    """The function that makes a launch, and what picks its arguments: addresses by the indices ``at``.

    Its other arguments are appended to ``constants``, which are picked from the index ``constants_from`` on.
    """
    stream, addresses = object(), [object() for _ in at]
    function, args = direct_call(launched, grid, stream, addresses)
    index = {id(stream): 0, **{id(address): i for address, i in zip(addresses, at, strict=True)}}
    picks = []
    for arg in args:
        if id(arg) not in index:
            picks.append(constants_from + len(constants))
            constants.append(arg)
        else:
            picks.append(index[id(arg)])
    return function, itemgetter(*picks)


def is_recorded(key: Hashable) -> bool:
    """Whether a call of this kind has been recorded."""
    return key in _RECORDED


def repeat(key: Hashable, inputs: Sequence[Tensor | None]) -> list[Tensor] | None:
    """The results of the call recorded under ``key``, for ``inputs``; None where there is none or it cannot be used."""
    recorded = _RECORDED.get(key)
    if recorded is None or launches_plainly() or current_device() != recorded.device:
        return None
    device, shapes, places, constants, launches, results, _ = recorded
    bases = [0 if t is None else t.data_ptr() for t in inputs]
    every = 0
    for base in bases:
        every |= base
    if every % 16:
        return None
    fresh = [torch.empty_like(t) for t in shapes]
    bases += [t.data_ptr() for t in fresh]
    bases.append(0)
    arguments = [current_stream(device), *[bases[i] + begin for i, begin in places], *constants]
    for function, pick in launches:
        function(*pick(arguments))
    return [fresh[i] for i in results]


def _begins(layout: Layout, begin: int = 0) -> list[int]:
    """Where each tensor begins, in bytes, and where all end."""
    begins = [begin]
    for shape, dtype in layout.values():
        end = begins[-1] + prod(shape) * dtype.itemsize
        begins.append((end + LINE - 1) // LINE * LINE)
    return begins


def bytes_of(layout: Layout, begin: int = 0) -> int:
    """Where a buffer for these tensors ends, if the first is at ``begin``."""
    return _begins(layout, begin)[-1]


def bytes_before(name: str, layout: Layout) -> int:
    """Where this tensor of a layout begins."""
    return _begins(layout)[list(layout).index(name)]
