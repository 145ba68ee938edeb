"""The projection of every head in one go: one Cholesky factorisation each, and no wait for the device on the way.

A batch of padded inputs has heads with more visible keys than dimensions, which need a basis of their values' columns,
and heads with at most as many, where independent values make W_perp = W. Either is decided by a matrix of at most
e x e, V^T V or V V^T over the visible keys, so the kernels treat both alike. What that cannot prove is ``doubtful``,
for the careful way to decide.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from attnlab.mechanisms._projection import SAFE_CONDITION, independence_limit
from attnlab.shapes import Bool, Float, Int

__all__ = [
    "Projected",
    "Verdict",
    "Visible",
    "project_at_once",
    "project_heads",
    "serves_at_once",
    "verdict",
    "visible_keys",
]


class Visible(NamedTuple):
    """How many keys of each input are visible, and the keys with the visible ones first; the same for all layers."""

    counts: Int[Tensor, " b"]
    order: Int[Tensor, "b k"]


class Projected(NamedTuple):
    """W_perp; |V|^2 and |L^-1|^2, L L^T = V^T V; squares of W_perp V - O, O, W and W_perp in parts of rows."""

    found: Float[Tensor, "b h q k"]
    facts: Float[Tensor, "b g 2"]
    sums: Float[Tensor, "b h parts 4"]


class Verdict(NamedTuple):
    """The rank of a head's visible values, whether that makes W_perp = W, and where neither is proved."""

    rank: Int[Tensor, "... b g"]
    trivial: Bool[Tensor, "... b g"]
    doubtful: Bool[Tensor, "... b g"]


def serves_at_once(*tensors: Tensor) -> bool:
    """Whether the kernels take these weights and values: on a GPU, not in float64, and with no gradient asked for."""
    v = tensors[-1]
    if not v.is_cuda or v.dtype == torch.float64 or min(v.shape) == 0:
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    from attnlab.kernels.effective import WIDEST

    return v.shape[-1] <= WIDEST


def visible_keys(key_visible: Bool[Tensor, "b k"]) -> Visible:
    """What the kernels need to know of the padding."""
    return Visible(key_visible.sum(-1), torch.argsort(~key_visible, dim=-1, stable=True))


def project_heads(
    w: Float[Tensor, "b h q k"],
    v: Float[Tensor, "b g k e"],
    output: Float[Tensor, "b h q e"] | None,
    visible: Visible | None,
) -> Projected:
    """W_perp of weights and values that are zero at hidden keys, and what a verdict and a residual are made from."""
    from attnlab.kernels import effective

    return Projected(*effective.project_heads(w, v, output, visible))


def verdict(
    facts: Float[Tensor, "... b g 2"], count: Int[Tensor, " b"] | None, *, n_k: int, e: int, dtype: torch.dtype
) -> Verdict:
    """What the kernels' facts prove: |V| |L^-1|, a bound on the condition number of V, is below the limit."""
    if count is None:
        count = torch.full(facts.shape[-3:-2], n_k, device=facts.device)
    short = (count <= e)[:, None].expand(facts.shape[:-1])
    limit = torch.where(short, independence_limit(dtype, max(n_k, e)), SAFE_CONDITION)
    rank = count.clamp(max=e)[:, None].expand(facts.shape[:-1])
    return Verdict(rank, short, ~(facts.prod(-1).sqrt() < limit))


def project_at_once(
    w: Float[Tensor, "b g r k"], v: Float[Tensor, "b g k e"], seen: Bool[Tensor, "b 1 k"] | None
) -> tuple[Float[Tensor, "b g r k"], Verdict]:
    """W_perp of weights and values that are zero at hidden keys; where the verdict is doubtful, it means nothing."""
    visible = None if seen is None else visible_keys(seen[:, 0])
    found, facts, _ = project_heads(w, v, None, visible)
    count = None if visible is None else visible.counts
    return found, verdict(facts, count, n_k=v.shape[2], e=v.shape[3], dtype=v.dtype)
