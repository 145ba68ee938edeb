"""Layers of one shape side by side in memory, so that kernels project their weights at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.calls import UNSUPPORTED
from attnlab.adapters.masks import carried_by
from attnlab.linalg._projection_gpu import (
    Projected,
    Visible,
    attend_heads,
    project_heads,
    rank_of_independent_values,
    supports_gpu_projection,
    visible_keys,
)
from attnlab.reading._input import ReadingInput
from attnlab.reading.effective import EffectiveAttention, effective_of_input
from attnlab.shapes import Bool, Float
from attnlab.summaries import short_repr

__all__ = ["Padding", "Stack", "padding_of", "serves"]

# Arguments with which scores are more than scale <q, k> plus the mask.
CHANGES_SCORES = frozenset((*UNSUPPORTED, "position_bias"))


@dataclass(frozen=True, eq=False)
class Padding:
    """A mask that hides the same keys from all queries of an input."""

    key_visible: Bool[Tensor, "b k"] | None = None
    visible: Visible | None = None
    # (rank, trivial) by the shape of a layer.
    facts: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    __repr__ = short_repr

    def ranks(self, b: int, h: int, n_q: int, n_k: int, e: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rank of what each query sees, and whether that makes W_perp = W, for layers of one shape."""
        key = (b, h, n_q, n_k, e, device)
        if key not in self.facts:
            per_item = rank_of_independent_values(self.visible, b=b, n_k=n_k, e=e, device=device)
            rank, trivial = (t[:, None, None].expand(b, h, n_q) for t in per_item)
            self.facts[key] = rank, trivial
        return self.facts[key]


def serves(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]) -> bool:
    """Whether this is plain softmax attention that hides only padding and that the kernels can project."""
    if torch.is_grad_enabled() or not supports_gpu_projection(query, value) or query.dtype != value.dtype:
        return False
    if key.shape != value.shape or key.shape[1] != query.shape[1]:
        return False
    if options.get("dropout") or not CHANGES_SCORES.isdisjoint(
        name for name, value in options.items() if value is not None
    ):
        return False
    causal = options.get("is_causal")
    # SDPA treats a causal module without a mask as causal.
    hides = mask is not None or not (getattr(module, "is_causal", True) if causal is None else causal)
    return hides and not torch.is_autocast_enabled(query.device.type)


def _kind(query: Tensor, value: Tensor) -> tuple[Any, ...]:
    """What layers of one stack have in common: tensors made in inference mode can only be written to in that mode."""
    return query.shape, value.shape, value.dtype, value.device, torch.is_inference_mode_enabled()


def padding_of(mask: Tensor | None) -> Padding | None:
    """The padding that a mask describes; None where it hides different keys from different queries, or adds a bias."""
    if mask is None:
        return Padding()
    carried = carried_by(mask)
    if carried is None or carried.causal or carried.mask is not None or carried.bias is not None:
        return None
    if carried.key_visible is None:
        return Padding()
    return Padding(carried.key_visible, visible_keys(carried.key_visible))


class Stack:
    """Weights, values and outputs of up to ``size`` layers."""

    def __init__(self, size: int, query: Tensor, value: Tensor, padding: Padding) -> None:
        b, h, n_q, _ = query.shape
        n_k, e = value.shape[2:]
        self.shape, self.padding, self.size, self.filled = (b, h, n_q, n_k, e), padding, size, 0
        self.like = _kind(query, value)
        self.w = value.new_empty(size, b * h, n_q, n_k)
        self.v = value.new_empty(size, b * h, n_k, e)
        # In the order that transformers reads: the heads of a query side by side.
        self.o = value.new_empty(size, b, n_q, h, e)
        self.places = list(zip(self.w.unbind(), self.v.unbind(), self.o.unbind(), strict=True))
        self.projected: Projected | None = None

    def takes(self, query: Tensor, value: Tensor, padding: Padding) -> bool:
        """Whether there is room for another layer, and it is of this stack's kind."""
        room = self.projected is None and self.filled < self.size
        return room and self.padding is padding and self.like == _kind(query, value)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        """Softmax attention, with W, V and W V left in the next place."""
        seen = None if self.padding.visible is None else self.padding.visible.seen
        attend_heads(query, key, value, seen, scale, *self.places[self.filled])
        self.filled += 1

    def last(self) -> tuple[Float[Tensor, "b q h e"], Float[Tensor, "b h q k"]]:
        """The last layer's output, in the order that transformers reads, and its weights."""
        b, h, n_q, n_k, _ = self.shape
        w, _, o = self.places[self.filled - 1]
        return o, w.view(b, h, n_q, n_k)

    def project(self) -> None:
        """Start the kernels."""
        (b, h, *_), n = self.shape, self.filled
        w, v = (t[:n].view(n * b, h, *t.shape[2:]) for t in (self.w, self.v))
        o = self.o[:n].flatten(0, 1).transpose(1, 2)
        self.projected = project_heads(w, v, o, self.padding.visible)

    def doubtful(self) -> Float[Tensor, ""]:
        """More than zero where some head's values are not provably well-conditioned."""
        assert self.projected is not None
        return self.projected.stats[2].max()

    def results(self) -> list[EffectiveAttention]:
        """Each layer's effective attention."""
        assert self.projected is not None
        b, h, n_q, n_k, _ = self.shape
        maps = self.projected.weights.view(self.filled, b, h, n_q, n_k).unbind()
        residual, removed, _ = (t.unbind() for t in self.projected.stats.view(3, self.filled, b, h).unbind())
        rank, trivial = self.padding.ranks(*self.shape, self.w.device)
        parts = zip(maps, residual, removed, strict=True)
        return [EffectiveAttention(w, lost, rank, gone, trivial) for w, lost, gone in parts]

    def with_care(self) -> list[EffectiveAttention]:
        """``results``, with a layer that has a doubtful head computed by the slower method that handles every rank."""
        assert self.projected is not None
        b, h, n_q, n_k, e = self.shape
        unsure = (self.projected.stats[2].view(self.filled, -1).amax(1) > 0).tolist()
        done = self.results()
        for i, (w, v, _) in enumerate(self.places[: self.filled]):
            if unsure[i]:
                views = w.view(b, h, n_q, n_k), v.view(b, h, n_k, e)
                done[i] = effective_of_input(ReadingInput(*views, self.padding.key_visible))
        return done
