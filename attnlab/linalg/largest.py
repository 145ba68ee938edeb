"""The largest numbers of long rows."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.shapes import Float, Int

__all__ = ["group_maxima", "largest"]

GROUP = 8


def largest(
    s: Float[Tensor, "*rows k"], n: int, *, maxima: Float[Tensor, "*rows m"] | None = None, in_order: bool = True
) -> tuple[Float[Tensor, "*rows n"], Int[Tensor, "*rows n"]]:
    """``topk``, in steps where rows are long: the n largest lie in the n strided groups of largest maximum.

    ``maxima`` are those of the groups (``group_maxima``), where they are known.
    """
    groups = s.shape[-1] // GROUP
    if s.shape[-1] % GROUP or groups < 4 * n:
        return s.topk(n, sorted=in_order)
    _, best = largest(group_maxima(s.detach()) if maxima is None else maxima, n, in_order=False)
    members = best.unsqueeze(-2) + groups * torch.arange(GROUP, device=s.device).unsqueeze(-1)
    members = members.flatten(-2)
    top, place = s.gather(-1, members).topk(n, sorted=in_order)
    return top, members.gather(-1, place)


def group_maxima(s: Float[Tensor, "*rows k"]) -> Float[Tensor, "*rows m"]:
    """The largest of each group of eight; those of a group lie k / 8 places apart."""
    return s.unflatten(-1, (GROUP, -1)).amax(-2)
