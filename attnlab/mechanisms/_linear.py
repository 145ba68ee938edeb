"""Attention in linear time for any kernel with a feature map: sum_j phi(q) . phi(k_j) v_j / sum_j phi(q) . phi(k_j)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, grouped, hide_unseen, ungrouped
from attnlab.shapes import Float, Int

__all__ = ["FeatureMap", "LinearCache", "linear_attention"]

FeatureMap = Callable[[Tensor], Tensor]


def linear_attention(
    call: AttentionCall, phi: FeatureMap, phi_k: FeatureMap | None = None, *, chunk: int = 128
) -> Float[Tensor, "b h q e"]:
    """The kernel's attention with key padding and causality, holding features of one chunk and one (f, e) state.

    ``phi`` maps (..., d) to (..., f); keys use ``phi_k`` where it is given. Half precision is accumulated in float32.
    """
    return _continued(call, phi, phi_k or phi, None, chunk)[0]


class LinearCache:
    """The ``LayerCache`` of a kernel with a feature map: sum_j phi(k_j) [v_j, 1]^T, whose size no length changes.

    ``maps`` gives (phi of queries, phi of keys) for a call.
    """

    def __init__(self, batch: int, maps: Callable[[AttentionCall], tuple[FeatureMap, FeatureMap]]) -> None:
        self.batch, self.maps = batch, maps
        self.state: Tensor | None = None

    def attend(
        self, mechanism: Mechanism, call: AttentionCall, *, key_visible: Tensor | None
    ) -> tuple[AttentionCall, Tensor]:
        """Take in the call's keys, all new, and answer its queries; the past needs no ``key_visible``."""
        if call.q.shape[0] != self.batch:
            raise ValueError(
                f"this cache is for a batch of {self.batch}, the call has {call.q.shape[0]}; make a new one"
            )
        mechanism.refuse(call)
        out, self.state = _continued(call, *self.maps(call), self.state, 128)
        return call, out

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Copy rows."""
        self.batch = rows.shape[0]
        if self.state is not None:
            self.state = self.state[rows]


def _continued(
    call: AttentionCall, phi: FeatureMap, phi_k: FeatureMap, state: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """The output for keys that follow those summed up in ``state``, and the sum over all of them."""
    assert call.mask is None, "a general mask has no linear form"
    assert call.bias is None, "a bias has no linear form"
    kind = torch.promote_types(call.q.dtype, torch.float32)
    call = hide_unseen(call)
    # Autocast would round the running sums to half precision at every chunk.
    with torch.autocast(call.q.device.type, enabled=False):
        sums = _Sums(call, phi_k, kind)
        queries = grouped(call.q, call.groups).to(kind)
        run = _causal if call.causal else _bidirectional
        top, state = run(queries, sums, phi, call.offset, chunk, state)
        values, total = top[..., :-1], top[..., -1:]
        out = values / total.masked_fill(total == 0, 1)
    return ungrouped(out.masked_fill(total == 0, 0)).to(call.q.dtype), state


class _Sums:
    """Key features and values of a range of keys; hidden keys have features of zero, values end in a 1."""

    def __init__(self, call: AttentionCall, phi_k: FeatureMap, kind: torch.dtype) -> None:
        self.k, self.v, self.phi_k, self.kind = call.k, call.v, phi_k, kind
        self.hidden = None if call.key_visible is None else ~call.key_visible[:, None, :, None]
        self.length = call.k.shape[2]

    def part(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """(features (b, g, 1, c, f), values with a one appended (b, g, 1, c, e + 1)) of keys lo to hi."""
        features = self.phi_k(self.k[:, :, lo:hi].to(self.kind))
        if self.hidden is not None:
            features = features.masked_fill(self.hidden[:, :, lo:hi], 0)
        v = self.v[:, :, lo:hi].to(self.kind)
        return features.unsqueeze(2), torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1).unsqueeze(2)

    def state(self, lo: int, hi: int, chunk: int) -> Tensor:
        """sum_j phi(k_j) [v_j, 1]^T over keys lo to hi; an empty range gives the zero state."""
        features, values = self.part(lo, min(hi, lo + chunk))
        total = features.mT @ values
        for start in range(lo + chunk, hi, chunk):
            features, values = self.part(start, min(hi, start + chunk))
            total = total + features.mT @ values
        return total


def _bidirectional(
    q: Tensor, sums: _Sums, phi: FeatureMap, _offset: int, chunk: int, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    state = sums.state(0, sums.length, chunk)
    state = state if before is None else before + state
    return torch.cat([phi(part) @ state for part in q.split(chunk, dim=3)], dim=3), state


def _causal(
    q: Tensor, sums: _Sums, phi: FeatureMap, offset: int, chunk: int, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    # Keys before `lead` are seen by every query that sees anything; after them queries and keys advance together.
    lead, blind = max(0, min(offset, sums.length)), max(0, min(-offset, q.shape[3]))
    state = sums.state(0, lead, chunk)
    state = state if before is None else before + state
    parts = [q.new_zeros(*q.shape[:3], blind, state.shape[-1])]
    for lo in range(blind, q.shape[3], chunk):
        fq = phi(q[..., lo : lo + chunk, :])
        first = max(0, lo + offset)
        fk, values = sums.part(first, min(sums.length, first + fq.shape[3]))
        ahead = torch.ones(fq.shape[3], fk.shape[3], dtype=torch.bool, device=q.device).triu(1)
        parts.append((fq @ fk.mT).masked_fill(ahead, 0) @ values + fq @ state)
        state = state + fk.mT @ values
    return torch.cat(parts, dim=3), state
