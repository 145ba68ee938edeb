"""Effective attention as an operator: each row of W projected on the column space of the values that its query sees."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.attention import grouped, repeat_groups, ungrouped
from attnlab.linalg.prefix import prefix_map
from attnlab.linalg.projection import project, project_rows
from attnlab.shapes import Bool, Float, Int

__all__ = ["effective_map"]


def effective_map(
    weights: Float[Tensor, "b h q k"],
    v: Float[Tensor, "b g k e"],
    *,
    key_visible: Bool[Tensor, "b k"] | None = None,
    causal: bool = False,
    offset: int = 0,
    mask: Bool[Tensor, "#b #h q k"] | None = None,
    rtol: float | None = None,
) -> tuple[Float[Tensor, "b h q k"], Int[Tensor, "b h q"], Bool[Tensor, "b h q"]]:
    """(W_perp, rank of the values each query sees, whether that makes W_perp = W); hidden keys get exactly zero.

    Weights are zero at hidden keys.
    """
    b, h, n_q, n_k = weights.shape
    if mask is not None and mask.shape[1] > 1:
        v = repeat_groups(v, h // v.shape[1])
    groups = h // v.shape[1]
    w = grouped(weights, groups).to(torch.promote_types(weights.dtype, torch.float32))
    if key_visible is not None:
        v = v.masked_fill(~key_visible[:, None, :, None], 0)
    if mask is not None:
        seen = _row_visibility(mask, key_visible, causal=causal, offset=offset)
        v = v.masked_fill(~seen.any(2)[..., None], 0)
        effective, rank, trivial = _each_row(w, v, seen.expand(b, v.shape[1], n_q, n_k), rtol)
    elif causal and n_k and n_q:
        effective, rank, trivial = prefix_map(w, _until(v, n_q + offset), key_visible, offset, rtol)
    else:
        shared = None if key_visible is None else key_visible[:, None]
        flat, rank, trivial = project(w.flatten(2, 3), v, shared, rtol=rtol, clean=True)
        effective = flat.unflatten(2, (groups, n_q))
        rank, trivial = (t[..., None].expand(b, v.shape[1], n_q) for t in (rank, trivial))
    rank, trivial = (repeat_groups(t, groups) for t in (rank, trivial))
    return ungrouped(effective).to(weights.dtype), rank, trivial


def _row_visibility(mask: Tensor, key_visible: Tensor | None, *, causal: bool, offset: int) -> Tensor:
    """Which keys each query sees, as one mask."""
    if key_visible is not None:
        mask = mask & key_visible[:, None, None]
    if causal:
        n_q, n_k = mask.shape[-2:]
        mask = mask & torch.ones(n_q, n_k, dtype=torch.bool, device=mask.device).tril(offset)
    return mask


def _until(v: Tensor, end: int) -> Tensor:
    """Values that no query sees set to zero, so that NaN or infinity in them cannot spread."""
    if end >= v.shape[2]:
        return v
    ahead = torch.arange(v.shape[2], device=v.device) >= end
    return v.masked_fill(ahead[:, None], 0)


def _each_row(w: Tensor, v: Tensor, seen: Tensor, rtol: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """The slow exact path: every query has its own set of keys."""
    b, g, _, n_q, _ = w.shape
    out = torch.zeros_like(w)
    rank = torch.zeros(b, g, n_q, dtype=torch.long, device=v.device)
    trivial = torch.zeros(b, g, n_q, dtype=torch.bool, device=v.device)
    every = torch.ones(b, g, n_q, dtype=torch.bool, device=v.device).nonzero(as_tuple=True)
    project_rows(w, v, seen, every, (out, rank, trivial), rtol=rtol)
    return out, rank, trivial
