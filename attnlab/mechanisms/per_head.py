"""Several mechanisms side by side in one layer, each with heads of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall, Mechanism
from attnlab.registry import mechanism, register
from attnlab.shapes import Float

__all__ = ["MixedHeads", "PerHead", "per_head", "split_specs"]


class MixedHeads(Mechanism):
    """What mechanisms side by side have in common: what one of them refuses or is exempt from, all are."""

    @property
    def parts(self) -> tuple[Mechanism, ...]:
        """The mechanisms, one per spec."""
        raise NotImplementedError

    def _declare(self) -> None:
        """Declare about the whole what its parts declare."""
        merged = {law: reason for part in reversed(self.parts) for law, reason in part.exempt.items()}
        object.__setattr__(self, "exempt", merged)
        object.__setattr__(self, "whole_queries", any(part.whole_queries for part in self.parts))
        object.__setattr__(self, "traces", all(part.traces for part in self.parts))

    def cannot(self) -> dict[str, str]:
        return {what: why for part in reversed(self.parts) for what, why in part.cannot().items()}

    def is_exact(self, call: AttentionCall) -> bool:
        return all(part.is_exact(call) for part in self.parts)

    def bytes_read(self, call: AttentionCall) -> float:
        """The mean over heads, as if each read keys and values of its own."""
        return sum(part.bytes_read(call) for part in self.parts) / len(self.parts)

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        return self._side_by_side(call, lambda part, own: part.weights(own))

    def row_weights(self, call: AttentionCall, lo: int, hi: int) -> Float[Tensor, "b h c k"]:
        return self._side_by_side(call, lambda part, own: part.row_weights(own, lo, hi))

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        return self._side_by_side(call, lambda part, own: part(own))

    def _side_by_side(self, call: AttentionCall, attend: Callable[[Mechanism, AttentionCall], Tensor]) -> Tensor:
        """What ``attend`` makes of each part and the call of its heads, the heads put back in order."""
        raise NotImplementedError


@register("per-head", examples=("per-head:heads=softmax/top-r:r=2/softmax", "per-head:heads=kernel:poly;degree=2"))
@dataclass(frozen=True)
class PerHead(MixedHeads):
    """Head i attends by the i-th of ``heads``, specs between slashes; n specs for h = 2n heads are used twice over.

    Inside a spec, ``;`` stands for the comma between settings. Learned mechanisms are refused: a spec has no weights.

    >>> [type(each).__name__ for each in PerHead("window:r=8/lsh:r=16;rounds=2").parts]
    ['Window', 'Lsh']
    """

    heads: str = "softmax"

    def __post_init__(self) -> None:
        split_specs("heads", self.heads)
        for part in self.parts:
            if isinstance(part, (PerHead, nn.Module)):
                raise ValueError(f"a head attends by a mechanism without parameters or heads of its own, got {part!r}")
        self._declare()

    @cached_property
    def parts(self) -> tuple[Mechanism, ...]:
        """The mechanisms, one per spec."""
        return tuple(map(mechanism, split_specs("heads", self.heads)))

    def refuse(self, call: AttentionCall) -> None:
        heads = call.q.shape[1]
        if heads % len(self.parts):
            raise ValueError(f"{len(self.parts)} specs cannot be shared out among {heads} heads: give one per head")
        super().refuse(call)

    def _side_by_side(self, call: AttentionCall, attend: Callable[[Mechanism, AttentionCall], Tensor]) -> Tensor:
        """Heads that share a mechanism go through it together; then all are put back in order."""
        heads = call.q.shape[1]
        by_mechanism: dict[Mechanism, list[int]] = {}
        for head in range(heads):
            by_mechanism.setdefault(self.parts[head % len(self.parts)], []).append(head)
        if len(by_mechanism) == 1:
            return attend(self.parts[0], call)
        by_mechanism_order = torch.cat(
            [attend(part, _of_heads(call, own)) for part, own in by_mechanism.items()], dim=1
        )
        order = torch.tensor([head for own in by_mechanism.values() for head in own], device=by_mechanism_order.device)
        return by_mechanism_order.index_select(1, order.argsort())


def split_specs(field: str, text: Any) -> list[str]:
    """The spec strings between slashes, with commas between their settings.

    >>> split_specs("heads", "softmax/lsh:r=4;rounds=2")
    ['softmax', 'lsh:r=4,rounds=2']
    """
    if not isinstance(text, str):
        raise ValueError(f"{field} must be spec strings between slashes, got {type(text).__name__}")
    return [spec.replace(";", ",") for spec in text.split("/")]


def per_head(specs: list[str], kind: str = "per-head:heads") -> str:
    """The spec of a layer whose head i attends by ``specs[i]``; that of the one mechanism where all are the same.

    >>> per_head(["softmax", "lsh:r=4,rounds=2"])
    'per-head:heads=softmax/lsh:r=4;rounds=2'
    """
    if not specs:
        raise ValueError("a layer has at least one head; give one spec per head")
    if len(set(specs)) == 1:
        return specs[0]
    return f"{kind}=" + "/".join(spec.replace(",", ";") for spec in specs)


def _of_heads(call: AttentionCall, heads: list[int]) -> AttentionCall:
    """The call of some query heads, each with its own copy of the key/value head it reads."""
    own = torch.tensor(heads, device=call.q.device)
    read = own // call.groups

    def rows(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.shape[1] == 1 else t.index_select(1, own)

    return replace(
        call,
        q=call.q.index_select(1, own),
        k=call.k.index_select(1, read),
        v=call.v.index_select(1, read),
        mask=rows(call.mask),
        bias=rows(call.bias),
    )
