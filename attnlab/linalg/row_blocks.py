"""Blocks of rows of W: those of softmax attention made here, those of other mechanisms by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, grouped
from attnlab.chunks import chunk_budget
from attnlab.linalg.largest import GROUP, group_maxima, largest
from attnlab.shapes import Float, Int

__all__ = ["BLOCK_ELEMENTS", "RowBlock", "largest_weights", "mechanism_rows", "row_ranges", "softmax_rows"]

# Elements of W worked on at once: few enough for a CPU's cache.
BLOCK_ELEMENTS = 1 << 21
# The score of a hidden key: its weight is zero, and zero times it is not NaN, as it would be with minus infinity.
HIDDEN = -1e30
# Keys of a block are a multiple of this, so that the largest weights are found in steps.
KEYS = GROUP * GROUP


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Rows ``lo`` to ``hi`` of W over the first n keys: ``w * factor``, each row with a factor of its own.

    ``signed``: weights may be below zero.
    """

    lo: int
    hi: int
    w: Float[Tensor, "b h c n"]
    factor: Float[Tensor, "b h c"]
    entropy: Float[Tensor, "b h c"]
    largest: Float[Tensor, "b h c m"]
    places: Int[Tensor, "b h c m"]
    signed: bool


def row_ranges(call: AttentionCall, block: int, first: int) -> Iterator[tuple[int, int]]:
    """(first, last) query of each block of rows; none crosses a multiple of ``block``, counted from query ``first``."""
    b, h, n_q, n_k = call.sizes
    size, lo = max(1, chunk_budget(BLOCK_ELEMENTS) // max(1, b * h * n_k)), 0
    while lo < n_q:
        hi = min(lo + size, n_q)
        if block:
            hi = min(hi, lo + block - (first + lo) % block)
        yield lo, hi
        lo = hi


def mechanism_rows(mech: Mechanism, call: AttentionCall, lo: int, hi: int, n: int) -> RowBlock:
    """Rows of any mechanism; the entropy is NaN where a weight is below zero, since the row is no distribution then."""
    w = mech.row_weights(call, lo, hi)
    w = w.to(torch.promote_types(w.dtype, torch.float32))
    entropy = torch.special.entr(w).sum(-1).masked_fill((w < 0).any(-1), torch.nan)
    return RowBlock(lo, hi, w, w.new_ones(w.shape[:3]), entropy, *largest_weights(w, n), signed=True)


def softmax_rows(call: AttentionCall, lo: int, hi: int, n: int) -> RowBlock:
    """Rows of softmax attention under padding and causality, over the keys that one of them may see."""
    s = _scores(call, lo, hi)
    if s.shape[-1] == 0:
        zero = s.new_zeros(s.shape[:3])
        return RowBlock(lo, hi, s, zero, zero, *largest_weights(s, n), signed=False)
    maxima = group_maxima(s) if s.shape[-1] % GROUP == 0 else None
    top = (s if maxima is None else maxima).amax(-1, keepdim=True)
    best, keys = largest(s, min(n, s.shape[-1]), maxima=maxima)
    s -= top
    w = s.exp()
    total = w.sum(-1, keepdim=True)
    entropy = total.log() - torch.mul(w, s, out=s).sum(-1, keepdim=True) / total
    empty = top <= HIDDEN / 2
    factor = (1 / total).masked_fill(empty, 0)
    values, keys = _padded((best - top).exp() * factor, keys, n)
    return RowBlock(lo, hi, w, factor[..., 0], entropy.masked_fill(empty, 0)[..., 0], values, keys, signed=False)


def largest_weights(w: Float[Tensor, "b h c k"], n: int) -> tuple[Float[Tensor, "b h c n"], Int[Tensor, "b h c n"]]:
    """(the n largest, their keys); zeros, which hidden keys have, are at -1."""
    return _padded(*largest(w, min(n, w.shape[-1])), n)


def _padded(values: Tensor, keys: Tensor, n: int) -> tuple[Tensor, Tensor]:
    missing = n - values.shape[-1]
    if missing:
        values, keys = (torch.nn.functional.pad(t, (0, missing)) for t in (values, keys))
    return values, keys.masked_fill(values == 0, -1).int()


def _scores(call: AttentionCall, lo: int, hi: int) -> Float[Tensor, "b h c n"]:
    """The scores of some rows; keys that none of them sees are left out at the end."""
    end = n_k = call.k.shape[2]
    if call.causal:
        end = min(n_k, -(-max(0, hi + call.offset) // KEYS) * KEYS)
    kind = torch.promote_types(call.q.dtype, torch.float32)
    q = grouped(call.q[:, :, lo:hi].to(kind) * call.softmax_scale, call.groups)
    # One product for all query heads that read a key/value head.
    s = (q.flatten(2, 3) @ call.k[:, :, :end].to(kind).mT).unflatten(2, q.shape[2:4]).flatten(1, 2)
    if call.causal:
        start = min(max(0, lo + call.offset + 1), end)
        ahead = torch.ones(hi - lo, end - start, dtype=torch.bool, device=s.device)
        s[..., start:].masked_fill_(ahead.triu(lo + call.offset + 1 - start), HIDDEN)
    if call.key_visible is not None:
        s.masked_fill_(~call.key_visible[:, None, None, :end], HIDDEN)
    return s
