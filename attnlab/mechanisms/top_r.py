"""Optimal value-oblivious sparse attention (OVO): the r keys of largest weight, renormalised."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, query_chunks, repeat_groups, scores, visible
from attnlab.linalg.largest import largest
from attnlab.mechanisms._sparse.alpha import SparseMechanism, keys_kept, spread_infinite, widened
from attnlab.mechanisms.kernelized import Kernelized, kernel_matrix
from attnlab.mechanisms.softmax import softmax
from attnlab.registry import register
from attnlab.shapes import Bool, Float

__all__ = ["TopR"]

# A chunk of scores is read several times; this many stay in a CPU's cache.
CPU_CHUNK = 1 << 21


@register("top-r", examples=("top-r:r=3", "top-r:r=3,kernel=elu", "top-r:r=2,by=alpha-norm", "top-r:r=d+1"))
@dataclass(frozen=True)
class TopR(SparseMechanism):
    """sum_{i in S} kappa(q, k_i) v_i / sum_{i in S} kappa(q, k_i), S the r keys of largest alpha (OVA, Eq. 2).

    ``by="alpha-norm"`` ranks by alpha_i |v_i| (Kobayashi et al., 2020), the baseline the paper argues against; the
    weights are those of alpha all the same. ``r="d+1"`` is one more than the width of a value. Equal ranks go to the
    lowest index. Fewer than r visible keys: all are used. The choice of S has no gradient; the weights on it have.

    >>> TopR(r=2, by="alpha-norm")
    TopR(r=2, kernel='exp', degree=2, by='alpha-norm')
    """

    by: str = "alpha"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by not in ("alpha", "alpha-norm"):
            raise ValueError(f"by must be alpha or alpha-norm, got {self.by!r}")

    def is_exact(self, call: AttentionCall) -> bool:
        return self.kernel == "exp" and keys_kept(self.r, call) >= call.k.shape[2]

    def bytes_read(self, call: AttentionCall) -> float:
        """Every key is scored; the values of r keys are read."""
        n_k, width, value_width = call.k.shape[2], call.k.shape[3], call.v.shape[3]
        kept = min(1.0, keys_kept(self.r, call) / max(1, n_k))
        return (width + kept * value_width) / max(1, width + value_width)

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        return _weights(self, widened(call)).to(call.q.dtype)

    def forward(self, call: AttentionCall) -> Float[Tensor, "b h q e"]:
        budget = CPU_CHUNK if call.q.device.type == "cpu" else 1 << 26
        make = _sparse_weights if self.kernel == "exp" and self.by == "alpha" else _weights
        wide = widened(call)
        v = repeat_groups(wide.v, call.groups)
        out = [make(self, part) @ v for part in query_chunks(wide, budget)]
        return torch.cat(out, dim=2).to(call.q.dtype)


def _weights(mech: TopR, call: AttentionCall) -> Float[Tensor, "b h q k"]:
    if mech.kernel == "exp":
        s = spread_infinite(scores(call))
        rank = s.detach()
        if mech.by == "alpha-norm":
            norms = _norms(call).clamp_min(torch.finfo(s.dtype).tiny)
            rank = (rank + norms.log()).masked_fill(rank == -math.inf, -math.inf)
        return softmax(s.masked_fill(~top_r_mask(rank, keys_kept(mech.r, call)), -math.inf))
    kappa = kernel_matrix(Kernelized(mech.kernel, mech.degree), call)
    rank, seen = kappa.detach(), visible(call)
    if mech.by == "alpha-norm":
        rank = rank * _norms(call)
    if seen is not None:
        rank = rank.masked_fill(~seen, -math.inf)
    kept = kappa.masked_fill(~top_r_mask(rank, keys_kept(mech.r, call)), 0)
    total = kept.sum(-1, keepdim=True)
    return kept / total.masked_fill(total == 0, 1)


def _sparse_weights(mech: TopR, call: AttentionCall) -> Float[Tensor, "b h q k"]:
    """``_weights`` with the softmax over the kept scores alone; a tie at the last place goes through ``_weights``."""
    s, r = scores(call), keys_kept(mech.r, call)
    if r >= s.shape[-1]:
        return _weights(mech, call)
    top, keys = largest(s, r + 1)
    if ((top[..., r - 1] == top[..., r]) & (top[..., r] > -math.inf)).any():
        return _weights(mech, call)
    return torch.zeros_like(s).scatter_(-1, keys[..., :r], softmax(spread_infinite(top[..., :r])))


def top_r_mask(rank: Float[Tensor, "*rows k"], r: int) -> Bool[Tensor, "*rows k"]:
    """Where the r largest of each row lie, ties to the lowest index; minus infinity is never taken, NaN always.

    >>> top_r_mask(torch.tensor([3.0, 1.0, 3.0, 3.0]), 2).tolist()
    [True, False, True, False]
    """
    if r >= rank.shape[-1]:
        return rank != -math.inf
    threshold = rank.topk(r, sorted=False).values.amin(-1, keepdim=True)
    # NaN compares as false, and counts as the largest.
    taken = ~(rank < threshold) & (rank != -math.inf)
    tied = taken.sum(-1) > r
    if tied.any():
        above, level = ~(rank[tied] <= threshold[tied]), rank[tied] == threshold[tied]
        room = r - above.sum(-1, keepdim=True)
        taken[tied] = above | (level & (level.cumsum(-1) <= room))
    return taken


def _norms(call: AttentionCall) -> Float[Tensor, "b h 1 k"]:
    return repeat_groups(call.v.detach().norm(dim=-1), call.groups).unsqueeze(2)
