"""A sum of points with non-negative weights written on independent points: Lawson and Hanson's active set (1974).

One problem at a time and by least squares in every step, so it is slow and loses no digits: for the few sums that
batched elimination (``linalg.tableau``) does not reproduce.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.shapes import Bool, Float

__all__ = ["basic_solution"]


def basic_solution(
    points: Float[Tensor, "k a"], total: Float[Tensor, " a"], *, tolerance: float
) -> Float[Tensor, " k"] | None:
    """x >= 0 with x @ points == total to ``tolerance``, at most ``a`` of it not zero; None if it is not found.

    The points whose x is not zero are independent: a point joins where the residual, which is orthogonal to those
    chosen before, has a part in its direction.
    """
    x = points.new_zeros(len(points))
    chosen = torch.zeros(len(points), dtype=torch.bool, device=points.device)
    length = points.norm(dim=1).clamp_min(torch.finfo(points.dtype).tiny)
    barred = torch.zeros_like(chosen)
    for _ in range(4 * points.shape[1] + 16):
        residual = total - x @ points
        if float(residual.abs().max()) <= tolerance:
            return x
        gain = (points @ residual / length).masked_fill(chosen | barred, -torch.inf)
        best = int(gain.argmax())
        if not float(gain[best]) > 0:
            return None
        chosen[best] = True
        x, chosen = _least_squares(points, total, x, chosen)
        # A point that rounding removes at once would be chosen again, until another one has joined.
        if bool(chosen[best]):
            barred.zero_()
        else:
            barred[best] = True
    return None


def _least_squares(
    points: Float[Tensor, "k a"], total: Float[Tensor, " a"], x: Float[Tensor, " k"], chosen: Bool[Tensor, " k"]
) -> tuple[Float[Tensor, " k"], Bool[Tensor, " k"]]:
    """The best non-negative weights of chosen points; those that would become negative leave, one step at a time."""
    chosen = chosen.clone()
    while bool(chosen.any()):
        best = torch.zeros_like(x)
        best[chosen] = torch.linalg.lstsq(points[chosen].mT, total.unsqueeze(1)).solution.squeeze(1)
        negative = chosen & (best <= 0)
        if not bool(negative.any()):
            return best, chosen
        ratio = torch.where(negative, x / (x - best), torch.inf)
        x = (x + ratio.min() * (best - x)).masked_fill(~chosen, 0)
        chosen = chosen & (x > 0) & (ratio > ratio.min())
        x = x.masked_fill(~chosen, 0)
    return x, chosen
