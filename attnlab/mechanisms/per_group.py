"""Several mechanisms side by side in one layer, each with key/value heads of its own; they may be learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall, LayerCache, Mechanism
from attnlab.mechanisms.per_head import MixedHeads, per_head, split_specs
from attnlab.registry import mechanism, register, spec_of
from attnlab.shapes import Bool, Int

__all__ = ["GroupCaches", "KeysOfGroups", "PerGroup", "Run", "call_of_run", "per_group"]


class Run(NamedTuple):
    """Neighbouring key/value heads that attend by one mechanism: those from ``lo`` to before ``hi``."""

    part: Mechanism
    lo: int
    hi: int


@register(
    "per-group",
    examples=(
        "per-group:groups=softmax/abc-hybrid:slots=3;window=2;sinks=1;block=1;control=x/softmax",
        "per-group:groups=abc-hybrid:slots=2;window=2;sinks=0;block=2/abc-hybrid:slots=2;window=2;sinks=0;block=2/"
        "abc-mlp:slots=2;tied=false",
        "per-group:groups=top-r:r=2/window:r=3/window:r=3",
        "per-group:groups=abc-hybrid:slots=2;window=3;sinks=1;block=3",
    ),
)
@dataclass(eq=False)
class PerGroup(MixedHeads, nn.Module):
    """Key/value head i, with all query heads that read it, attends by the i-th of ``groups``, specs between slashes.

    n specs for g = m n key/value heads: each is that of m neighbours. Inside a spec, ``;`` stands for the comma between
    settings. Neighbours with the same spec are one part, with parameters of its own where it is learned. They go
    through it together, as views of the layer's queries, keys and values.

    >>> [(run.lo, run.hi) for run in PerGroup("softmax/softmax/window:r=8").runs(6)]
    [(0, 4), (4, 6)]
    """

    groups: str = "softmax"

    def __post_init__(self) -> None:
        nn.Module.__init__(self)
        specs = split_specs("groups", self.groups)
        # Parts by the number of their first spec: learned ones are submodules, which train and are saved.
        self.learned, self.unlearned = nn.ModuleDict(), dict[int, Mechanism]()
        self._firsts: list[int] = []
        for _, run in groupby(enumerate(specs), key=lambda numbered: numbered[1]):
            numbers = [number for number, _ in run]
            self._add(mechanism(specs[numbers[0]]), numbers[0])
            self._firsts += [numbers[0]] * len(numbers)
        tied = {part.tied_across_layers for part in self.learned.values() if isinstance(part, Mechanism)}
        if len(tied) > 1:
            raise ValueError("some of these mechanisms share their parameters across layers; write tied=false in each")
        self.tied_across_layers = tied == {True}
        self._declare()

    def _add(self, part: Mechanism, first: int) -> None:
        if isinstance(part, MixedHeads):
            raise ValueError(f"a key/value head attends by a mechanism without heads of its own, got {part!r}")
        if part.reads_memory:
            raise ValueError(f"{part!r} reads the memory of the layer before, which covers all heads; give it a layer")
        if isinstance(part, nn.Module):
            self.learned[str(first)] = part
        else:
            self.unlearned[first] = part

    @property
    def parts(self) -> tuple[Mechanism, ...]:
        """The mechanisms, one per spec; neighbours with the same spec have the same object."""
        return tuple(self._part(first) for first in self._firsts)

    def _part(self, first: int) -> Mechanism:
        part = self.unlearned.get(first) or self.learned[str(first)]
        assert isinstance(part, Mechanism)
        return part

    def runs(self, heads: int) -> list[Run]:
        """The parts, and which of a layer's key/value heads each has."""
        if heads % len(self._firsts):
            raise ValueError(
                f"{len(self._firsts)} specs cannot be shared out among {heads} key/value heads: give one per head"
            )
        each, firsts = heads // len(self._firsts), sorted(set(self._firsts))
        ends = [*firsts[1:], len(self._firsts)]
        return [Run(self._part(lo), lo * each, hi * each) for lo, hi in zip(firsts, ends, strict=True)]

    def refuse(self, call: AttentionCall) -> None:
        self.runs(call.k.shape[1])
        super().refuse(call)

    def in_layer(self, kind: str, layer: int) -> PerGroup:
        """The same with the parts that this layer uses; learned parts are the same objects."""
        parts = [part.in_layer(kind, layer) for part in self.parts]
        if all(own is part for own, part in zip(parts, self.parts, strict=True)):
            return self
        other = PerGroup("/".join(spec_of(part).replace(",", ";") for part in parts))
        other.learned = self.learned
        return other

    def make_cache(self, batch: int, capacity: int) -> GroupCaches | None:
        """A past for each part; None where every part keeps all keys and values."""
        caches = [self._part(first).make_cache(batch, capacity) for first in sorted(set(self._firsts))]
        return GroupCaches(caches) if any(cache is not None for cache in caches) else None

    def cache_bytes(self, *, length: int, d: int, e: int, dtype: torch.dtype) -> int:
        """The mean over key/value heads."""
        own = [part.cache_bytes(length=length, d=d, e=e, dtype=dtype) for part in self.parts]
        return round(sum(own) / len(own))

    def _side_by_side(self, call: AttentionCall, attend: Callable[[Mechanism, AttentionCall], Tensor]) -> Tensor:
        runs = self.runs(call.k.shape[1])
        return torch.cat([attend(run.part, call_of_run(call, run)) for run in runs], dim=1)


