"""Effective attention during an evaluation: every layer's map and residual for little more than the evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import overload

import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall, Mechanism, grouped, ungrouped
from attnlab.hf import swap
from attnlab.hf.sites import Layers
from attnlab.mechanisms._at_once import Projected, Visible, project_heads, serves_at_once, verdict, visible_keys
from attnlab.mechanisms.softmax import Softmax
from attnlab.reading._given import Given
from attnlab.reading.effective import EffectiveAttention, effective_given, ratio, weighed
from attnlab.shapes import Bool

__all__ = ["EffectiveLayers", "read_effective"]


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

    On a GPU, layers whose queries all see the same keys are projected beside the model, on a stream of their own;
    nothing waits for the device until an item is asked for. What that leaves in doubt is then done with care.
    """

    def __init__(self) -> None:
        self._settled: list[EffectiveAttention] = []
        self._running: list[_Running] = []
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        return len(self._settled) + len(self._running)

    @overload
    def __getitem__(self, index: int) -> EffectiveAttention: ...
    @overload
    def __getitem__(self, index: slice) -> list[EffectiveAttention]: ...
    def __getitem__(self, index: int | slice) -> EffectiveAttention | list[EffectiveAttention]:
        self._settle()
        return self._settled[index]

    def clear(self) -> None:
        """Forget everything, before the next batch."""
        self._settled.clear()
        self._running.clear()

    def add(self, g: Given, output: Tensor) -> None:
        """Take one layer's weights, values and output."""
        if not _beside(g):
            self._settle()
            self._settled.append(effective_given(g, None, output))
            return
        if self._stream is None and g.rows.is_cuda:
            self._stream = torch.cuda.Stream(g.rows.device)
        last = self._running[-1] if self._running else None
        same = last is not None and last.given.key_visible is g.key_visible
        self._running.append(_start(g, output, last.visible if last is not None and same else None, self._stream))

    def _settle(self) -> None:
        if not self._running:
            return
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        alike = [list(group) for _, group in groupby(self._running, key=_shape)]
        found = [_finished(layers) for layers in alike]
        # The one place that waits for the device.
        unsure = torch.cat([doubtful.flatten(1).any(1) for _, doubtful in found]).tolist()
        done = [one for layers, _ in found for one in layers]
        for layer, effective, again in zip(self._running, done, unsure, strict=True):
            self._settled.append(effective_given(layer.given, None, layer.output) if again else effective)
        self._running = []


@dataclass(frozen=True, eq=False)
class _Running:
    given: Given
    output: Tensor
    visible: Visible | None
    projected: Projected


def _beside(g: Given) -> bool:
    return not g.causal and g.mask is None and serves_at_once(g.rows, g.values)


@torch.no_grad()
def _start(g: Given, output: Tensor, visible: Visible | None, stream: torch.cuda.Stream | None) -> _Running:
    with ExitStack() as beside:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            beside.enter_context(torch.cuda.stream(stream))
            for t in (g.rows, g.values, output):
                # Whoever forgets them must not have their memory used again before the kernels are through.
                t.record_stream(stream)
        if visible is None and g.key_visible is not None:
            visible = visible_keys(g.key_visible)
        return _Running(g, output, visible, project_heads(g.rows, g.values, output, visible))


def _shape(layer: _Running) -> tuple[object, ...]:
    return layer.given.rows.shape, layer.given.values.shape, layer.given.rows.dtype, id(layer.visible)


@torch.no_grad()
def _finished(layers: list[_Running]) -> tuple[list[EffectiveAttention], Bool[Tensor, "n b h"]]:
    """Layers of one shape, and which of their heads are in doubt."""
    first = layers[0].given
    (_, h, n_q, n_k), (_, g, _, e) = first.rows.shape, first.values.shape
    sums = torch.stack([layer.projected.sums for layer in layers]).sum(-2)
    lost, output, whole, kept = sums.unbind(-1)
    # A projection is orthogonal: what it takes away is what the squares lack.
    removed = ratio((whole - kept).clamp(min=0), whole)
    residual = ratio(lost.sqrt(), output.sqrt())
    facts = torch.stack([layer.projected.facts for layer in layers])
    visible = layers[0].visible
    count = None if visible is None else visible.counts
    judged = verdict(facts, count, n_k=n_k, e=e, dtype=first.values.dtype)
    rank, trivial, doubtful = (t.repeat_interleave(h // g, -1) if h > g else t for t in judged)
    removed = removed.masked_fill(trivial, 0)
    rank, trivial = (t[..., None].expand(*t.shape, n_q) for t in (rank, trivial))
    fields = zip(residual, rank, removed, trivial, strict=True)
    found = [EffectiveAttention(layer.projected.found, *f) for layer, f in zip(layers, fields, strict=True)]
    return found, doubtful


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
