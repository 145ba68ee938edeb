"""Sliding-window attention: each query sees the keys around it, and the first ones where they are kept as sinks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnlab.attention import (
    AttentionCall,
    Mechanism,
    group_product,
    group_scores,
    grouped,
    hide_unseen,
    pair_mask,
    query_rows,
    scores,
    ungrouped,
)
from attnlab.linalg.places import places
from attnlab.mechanisms._bounded.continued import visible_first
from attnlab.mechanisms.softmax import softmax
from attnlab.registry import register
from attnlab.shapes import Float, Int

__all__ = ["Window"]


@register("window", examples=("window:r=4", "window:r=3", "window:r=2,sinks=2"))
@dataclass(frozen=True)
class Window(Mechanism):
    """Softmax over the keys at most r // 2 places away on either side; causal: over the last r (OVA, section 4).

    The query's own key always counts: an even r means r neighbours and the own key, an odd r means r keys with it, and
    causally the own key is one of the last r. Places count visible keys only, so padding never eats the window. The
    first ``sinks`` keys are seen from everywhere (attention sinks: Xiao et al., 2024).
    """

    r: int = 64
    sinks: int = 0

    # The place of a query is its row; a chunk of rows has lost it.
    whole_queries = True

    def __post_init__(self) -> None:
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 1:
            raise ValueError(f"r must be an int of at least 1 (the width of the window), got {self.r!r}")
        if isinstance(self.sinks, bool) or not isinstance(self.sinks, int) or self.sinks < 0:
            raise ValueError(f"sinks must be an int of at least 0 (first keys that stay), got {self.sinks!r}")

    def cannot(self) -> dict[str, str]:
        return {"cross": "a query has no place among the keys of another sequence, so no window around it"}

    def is_exact(self, call: AttentionCall) -> bool:
        return (self.r if call.causal else self.r // 2 + 1) >= call.k.shape[2]

    def bytes_read(self, call: AttentionCall) -> float:
        return min(1.0, (self.r if call.causal else self.r // 2 * 2 + 1) / max(1, call.k.shape[2]))

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        return self.row_weights(call, 0, call.q.shape[2])

    def row_weights(self, call: AttentionCall, lo: int, hi: int) -> Float[Tensor, "b h c k"]:
        of_keys, of_queries = places(call)
        query_places, key_places = of_queries[:, lo:hi, None], of_keys[:, None, :]
        near = self._near(call, query_places, key_places) | self._sinks(call, query_places, key_places)
        return softmax(scores(query_rows(call, lo, hi)).masked_fill(~near[:, None], -math.inf)).to(call.q.dtype)

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        """Blocks of queries against the keys in their reach: time and memory grow with L r, not with L^2."""
        call = hide_unseen(call)
        n_q, n_k = call.sizes[2:]
        if n_k == 0 or n_q == 0:
            return call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1])
        call = replace(call, mask=pair_mask(call))
        of_keys, of_queries = places(call)
        # Visible keys first and in order, so that the keys of a window lie side by side.
        order = torch.arange(n_k, device=call.q.device).expand(call.q.shape[0], -1)
        if call.key_visible is not None:
            order = visible_first(call.key_visible)
        before, after = (self.r - 1, 0) if call.causal else (self.r // 2, self.r // 2)
        size = max(64, self.r)
        return torch.cat([self._block(call, of_keys, of_queries, order, lo, min(lo + size, n_q), before, after)
                          for lo in range(0, n_q, size)], dim=2)  # fmt: skip

    def _block(
        self,
        call: AttentionCall,
        of_keys: Int[Tensor, "b k"],
        of_queries: Int[Tensor, "b q"],
        order: Int[Tensor, "b k"],
        lo: int,
        hi: int,
        before: int,
        after: int,
    ) -> Float[Tensor, "b h c e"]:
        n_k = call.k.shape[2]
        query_places = of_queries[:, lo:hi]
        width = min(n_k, hi - lo + before + after)
        first = (query_places[:, :1] - before).clamp(0, n_k - width)
        reach = order.gather(1, first + torch.arange(width, device=order.device))
        near = self._near(call, query_places[:, :, None], of_keys.gather(1, reach)[:, None, :])[:, None]
        if self.sinks:
            first_keys = order[:, : self.sinks]
            places = of_keys.gather(1, first_keys)[:, None, :]
            # A sink inside the window stands there already.
            apart = ~self._near(call, query_places[:, :, None], places)
            near = torch.cat([(self._sinks(call, query_places[:, :, None], places) & apart)[:, None], near], -1)
            reach = torch.cat([first_keys, reach], 1)
        k, v = (t.gather(2, reach[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3])) for t in (call.k, call.v))
        s = ungrouped(group_scores(grouped(call.q[:, :, lo:hi], call.groups), k, scale=call.softmax_scale))
        if call.bias is not None:
            s = s + _columns(call.bias[:, :, lo:hi], reach)
        if call.mask is not None:
            near = near & _columns(call.mask[:, :, lo:hi], reach)
        if call.key_visible is not None:
            near = near & call.key_visible.gather(1, reach)[:, None, None, :]
        W = softmax(s.masked_fill(~near, -math.inf)).to(v.dtype)
        return ungrouped(group_product(grouped(W, call.groups), v))

    def _near(self, call: AttentionCall, query_places: Tensor, key_places: Tensor) -> Tensor:
        if call.causal:
            return (key_places <= query_places) & (key_places > query_places - self.r)
        return (key_places - query_places).abs() <= self.r // 2

    def _sinks(self, call: AttentionCall, query_places: Tensor, key_places: Tensor) -> Tensor:
        first = key_places < self.sinks
        return first & (key_places <= query_places) if call.causal else first.expand(-1, query_places.shape[1], -1)


def _columns(t: Tensor, reach: Int[Tensor, "b w"]) -> Tensor:
    t = t.expand(reach.shape[0], *t.shape[1:])
    return t.gather(3, reach[:, None, None, :].expand(-1, t.shape[1], t.shape[2], -1))
