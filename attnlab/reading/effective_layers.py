"""Effective attention during an evaluation: every layer's map and residual for little more than the evaluation."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast, overload

import torch
from torch import Tensor, nn

from attnlab.adapters.protocol import Frame, Layers, adapter_of, refuse_partial, select
from attnlab.attention import AttentionCall, Mechanism, grouped, mask_with_bias, ungrouped
from attnlab.fields import expect
from attnlab.mechanisms.softmax import Softmax
from attnlab.reading._input import ReadingInput
from attnlab.reading._stacked import Padding, Stack, padding_of, serves
from attnlab.reading.effective import EffectiveAttention, effective_of_input, weighed

__all__ = ["EffectiveLayers", "read_effective"]

# How many masks are remembered: an encoder's, a decoder's, that of cross-attention, and one more.
MASKS = 4


@contextmanager
def read_effective(model: nn.Module, *, layers: Layers = None) -> Iterator[EffectiveLayers]:
    """Inside the context every softmax layer of ``model`` makes its W once, attends by it, and adds its effective map.

    An evaluation with every map and residual costs little more than an eager one; the sequence grows by one item per
    layer and forward pass. With ``record`` and ``effective_attention(trace[3])`` W would be made a second time.
    """
    expect("model", model, nn.Module, "a model (torch.nn.Module)")
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model is on the meta device and holds no numbers; load its weights first")
    adapter = adapter_of(model)
    sites = adapter.sites()
    if layers is None:
        refuse_partial(model, sites)
    chosen = select(sites, layers)
    maps = EffectiveLayers()
    counts = Counter(site.kind for site in chosen)
    reader = _Reader(maps, {site.module: counts[site.kind] for site in chosen})
    with adapter.attach(dict.fromkeys(chosen, Frame(mechanism=reader, direct=reader.attend))):
        yield maps


class EffectiveLayers(Sequence[EffectiveAttention]):
    """The effective attention of each layer in the order of their calls.

    On a GPU, layers of a kind whose queries all see the same keys are projected at once, when the last has attended;
    the CPU does not wait for the GPU until an item is asked for. Heads whose values may be ill-conditioned are then
    computed again by the slower method that handles every rank.
    """

    def __init__(self) -> None:
        # An item is a layer's result, or the stack that its result will come from and its place there.
        self._items: list[EffectiveAttention | tuple[Stack, int]] = []
        self._stacks: list[Stack] = []
        # What each of the last masks hides. Layers share masks.
        self._paddings: deque[tuple[Tensor | None, Padding | None]] = deque(maxlen=MASKS)

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> EffectiveAttention: ...
    @overload
    def __getitem__(self, index: slice) -> list[EffectiveAttention]: ...
    def __getitem__(self, index: int | slice) -> EffectiveAttention | list[EffectiveAttention]:
        self._settle()
        return cast("EffectiveAttention | list[EffectiveAttention]", self._items[index])

    def clear(self) -> None:
        """Forget everything, before the next batch."""
        self._items.clear()
        self._stacks.clear()
        self._paddings.clear()

    def add(self, source: ReadingInput, output: Tensor) -> None:
        """Append the effective attention of one layer."""
        self._items.append(effective_of_input(source, output=output))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, padding: Padding, scale: float, size: int) -> Stack:
        """Attend; W, V and W V stay in a stack of up to ``size`` layers, to be projected later."""
        stack = next((stack for stack in reversed(self._stacks) if stack.takes(query, value, padding)), None)
        if stack is None:
            stack = Stack(size, query, value, padding)
            self._stacks.append(stack)
        self._items.append((stack, stack.filled))
        stack.attend(query, key, value, scale)
        if stack.filled == stack.size:
            stack.project()
        return stack

    def padding(self, mask: Tensor | None) -> Padding | None:
        """What a mask hides, if that is the same keys from all queries."""
        for known, padding in self._paddings:
            if known is mask:
                return padding
        self._paddings.appendleft((mask, padding_of(mask)))
        return self._paddings[0][1]

    def _settle(self) -> None:
        if not self._stacks:
            return
        for stack in self._stacks:
            if stack.projected is None:
                stack.project()
        # Every kernel is started before ``tolist`` waits for the device.
        unsure = torch.stack([stack.doubtful() for stack in self._stacks])
        done = {stack: stack.results() for stack in self._stacks}
        for stack, again in zip(self._stacks, unsure.tolist(), strict=True):
            if again:
                done[stack] = stack.with_care()
        self._items = [done[item[0]][item[1]] if isinstance(item, tuple) else item for item in self._items]
        self._stacks.clear()


class _Reader(Mechanism):
    """Softmax attention that also adds its effective attention to ``maps``."""

    def __init__(self, maps: EffectiveLayers, same_kind: Mapping[nn.Module, int]) -> None:
        # ``same_kind``: how many layers of its kind the model has, by module.
        self.maps, self.same_kind = maps, same_kind

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor] | None:
        """(output, weights) as eager attention returns them; None where the kernels cannot project this call."""
        if not serves(module, query, key, value, mask, options):
            return None
        padding = self.maps.padding(mask)
        if padding is None:
            return None
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        stack = self.maps.attend(query, key, value, padding, scale, self.same_kind[module])
        return stack.last()

    def reference(self, call: AttentionCall) -> Tensor:
        if call.causal or call.mask is not None or call.bias is not None:
            return Softmax().reference(call)
        # All queries see the same keys, so a row is empty only where the whole input is. No step waits for the device.
        s = ungrouped(grouped(call.q * call.softmax_scale, call.groups) @ call.k.unsqueeze(2).mT)
        if call.key_visible is None:
            return torch.softmax(s, -1)
        w = torch.softmax(s.masked_fill_(~call.key_visible[:, None, None], torch.finfo(s.dtype).min), -1)
        has_keys = call.key_visible.any(-1)
        return w if w.device.type == "cpu" and bool(has_keys.all()) else w * has_keys[:, None, None, None]

    def forward(self, call: AttentionCall) -> Tensor:
        w = self.reference(call)
        source = ReadingInput(
            w, call.v, call.key_visible, call.causal, call.offset, mask_with_bias(call), recorded=True
        )
        source = replace(source, values=source.clean_values())
        output = weighed(w, source.values)
        self.maps.add(source, output)
        return output
