"""Several mechanisms side by side in one layer, each with key/value heads of its own; they may be learned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall, LayerCache, Mechanism
from attnlab.mechanisms._bounded.continued import bytes_of
from attnlab.mechanisms._device import kernels_take
from attnlab.mechanisms.per_head import MixedHeads, per_head, split_specs
from attnlab.mechanisms.softmax import Softmax
from attnlab.registry import mechanism, register, spec_of
from attnlab.shapes import Bool, Float, Int

__all__ = ["GroupCaches", "KeysOfGroups", "PerGroup", "Run", "call_of_run", "per_group"]


Result = TypeVar("Result")

# A buffer of keys that is full gets room for one more in so many.
AHEAD = 32


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
        return GroupCaches(caches, capacity) if any(cache is not None for cache in caches) else None

    def cache_bytes(self, *, length: int, d: int, e: int, dtype: torch.dtype) -> int:
        """The mean over key/value heads."""
        own = [part.cache_bytes(length=length, d=d, e=e, dtype=dtype) for part in self.parts]
        return round(sum(own) / len(own))

    def _side_by_side(self, call: AttentionCall, attend: Callable[[Mechanism, AttentionCall], Tensor]) -> Tensor:
        runs = self.runs(call.k.shape[1])
        return torch.cat([attend(run.part, call_of_run(call, run)) for run in runs], dim=1)


class GroupCaches:
    """The ``LayerCache`` of ``PerGroup``: that of each part; heads whose part has none keep all keys and values."""

    def __init__(self, caches: Sequence[LayerCache | None], capacity: int = 0) -> None:
        self.caches: list[Any] = [KeysOfGroups(capacity) if cache is None else cache for cache in caches]

    def attend(
        self, mechanism: Mechanism, call: AttentionCall, *, key_visible: Bool[Tensor, "b k"] | None
    ) -> tuple[AttentionCall, Tensor]:
        """Each part attends over its own past and takes in the keys and values of its heads."""
        assert isinstance(mechanism, PerGroup), "these caches are those of mechanisms side by side"
        mechanism.refuse(call)
        parts = [
            partial(cache.attend, run.part, call_of_run(call, run), key_visible=key_visible)
            for run, cache in zip(mechanism.runs(call.k.shape[1]), self.caches, strict=True)
        ]
        answers = beside_each_other(parts) if _is_captured(call.q) else [part() for part in parts]
        return call, torch.cat([output for _, output in answers], dim=1)

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Copy rows."""
        for cache in self.caches:
            cache.select(rows)

    def nbytes(self) -> int:
        """The bytes that are kept."""
        return sum(cache.nbytes() for cache in self.caches)


