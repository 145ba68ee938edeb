"""How far a head keeps to the segments of a text: what a block pattern is, measured where the segments are known."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.shapes import Float, Int

__all__ = ["segment_contrast"]

# Neighbours are left out: a diagonal is no block.
NEAR = 2


def segment_contrast(
    weights: Float[Tensor, "b h n n"], segments: Int[Tensor, "b n"], *, near: int = NEAR
) -> Float[Tensor, "b h"]:
    """(a - c) / (a + c) with the mean absolute weight a within segments and c across them: 1/3 where a is twice c.

    Tokens of segment -1, and pairs no more than ``near`` apart, do not count; NaN where there is nothing to compare.

    >>> w = torch.tensor([[[[0.2, 0.6, 0.1, 0.1], [0.6, 0.2, 0.1, 0.1], [0.0, 0.2, 0.4, 0.4], [0.2, 0.0, 0.4, 0.4]]]])
    >>> segment_contrast(w, torch.tensor([[0, 0, 1, 1]]), near=0)
    tensor([[0.6667]])
    """
    n = segments.shape[1]
    place = torch.arange(n, device=segments.device)
    known = segments >= 0
    pairs = known[:, :, None] & known[:, None] & ((place - place[:, None]).abs() > near)
    same = segments[:, :, None] == segments[:, None]
    size = weights.abs().double()
    means = ((size * at[:, None]).sum((-1, -2)) / at.sum((-1, -2))[:, None] for at in (pairs & same, pairs & ~same))
    within, across = means
    return ((within - across) / (within + across)).to(weights.dtype)
