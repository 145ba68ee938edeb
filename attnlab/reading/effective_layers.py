"""Effective attention during an evaluation: every layer's map and residual for little more than the evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall, Mechanism, grouped, repeat_groups, ungrouped
from attnlab.hf import swap
from attnlab.hf.sites import Layers
from attnlab.mechanisms._at_once import project_at_once
from attnlab.mechanisms._projection import at_once_serves
from attnlab.mechanisms.softmax import Softmax
from attnlab.reading._given import Given
from attnlab.reading.effective import EffectiveAttention, effective_given, head_norms, ratio, weighed
from attnlab.shapes import Bool

__all__ = ["EffectiveLayers", "read_effective"]

# Weights that a GPU projects as one batch: many small factorisations keep it busy, one layer's do not.
AT_ONCE = 1 << 26


@contextmanager
def read_effective(model: nn.Module, *, layers: Layers = None) -> Iterator[EffectiveLayers]:
    """Inside the context every softmax layer of ``model`` makes its W once, attends by it, and adds its effective map.

    An evaluation with every map and residual costs little more than an eager one; the sequence grows by one item per
    layer and forward pass. With ``record`` and ``effective_attention(trace[3])`` W would be made a second time.
    """
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model is on the meta device and holds no numbers; load its weights first")
    found = EffectiveLayers()
    with swap(model, _Reader(found), layers=layers):
        yield found


class EffectiveLayers(Sequence[EffectiveAttention]):
    """The effective attention of each layer in the order of their calls.

    On a GPU, layers whose queries all see the same keys are projected together, when there are enough of them or when
    an item is asked for; until then nothing waits for the device. What that leaves in doubt is then done with care.
    """

    def __init__(self) -> None:
        self._settled: list[EffectiveAttention] = []
        self._launched: list[_Launched] = []
        self._waiting: list[tuple[Given, Tensor]] = []

    def __len__(self) -> int:
        return len(self._settled) + sum(len(group.layers) for group in self._launched) + len(self._waiting)

    @overload
    def __getitem__(self, index: int) -> EffectiveAttention: ...
    @overload
    def __getitem__(self, index: slice) -> list[EffectiveAttention]: ...
    def __getitem__(self, index: int | slice) -> EffectiveAttention | list[EffectiveAttention]:
        self._settle()
        return self._settled[index]

    def clear(self) -> None:
        """Forget everything, before the next batch."""
        for held in (self._settled, self._launched, self._waiting):
            held.clear()

    def add(self, g: Given, output: Tensor) -> None:
        """Take one layer's weights, values and output."""
        if not _can_wait(g):
            self._settle()
            self._settled.append(effective_given(g, None, output))
            return
        if self._waiting and not _alike(self._waiting[0][0], g):
            self._launch()
        self._waiting.append((g, output))
        if len(self._waiting) * g.rows.numel() >= AT_ONCE:
            self._launch()

    def _launch(self) -> None:
        if self._waiting:
            self._launched.append(_launch(self._waiting))
            self._waiting = []

    def _settle(self) -> None:
        self._launch()
        if not self._launched:
            return
        # The one place that waits for the device.
        doubtful = torch.stack([group.doubtful.any() for group in self._launched]).tolist()
        for group, some in zip(self._launched, doubtful, strict=True):
            for (g, output), found, unsure in zip(group.layers, group.found, group.parts(), strict=True):
                again = some and bool(unsure.any())
                self._settled.append(effective_given(g, None, output) if again else found)
        self._launched = []


@dataclass(frozen=True, eq=False)
class _Launched:
    layers: list[tuple[Given, Tensor]]
    found: list[EffectiveAttention]
    # The heads of all layers whose values are not provably well-conditioned.
    doubtful: Bool[Tensor, "b h"]

    def parts(self) -> tuple[Tensor, ...]:
        return self.doubtful.chunk(len(self.layers))


def _can_wait(g: Given) -> bool:
    return g.rows.is_cuda and not g.causal and g.mask is None and at_once_serves(g.values)


def _alike(a: Given, b: Given) -> bool:
    same = a.rows.shape == b.rows.shape and a.values.shape == b.values.shape and a.rows.dtype == b.rows.dtype
    return same and a.key_visible is b.key_visible and a.rows.device == b.rows.device


@torch.no_grad()
def _launch(layers: list[tuple[Given, Tensor]]) -> _Launched:
    """The projection and its residual, for several layers as one batch."""
    first, n = layers[0][0], len(layers)
    wide = torch.promote_types(first.rows.dtype, torch.float32)
    w, v = (torch.cat([getattr(g, name) for g, _ in layers]).to(wide) for name in ("rows", "values"))
    output = torch.cat([o for _, o in layers]).to(wide)
    seen = None if first.key_visible is None else first.key_visible.repeat(n, 1)[:, None]
    groups = w.shape[1] // v.shape[1]
    found, *facts = project_at_once(grouped(w, groups).flatten(2, 3), v, seen)
    found = ungrouped(found.unflatten(2, (groups, w.shape[2])))
    rank, trivial, doubtful = (repeat_groups(t, groups) for t in facts)
    flat = (t.flatten(0, 1) for t in (output, found, repeat_groups(v, groups)))
    lost = head_norms(torch.baddbmm(*flat, beta=-1).view_as(output))
    # A projection is orthogonal: what it takes away is what the squares lack.
    whole = head_norms(w).square()
    removed = ratio((whole - head_norms(found).square()).clamp(min=0), whole)
    rank, trivial = (t[..., None].expand(*t.shape, w.shape[2]) for t in (rank, trivial))
    fields = (found.to(first.rows.dtype), ratio(lost, head_norms(output)), rank, removed, trivial)
    parts = zip(*(t.chunk(n) for t in fields), strict=True)
    return _Launched(layers, [EffectiveAttention(*part) for part in parts], doubtful)


class _Reader(Mechanism):
    def __init__(self, found: EffectiveLayers) -> None:
        self.found = found

    def reference(self, call: AttentionCall) -> Tensor:
        if call.causal or call.mask is not None or call.bias is not None:
            return Softmax().reference(call)
        # All queries see the same keys, so a row is empty only where the whole input is: few steps, and none waits.
        s = ungrouped(grouped(call.q * call.softmax_scale, call.groups) @ call.k.unsqueeze(2).mT)
        seen = call.key_visible
        if seen is None:
            return torch.softmax(s, -1)
        w = torch.softmax(s.masked_fill(~seen[:, None, None], torch.finfo(s.dtype).min), -1)
        return w * seen.any(-1)[:, None, None, None]

    def forward(self, call: AttentionCall) -> Tensor:
        w = self.reference(call)
        g = Given(w, call.v, call.key_visible, call.causal, call.offset, call.mask, recorded=True)
        v = g.clean_values()
        output = weighed(w, v)
        self.found.add(Given(w, v, call.key_visible, call.causal, call.offset, call.mask, recorded=True), output)
        return output
