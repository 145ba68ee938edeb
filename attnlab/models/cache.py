"""The past of a decoder: for each layer its keys and values, preallocated, and which of them may be seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, LayerCache, Mechanism
from attnlab.models.positions import count_positions
from attnlab.shapes import Bool, Float, Int

__all__ = ["BoundedMemoryStep", "Cache", "KeyValueCache", "SourceCache", "refuse_other_mechanism"]


class KeyValueCache:
    """Every past key and value, in buffers allocated once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def attend(
        self, mechanism: Mechanism, call: AttentionCall, *, key_visible: Bool[Tensor, "b k"] | None
    ) -> tuple[AttentionCall, Tensor]:
        """The mechanism's output for the call's queries over the cached keys and the call's own."""
        if self.k is None or self.v is None:
            self.k, self.v = _buffer(call.k, self.capacity), _buffer(call.v, self.capacity)
        start, end = self.length, self.length + call.k.shape[2]
        self.k[:, :, start:end] = call.k
        self.v[:, :, start:end] = call.v
        self.length = end
        past = self.k[:, :, :end], self.v[:, :, :end]
        full = replace(call, k=past[0], v=past[1], key_visible=key_visible, offset=start)
        return full, mechanism(full)

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Copy rows, of which only the filled part matters."""
        if self.k is not None and self.v is not None:
            self.k, self.v = _rows(self.k, rows, self.length), _rows(self.v, rows, self.length)


class BoundedMemoryStep(Mechanism):
    """The mechanism of a decoding step that read a bounded memory: the keys of the past are gone, so W is unknown."""

    def __init__(self, mechanism: Mechanism, past: int) -> None:
        self.mechanism, self.past = mechanism, past

    def __repr__(self) -> str:
        return repr(self.mechanism)

    def reference(self, call: AttentionCall) -> Tensor:
        raise ValueError(
            f"this step of {self.mechanism!r} read a memory of {self.past} earlier tokens, whose keys are not kept; "
            "for W run the whole text at once, or decode without a cache (generate with use_cache=False, search with "
            "cached=False)"
        )

    forward = reference


def refuse_other_mechanism(cache: LayerCache, made_by: Mechanism | None, mech: Mechanism) -> None:
    """Raise a ValueError if a bounded memory is to be read by another mechanism than the one that made it."""
    if not isinstance(cache, KeyValueCache) and made_by is not None and mech is not made_by:
        raise ValueError(
            f"this cache was made for {made_by!r} and keeps no keys for {mech!r} to read; begin with an empty cache "
            "inside the swap"
        )


class SourceCache:
    """A cross-attention's keys and values, made at the first step, or the mechanism's own ``state`` in their place."""

    made_by: Mechanism | None = None

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.state: LayerCache | None = None

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Copy rows."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[rows], self.v[rows]
        if self.state is not None:
            self.state.select(rows)


class Cache:
    """A decoder's past: one ``LayerCache`` per layer, one ``SourceCache`` per cross-attention, and what may be seen.

    ``made_by`` is the mechanism of each layer.
    """

    def __init__(
        self, layers: Sequence[LayerCache], *, made_by: Sequence[Mechanism], cross_layers: int, capacity: int
    ) -> None:
        self.layers = list(layers)
        self.made_by = list(made_by)
        self.cross = [SourceCache() for _ in range(cross_layers)]
        self.capacity = capacity
        self.length = 0
        self._visible: Tensor | None = None

    def of_layer(self, layer: int, mech: Mechanism) -> LayerCache:
        """The past of a layer that attends by ``mech``."""
        refuse_other_mechanism(self.layers[layer], self.made_by[layer], mech)
        return self.layers[layer]

    def extend(
        self, tokens: Int[Tensor, "b q"], visible: Bool[Tensor, "b q"] | None
    ) -> tuple[Bool[Tensor, "b k"] | None, Int[Tensor, "#b q"]]:
        """Count in new tokens: which keys may be seen so far (None: all), and the new tokens' positions."""
        (batch, new), start = tokens.shape, self.length
        end = self.length = start + new
        if end > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} positions, {end} are needed; make it with a larger capacity"
            )
        if visible is None and self._visible is None:
            return None, torch.arange(start, end, device=tokens.device)[None]
        if self._visible is None:
            self._visible = torch.ones(batch, self.capacity, dtype=torch.bool, device=tokens.device)
        if visible is not None:
            self._visible[:, start:end] = visible
        seen = self._visible[:, :end]
        return seen, count_positions(seen)[:, start:]

    def select(self, rows: Int[Tensor, " n"], *, same_source: bool = False) -> None:
        """Reorder, repeat or drop rows of the batch; ``same_source`` says that each row keeps its source sentence."""
        if self._visible is not None:
            self._visible = self._visible[rows]
        for layer in self.layers:
            layer.select(rows)
        if not same_source:
            for cross in self.cross:
                cross.select(rows)


def _buffer(t: Float[Tensor, "b h k d"], capacity: int) -> Tensor:
    return t.new_empty(t.shape[0], t.shape[1], capacity, t.shape[3])


def _rows(t: Float[Tensor, "b h k d"], rows: Int[Tensor, " n"], length: int) -> Tensor:
    chosen = t.new_empty(rows.shape[0], *t.shape[1:])
    chosen[:, :, :length] = t[:, :, :length].index_select(0, rows)
    return chosen