class KeysOfGroups:
    """The ``LayerCache`` of some heads that keep every key and value, in buffers with room for some more.

    How many there are is counted on the device, where the next ones are written: a step of one token that is captured
    in a CUDA graph goes on at every replay, as long as there is room.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        # None while every key may be seen.
        self.visible: Tensor | None = None
        # The keys of each head, (b g); the same for all.
        self.counts: Int[Tensor, " n"] | None = None
        # Where the keys of each head begin in the buffer, for a kernel; None until it is asked for.
        self.starts: Int[Tensor, " n"] | None = None
        self.length, self.was_captured = 0, False

    def attend(
        self, mechanism: Mechanism, call: AttentionCall, *, key_visible: Bool[Tensor, "b k"] | None
    ) -> tuple[AttentionCall, Tensor]:
        """Attend over all keys so far; which of them may be seen is known from the calls that brought them."""
        past = self._past(call.k)
        self.length = past + call.k.shape[2]
        if self.counts is None:
            self.counts = torch.zeros(call.k.shape[0] * call.k.shape[1], dtype=torch.int32, device=call.k.device)
        if torch.is_grad_enabled():
            self._append(call, past)
            self.counts += call.k.shape[2]
        else:
            self._make_room(call, past)
            self._write(call, self.counts)
        assert self.k is not None
        assert self.v is not None
        k, v = self.k[:, :, : self.length], self.v[:, :, : self.length]
        seen = None if self.visible is None else self.visible[:, : self.length]
        full = replace(call, k=k, v=v, key_visible=seen, offset=past if call.causal else 0)
        out = self._step_by_kernel(mechanism, full)
        return full, mechanism(full) if out is None else out

    def _past(self, t: Tensor) -> int:
        """The keys so far; replays of a captured step have counted on the device alone."""
        if _is_captured(t):
            self.was_captured = True
        elif self.was_captured and self.counts is not None:
            self.length = int(self.counts[0])
        return self.length

    def _append(self, call: AttentionCall, past: int) -> None:
        """New tensors: what was read before may be needed for its gradient, so nothing is written over."""
        # A copy also of the first keys, which are a view of those of all heads.
        self.starts = None
        self.k = call.k.clone() if self.k is None else torch.cat([self.k[:, :, :past], call.k], 2)
        self.v = call.v.clone() if self.v is None else torch.cat([self.v[:, :, :past], call.v], 2)
        if self.visible is not None or call.key_visible is not None:
            self.visible = self._flags(call, past, self.length)
            if call.key_visible is not None:
                self.visible[:, past:] = call.key_visible

    def _make_room(self, call: AttentionCall, past: int) -> None:
        """Buffers that hold the call's keys too; after the first time, with some room ahead."""
        flags = call.key_visible is not None and self.visible is None
        if self.k is not None and self.length <= self.k.shape[2] and not flags:
            return
        if _is_captured(call.k):
            raise ValueError(
                "a captured step cannot make room for its keys; take a step with the same inputs before the capture"
            )
        size = max(self.length + (self.length // AHEAD if past else 0), self.capacity)
        if flags or self.visible is not None:
            self.visible = self._flags(call, past, size)
        self.k, self.v = (_in_buffer(old, new, size, past) for old, new in ((self.k, call.k), (self.v, call.v)))
        self.starts = None

    def _flags(self, call: AttentionCall, past: int, size: int) -> Bool[Tensor, "b n"]:
        """Which of ``past`` keys may be seen, and all after them."""
        flags = torch.ones(call.k.shape[0], size, dtype=torch.bool, device=call.k.device)
        if self.visible is not None:
            flags[:, :past] = self.visible[:, :past]
        return flags

    def _write(self, call: AttentionCall, counts: Int[Tensor, " n"]) -> None:
        """Put the call's keys where the device's count says, and count them."""
        assert self.k is not None
        assert self.v is not None
        if call.k.shape[2] == 1 and self.visible is None and kernels_take(call.k):
            from attnlab.kernels.ragged import append, serves

            if serves(call.k, self.k, self.v) and not torch.compiler.is_compiling():
                append(call.k, call.v, self.k, self.v, counts)
                return
        index = counts[:1].long() + torch.arange(call.k.shape[2], device=call.k.device)
        for held, new in ((self.k, call.k), (self.v, call.v)):
            held.index_copy_(2, index, new.to(held.dtype))
        if self.visible is not None and call.key_visible is not None:
            self.visible.index_copy_(1, index, call.key_visible)
        counts += call.k.shape[2]

    def _step_by_kernel(self, mechanism: Mechanism, full: AttentionCall) -> Float[Tensor, "b h 1 e"] | None:
        """One token of softmax over the keys that the device counts; None where no kernel does it."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not kernels_take(full.q):
            return None
        if full.q.shape[2] != 1 or type(mechanism) is not Softmax:
            return None
        assert self.k is not None
        assert self.v is not None
        assert self.counts is not None
        from attnlab.kernels.ragged import ragged_attention, serves

        if full.mask is not None or full.bias is not None or not serves(full.q, self.k, self.v):
            return None
        b, g, room, _ = self.k.shape
        starts = self.starts
        if starts is None:
            starts = torch.arange(0, b * g * room, room, dtype=torch.int32, device=full.q.device)
            # What a capture makes has its numbers only after a replay.
            self.starts = None if _is_captured(full.q) else starts
        return ragged_attention(
            full.q, self.k.flatten(0, 2), self.v.flatten(0, 2), starts, self.counts, scale=full.softmax_scale,
            longest=room, total=b * g * room, visible=None if self.visible is None else self.visible.unsqueeze(1),
        )  # fmt: skip

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Copy rows."""
        if self.k is not None and self.v is not None and self.counts is not None:
            self.k, self.v = self.k[rows], self.v[rows]
            self.counts = self.counts[:1].repeat(self.k.shape[0] * self.k.shape[1])
            self.starts = None
        if self.visible is not None:
            self.visible = self.visible[rows]

    def nbytes(self) -> int:
        """The bytes that are kept."""
        return bytes_of(self.k, self.v, self.visible)


def _in_buffer(old: Tensor | None, new: Tensor, size: int, past: int) -> Float[Tensor, "b g n d"]:
    """A buffer of ``size`` tokens with those that there were."""
    b, g, _, d = new.shape
    # Zeros: a mechanism that multiplies hidden values by zero must not meet NaN.
    buffer = new.new_zeros(b, g, size, d)
    if old is not None:
        buffer[:, :, :past] = old[:, :, :past]
    return buffer


def _is_captured(t: Tensor) -> bool:
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def beside_each_other(jobs: Sequence[Callable[[], Result]]) -> list[Result]:
    """What jobs on a GPU return, each on a stream of its own: small kernels that a graph then runs at the same time."""
    main = torch.cuda.current_stream()
    streams = [main, *(_side_stream(main.device, number) for number in range(len(jobs) - 1))]
    for side in streams[1:]:
        side.wait_stream(main)
    results = []
    for job, stream in zip(jobs, streams, strict=True):
        with torch.cuda.stream(stream):
            results.append(job())
    for side in streams[1:]:
        main.wait_stream(side)
    return results


@functools.cache
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


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
