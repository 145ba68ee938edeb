"""Where a token stands: sinusoidal and rotary positions as functions of integers that padding never moves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnlab.shapes import Bool, Float, Int

__all__ = ["count_positions", "rotate", "sinusoids"]


def count_positions(visible: Bool[Tensor, "b q"]) -> Int[Tensor, "b q"]:
    """Each token's place among its row's visible tokens, so that padding on either side changes nothing.

    >>> count_positions(torch.tensor([[False, True, True], [True, True, False]])).tolist()
    [[0, 0, 1], [0, 1, 1]]
    """
    return (visible.cumsum(-1) - 1).clamp(min=0)


def sinusoids(positions: Int[Tensor, "b q"], width: int) -> Float[Tensor, "b q m"]:
    """PE(p, 2i) = sin(p / 10000^(2i/m)), PE(p, 2i+1) = cos of the same (Vaswani et al., 2017, 3.5).

    >>> sinusoids(torch.tensor([[0]]), 4).tolist()
    [[[0.0, 1.0, 0.0, 1.0]]]
    """
    angle = _angles(positions, width)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


def rotate(t: Float[Tensor, "b h q d"], positions: Int[Tensor, "#b q"]) -> Float[Tensor, "b h q d"]:
    """Turn each pair (t_i, t_(i+d/2)) by p / 10000^(2i/d), so that <q, k> knows only distances (Su et al., 2021).

    >>> rotate(torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[0]])).tolist()
    [[[[1.0, 0.0]]]]
    """
    angle = _angles(positions, t.shape[-1])[:, None]
    sin, cos = angle.sin().to(t.dtype), angle.cos().to(t.dtype)
    first, second = t.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _angles(positions: Int[Tensor, "b q"], width: int) -> Float[Tensor, "b q half"]:
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    return positions[..., None] * torch.exp(-math.log(10_000) * exponent)
