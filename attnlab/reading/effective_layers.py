"""Effective attention during an evaluation: every layer's map and residual for little more than the evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall, Mechanism, grouped, ungrouped
from attnlab.hf.interface import Frame, attached
from attnlab.hf.sites import Layers, find_sites, refuse_partial, select
from attnlab.mechanisms.softmax import Softmax
from attnlab.reading._given import Given
from attnlab.reading._stacked import Padding, Stack, padding_of, serves
from attnlab.reading.effective import EffectiveAttention, effective_given, weighed

__all__ = ["EffectiveLayers", "read_effective"]


@contextmanager
def read_effective(model: nn.Module, *, layers: Layers = None) -> Iterator[EffectiveLayers]:
    """Inside the context every softmax layer of ``model`` makes its W once, attends by it, and adds its effective map.

    An evaluation with every map and residual costs little more than an eager one; the sequence grows by one item per
    layer and forward pass. With ``record`` and ``effective_attention(trace[3])`` W would be made a second time.
    """
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model is on the meta device and holds no numbers; load its weights first")
    sites = find_sites(model)
    if layers is None:
        refuse_partial(model, sites)
    chosen = select(sites, layers)
    found = EffectiveLayers(layers=len(chosen))
    reader = _Reader(found)
    with attached(model, dict.fromkeys(chosen, Frame(mechanism=reader, direct=reader.attend))):
        yield found


class EffectiveLayers(Sequence[EffectiveAttention]):
    """The effective attention of each layer in the order of their calls.

    On a GPU, layers whose queries all see the same keys are projected at once when there are ``layers`` of them;
    nothing waits for the device until an item is asked for. What that leaves in doubt is then done with care.
    """

    def __init__(self, *, layers: int = 1) -> None:
        self._settled: list[EffectiveAttention] = []
        self._stacks: list[Stack] = []
        self._layers = layers
        self._padding: Padding | None = None

    def __len__(self) -> int:
        return len(self._settled) + sum(stack.filled for stack in self._stacks)

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
        self._stacks.clear()
        self._padding = None

    def add(self, g: Given, output: Tensor) -> None:
        """Take one layer's weights, values and output."""
        self._settle()
        self._settled.append(effective_given(g, None, output))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, padding: Padding, scale: float) -> Stack:
        """Attend, W and all that it takes to project it kept in a stack."""
        stack = self._stacks[-1] if self._stacks else None
        if stack is None or not stack.takes(query, value, padding):
            self._launch()
            stack = Stack(self._layers, query, value, padding)
            self._stacks.append(stack)
        stack.attend(query, key, value, scale)
        return stack

    def padding(self, mask: Tensor | None) -> Padding | None:
        """What a mask hides, if that is the same keys from all queries; all layers are given the same mask."""
        if self._padding is None or self._padding.mask is not mask:
            self._padding = padding_of(mask)
        return self._padding

    def launch_full(self) -> None:
        """Project the last stack if no layer more goes into it."""
        stack = self._stacks[-1]
        if stack.filled == stack.size:
            stack.project()

    def _launch(self) -> None:
        if self._stacks and self._stacks[-1].projected is None:
            self._stacks[-1].project()

    def _settle(self) -> None:
        if not self._stacks:
            return
        self._launch()
        # All that can be made is made before the one place that waits for the device.
        unsure = torch.stack([stack.doubtful() for stack in self._stacks])
        done = [stack.results() for stack in self._stacks]
        for stack, found, again in zip(self._stacks, done, unsure.tolist(), strict=True):
            self._settled += stack.with_care() if again else found
        self._stacks.clear()


class _Reader(Mechanism):
    def __init__(self, found: EffectiveLayers) -> None:
        self.found = found

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, given: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor] | None:
        """As eager attention does, in fewer steps, where the kernels then serve."""
        if not serves(module, query, key, value, mask, given):
            return None
        padding = self.found.padding(mask)
        if padding is None:
            return None
        scale = given.get("scaling")
        stack = self.found.attend(query, key, value, padding, query.shape[-1] ** -0.5 if scale is None else scale)
        self.found.launch_full()
        return stack.last()

    def reference(self, call: AttentionCall) -> Tensor:
        if call.causal or call.mask is not None or call.bias is not None:
            return Softmax().reference(call)
        # All queries see the same keys, so a row is empty only where the whole input is: few steps, and none waits.
        s = ungrouped(grouped(call.q * call.softmax_scale, call.groups) @ call.k.unsqueeze(2).mT)
        seen = call.key_visible
        if seen is None:
            return torch.softmax(s, -1)
        w = torch.softmax(s.masked_fill_(~seen[:, None, None], torch.finfo(s.dtype).min), -1)
        some = seen.any(-1)
        return w if w.device.type == "cpu" and bool(some.all()) else w * some[:, None, None, None]

    def forward(self, call: AttentionCall) -> Tensor:
        w = self.reference(call)
        g = Given(w, call.v, call.key_visible, call.causal, call.offset, call.mask, recorded=True)
        v = g.clean_values()
        output = weighed(w, v)
        self.found.add(Given(w, v, call.key_visible, call.causal, call.offset, call.mask, recorded=True), output)
        return output