class GroupCaches:
    """The ``LayerCache`` of ``PerGroup``: that of each part; heads whose part has none keep all keys and values."""

    def __init__(self, caches: Sequence[LayerCache | None]) -> None:
        self.caches: list[Any] = [KeysOfGroups() if cache is None else cache for cache in caches]

    def attend(
        self, mechanism: Mechanism, call: AttentionCall, *, key_visible: Bool[Tensor, "b k"] | None
    ) -> tuple[AttentionCall, Tensor]:
        """Each part attends over its own past and takes in the keys and values of its heads."""
        assert isinstance(mechanism, PerGroup), "these caches are those of mechanisms side by side"
        mechanism.refuse(call)
        outputs = []
        for run, cache in zip(mechanism.runs(call.k.shape[1]), self.caches, strict=True):
            outputs.append(cache.attend(run.part, call_of_run(call, run), key_visible=key_visible)[1])
        return call, torch.cat(outputs, dim=1)

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Copy rows."""
        for cache in self.caches:
            cache.select(rows)

    def nbytes(self) -> int:
        """The bytes that are kept."""
        return sum(cache.nbytes() for cache in self.caches)


class KeysOfGroups:
    """The ``LayerCache`` of some heads that keep every key and value."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        # None while every key may be seen.
        self.visible: Tensor | None = None

    def attend(
        self, mechanism: Mechanism, call: AttentionCall, *, key_visible: Bool[Tensor, "b k"] | None
    ) -> tuple[AttentionCall, Tensor]:
        """Attend over all keys so far; which of them may be seen is known from the calls that brought them."""
        past = 0 if self.k is None else self.k.shape[2]
        self.visible = self._seen(call, past)
        # A copy also of the first keys, which are a view of those of all heads.
        self.k = call.k.clone() if self.k is None else torch.cat([self.k, call.k], 2)
        self.v = call.v.clone() if self.v is None else torch.cat([self.v, call.v], 2)
        offset = past if call.causal else 0
        full = replace(call, k=self.k, v=self.v, key_visible=self.visible, offset=offset)
        return full, mechanism(full)

    def _seen(self, call: AttentionCall, past: int) -> Bool[Tensor, "b k"] | None:
        if call.key_visible is None and self.visible is None:
            return None
        b, _, new, _ = call.k.shape
        before, own = (torch.ones(b, n, dtype=torch.bool, device=call.k.device) for n in (past, new))
        before = before if self.visible is None else self.visible
        return torch.cat([before, own if call.key_visible is None else call.key_visible], 1)

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Copy rows."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[rows], self.v[rows]
        if self.visible is not None:
            self.visible = self.visible[rows]

    def nbytes(self) -> int:
        """The bytes that are kept."""
        return sum(t.nbytes for t in (self.k, self.v, self.visible) if t is not None)


def per_group(specs: list[str]) -> str:
    """The spec of a layer whose key/value head i attends by ``specs[i]``; of the one mechanism where all are the same.

    >>> per_group(["softmax", "abc-hybrid:slots=4,window=16"])
    'per-group:groups=softmax/abc-hybrid:slots=4;window=16'
    """
    return per_head(specs, "per-group:groups")


def call_of_run(call: AttentionCall, run: Run) -> AttentionCall:
    """The call of some neighbouring key/value heads and of the query heads that read them: views."""
    queries, keys = slice(run.lo * call.groups, run.hi * call.groups), slice(run.lo, run.hi)
    if keys == slice(0, call.k.shape[1]):
        return call
    mask, bias = (t if t is None or t.shape[1] == 1 else t[:, queries] for t in (call.mask, call.bias))
    return replace(call, q=call.q[:, queries], k=call.k[:, keys], v=call.v[:, keys], mask=mask, bias=bias)
