"""Attention that also returns the guided heads' errors, in one pass; the other heads take the fast path.

On a GPU the guided heads run in a kernel of their own and no map is stored. Elsewhere, and for calls that the kernel
does not take (a mask or a bias, a pattern given as a matrix), the maps of the guided heads are made.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, hide_unseen, repeat_groups
from attnlab.guidance.loss import squared_error
from attnlab.guidance.split_heads import join_heads, split_heads
from attnlab.mechanisms.softmax import Softmax
from attnlab.patterns import Targets
from attnlab.shapes import Float
from attnlab.summaries import short_repr

__all__ = ["Groups", "attend_guided", "errors_only", "guided_errors"]


@dataclass(eq=False)
class Groups:
    """Each pattern's heads and targets, in the order of the heads, which begin with head 0."""

    heads: dict[str, range]
    targets: dict[str, Targets]
    # The same in the kernel's layout, made for the first layer that needs it.
    packed: Any = None
    # Groups are found again by the ids of mask and bias, which must live as long as they do.
    masks: tuple[Tensor | None, Tensor | None] = (None, None)

    __repr__ = short_repr

    @property
    def guided(self) -> int:
        """How many heads are guided."""
        return sum(map(len, self.heads.values()))

    def __iter__(self) -> Iterator[tuple[range, Targets]]:
        return ((heads, self.targets[name]) for name, heads in self.heads.items())


def attend_guided(call: AttentionCall, groups: Groups) -> tuple[Float[Tensor, "b h q e"], Float[Tensor, "b s q"]]:
    """(the output of every head, each guided head's error in each row divided by the heads of its group)."""
    guided, rest = _split(call, groups.guided)
    out, errors = _attend(guided, groups, call.q.shape[1])
    return out if rest is None else join_heads(out, Softmax()(rest)), errors


def errors_only(call: AttentionCall, groups: Groups) -> Float[Tensor, "b s q"]:
    """The errors of ``attend_guided``, for a layer whose output is computed elsewhere."""
    guided, _ = _split(call, groups.guided)
    return _attend(guided, groups, call.q.shape[1])[1]


def _attend(call: AttentionCall, groups: Groups, heads: int) -> tuple[Tensor, Tensor]:
    return _by_kernel(call, groups, heads) if _kernel_serves(call, groups) else _by_maps(call, groups)


def guided_errors(W: Float[Tensor, "b s q k"], groups: Groups) -> Float[Tensor, "b s q"]:
    """Each guided head's error in each row divided by the heads of its group; ``W`` holds the guided heads."""
    parts = [squared_error(W[:, heads.start : heads.stop], t) / len(heads) for heads, t in groups]
    return torch.cat(parts, dim=1)


def _by_maps(call: AttentionCall, groups: Groups) -> tuple[Tensor, Tensor]:
    W = Softmax().weights(call)
    return W @ hide_unseen(call).v, guided_errors(W, groups)


def _by_kernel(call: AttentionCall, groups: Groups, heads: int) -> tuple[Tensor, Tensor]:
    from attnlab.kernels.guided import guided_attention

    if groups.packed is None:
        groups.packed = pack(groups)
    return guided_attention(
        call.q,
        call.k,
        call.v,
        groups.packed,
        key_visible=call.key_visible,
        causal=call.causal,
        offset=call.offset,
        scale=call.softmax_scale,
        heads=heads,
    )


def pack(groups: Groups) -> Any:
    """The groups' targets as the kernel reads them."""
    from attnlab.kernels.guided import pack_labels

    rows, keys, value, constant, weight, numbers = [], [], [], [], [], []
    for number, (own, t) in enumerate(groups):
        assert t.labels is not None
        pointing, share = t.values.shape[-1] > 0, t.share[:, 0]
        value.append(t.values[:, 0].amax(-1) if pointing else share)
        # In a row that spreads evenly over all visible keys, sum_j t_ij w_ij is the share for every w.
        constant.append(t.squares[:, 0] - 2 * share if pointing else t.squares[:, 0])
        weight.append(t.rows[:, 0].float() / len(own))
        rows.append(t.labels.rows)
        keys.append(t.labels.keys)
        # Filled on the device: copying a list to it would wait, and cannot be part of a captured graph.
        numbers.append(rows[-1].new_full((len(own),), number))
    return pack_labels(
        torch.stack(rows, 1),
        torch.stack(keys, 1),
        value=torch.stack(value, 1),
        constant=torch.stack(constant, 1),
        weight=torch.stack(weight, 1),
        group=torch.cat(numbers),
    )


def _kernel_serves(call: AttentionCall, groups: Groups) -> bool:
    return (
        call.q.is_cuda
        and call.q.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and call.mask is None
        and call.bias is None
        and call.v.shape[-1] == call.q.shape[-1] <= 256
        and call.k.shape[2] > 0
        and all(t.labels is not None for _, t in groups)
        and _triton_is_installed()
    )


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _split(call: AttentionCall, guided: int) -> tuple[AttentionCall, AttentionCall | None]:
    """The calls of the first heads and of the others."""
    h, k, v = call.q.shape[1], repeat_groups(call.k, call.groups), repeat_groups(call.v, call.groups)
    if guided == h:
        return replace(call, k=k, v=v), None

    def parts(t: Tensor | None) -> tuple[Any, Any]:
        return (t, t) if t is None or t.shape[1] == 1 < h else (t[:, :guided], t[:, guided:])

    masks, biases = parts(call.mask), parts(call.bias)
    first, others = (
        replace(call, q=q, k=k, v=v, mask=mask, bias=bias)
        for (q, k, v), mask, bias in zip(split_heads(guided, call.q, k, v), masks, biases, strict=True)
    )
    return first, others
