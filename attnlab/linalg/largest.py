"""The largest numbers of long rows."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.shapes import Float, Int

__all__ = ["largest"]

GROUP = 8
# Rows of this length and more have groups of this size, which must divide the length.
LONG, LARGE_GROUP = 2048, 32


def largest(s: Float[Tensor, "*rows k"], n: int) -> tuple[Float[Tensor, "*rows n"], Int[Tensor, "*rows n"]]:
    """``topk``, in two steps where rows are long: the n largest lie in the n strided groups of largest maximum."""
    size = LARGE_GROUP if s.shape[-1] >= LONG and s.shape[-1] % LARGE_GROUP == 0 else GROUP
    groups = s.shape[-1] // size
    if s.shape[-1] % size or groups < 4 * n:
        return s.topk(n)
    best = s.detach().unflatten(-1, (size, groups)).amax(-2).topk(n, sorted=False).indices
    members = best.unsqueeze(-2) + groups * torch.arange(size, device=s.device).unsqueeze(-1)
    members = members.flatten(-2)
    top, place = s.gather(-1, members).topk(n)
    return top, members.gather(-1, place)
