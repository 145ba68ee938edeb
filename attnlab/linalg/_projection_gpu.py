"""The projection of every head on a GPU: one Cholesky factorisation each, without a wait of the host for the device.

A batch of padded inputs has heads with more visible keys than dimensions, which need a basis of their values' columns,
and heads with at most as many, where independent values make W_perp = W. A matrix of at most e x e
decides either, V^T V or V V^T over the visible keys, so the kernels treat both alike. Heads for which it proves nothing
are ``doubtful`` and go through ``projection`` instead.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnlab.linalg.projection import SAFE_CONDITION, independence_limit
from attnlab.shapes import Bool, Float, Int

__all__ = [
    "Projected",
    "Visible",
    "attend_heads",
    "project_heads",
    "project_on_gpu",
    "rank_of_independent_values",
    "supports_gpu_projection",
    "visible_keys",
]


class Visible(NamedTuple):
    """Which keys of each input are visible (1), how many, and the keys with those first; the same for all layers."""

    seen: Int[Tensor, "b k"]
    counts: Int[Tensor, " b"]
    order: Int[Tensor, "b k"]


class Projected(NamedTuple):
    """W_perp; |W_perp V - O| / |O|, the share of |W|^2 that is gone, and 1 where that is in doubt."""

    weights: Float[Tensor, "n h q k"]
    stats: Float[Tensor, "three n h"]


def supports_gpu_projection(w: Tensor, v: Tensor) -> bool:
    """Whether the kernels take these weights and values: on a GPU, not in float64, and with no gradient asked for."""
    if not v.is_cuda or v.dtype == torch.float64 or not v.numel() or not w.numel():
        return False
    if torch.is_grad_enabled() and (w.requires_grad or v.requires_grad):
        return False
    return v.shape[-1] <= _widest()


@functools.cache
def _widest() -> int:
    """The most dimensions of a head's values that the kernels take: none without Triton."""
    if importlib.util.find_spec("triton") is None:
        return 0
    from attnlab.kernels.effective import WIDEST

    return WIDEST


def visible_keys(key_visible: Bool[Tensor, "b k"]) -> Visible:
    """The padding as the kernels take it."""
    order = torch.argsort(~key_visible, dim=-1, stable=True)
    return Visible(key_visible.int(), key_visible.sum(-1), order)


def attend_heads(*arguments: Any) -> None:
    """Softmax attention that keeps W, in one launch: ``kernels.effective.attend_heads``."""
    from attnlab.kernels import effective

    effective.attend_heads(*arguments)


def project_heads(
    w: Float[Tensor, "n h q k"],
    v: Float[Tensor, "n g k e"],
    output: Float[Tensor, "n h q e"] | None,
    visible: Visible | None,
) -> Projected:
    """W_perp of the items of one or several layers, and how good it is; hidden keys may hold any numbers.

    Where it is in doubt, W_perp has no meaning.
    """
    from attnlab.kernels import effective

    limit = independence_limit(v.dtype, max(v.shape[2:]))
    return Projected(*effective.project_heads(w, v, output, visible, safe=SAFE_CONDITION, independent=limit))


def rank_of_independent_values(
    visible: Visible | None, *, b: int, n_k: int, e: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(rank of the values that an input's queries see, whether that makes W_perp = W), where there is no doubt."""
    counts = torch.full((b,), n_k, device=device) if visible is None else visible.counts
    return counts.clamp(max=e), counts <= e


def project_on_gpu(
    w: Float[Tensor, "b g r k"], v: Float[Tensor, "b g k e"], seen: Bool[Tensor, "b 1 k"] | None
) -> tuple[Float[Tensor, "b g r k"], Int[Tensor, "b g"], Bool[Tensor, "b g"], Bool[Tensor, "b g"]]:
    """(W_perp, rank, trivial, doubtful)."""
    visible = None if seen is None else visible_keys(seen[:, 0])
    effective, stats = project_heads(w, v, None, visible)
    b, g, n_k, e = v.shape
    rank, trivial = (
        t[:, None].expand(b, g) for t in rank_of_independent_values(visible, b=b, n_k=n_k, e=e, device=v.device)
    )
    return effective, rank, trivial, stats[2] > 0
