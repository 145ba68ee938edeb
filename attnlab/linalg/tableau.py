"""Two ways to write a sum of c points in R^a on a of them: one pass over the columns of a simplex tableau, batched.

A column outside the basis is a combination of the basis. Its weight moves to the basis until none is left, or until the
weight of a basis column reaches zero: then it replaces that column.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnlab.shapes import Float, Int

__all__ = ["Survivors", "by_any_basis", "by_heaviest_basis"]

# Below this, relative to the largest value, a column adds no dimension to those before it.
RANK_TOLERANCE = 1e-9
# A member without weight must not be divided by.
TINY = 1e-30


class Survivors(NamedTuple):
    """sum_i x_i = sum_s share_s x_which_s, with share >= 0."""

    which: Int[Tensor, "m a"]
    share: Float[Tensor, "m a"]


def by_heaviest_basis(x: Float[Tensor, "m c a"]) -> Survivors:
    """From the first ``a`` points as a basis; where they are dependent, the result is wrong or not a number."""
    m, c, size = x.shape
    tableau, _ = torch.linalg.solve_ex(x[:, :size], x[:, size:], left=False)
    share, which = x.new_ones(m, size), torch.arange(size, device=x.device).repeat(m, 1)
    minus, ratio = x.new_full((m, 1), -1), torch.empty_like(share)
    lowest = x.new_empty(c - size, m, 1)
    places = torch.empty(c - size, m, 1, dtype=torch.long, device=x.device)
    for j in range(c - size):
        column, low, place = tableau[:, j], lowest[j], places[j]
        torch.div(column, share, out=ratio)
        torch.min(ratio, -1, keepdim=True, out=(low, place))
        # Minus the part of the column that the basis takes over: all of it unless a share would become negative.
        taken = low.clamp_max(-1).reciprocal_()
        share.addcmul_(taken, column, value=-1).clamp_min_(TINY)
        share.scatter_add_(1, place, taken + 1)
        rest = tableau[:, j + 1 :]
        pivot = column.gather(1, place).masked_fill_(low >= -1, torch.inf)
        column.scatter_add_(1, place, minus)
        line = rest.gather(2, place.unsqueeze(1).expand(-1, rest.shape[1], 1)).squeeze(2).div_(pivot)
        rest.addcmul_(line.unsqueeze(-1), column.unsqueeze(1), value=-1)
    # The last column that entered the basis at a place is the one that stays there.
    entered = torch.where(lowest < -1, torch.arange(size, c, device=x.device).view(-1, 1, 1), 0)
    return Survivors(which.scatter_reduce_(1, places.squeeze(2).T, entered.squeeze(2).T, "amax"), share)


def by_any_basis(x: Float[Tensor, "m c a"]) -> Survivors:
    """From an artificial basis without weight, whose places are taken first; any points will do."""
    m, c, size = x.shape
    weight = x[..., -1]
    tableau = _centred(x)
    at = torch.arange(m, device=x.device)
    held = x.new_zeros(m, size)
    free = torch.ones_like(held, dtype=torch.bool)
    which = torch.zeros(m, size, dtype=torch.long, device=x.device)
    for j in range(c):
        column, own_weight = tableau[:, j].clone(), weight[:, j]
        real = column.masked_fill(free, 0)
        ratio = held / real
        # Down: the column gives weight away, until it is empty or a member of the basis with a negative share is.
        t_down, row_down = torch.where(real < -1e-12, -ratio, torch.inf).min(-1)
        # Up: it takes weight, until a member with a positive share is empty.
        t_up, row_up = torch.where(real > 1e-12, ratio, torch.inf).min(-1)
        empty = t_down >= own_weight
        # The larger pivot of the two is the one to divide by.
        down = (column[at, row_down].abs() >= column[at, row_up]) | t_up.isinf()
        step = torch.where(empty, own_weight, torch.where(down, t_down, -t_up))
        largest, free_row = column.abs().masked_fill(~free, -1).max(-1)
        joins = (largest > RANK_TOLERANCE) & (own_weight > 0)
        row = torch.where(joins, free_row, torch.where(down, row_down, row_up))
        enters = (~empty | joins) & (own_weight > 0)
        step = torch.where(joins | (own_weight == 0), 0, step)
        free[at[joins], free_row[joins]] = False
        held = (held + step.unsqueeze(-1) * real).clamp_min_(0)
        held[at, row] = torch.where(enters, own_weight - step, held[at, row])
        which[at, row] = torch.where(enters, j, which[at, row])
        pivot = torch.where(enters, column[at, row], torch.inf).unsqueeze(-1)
        rest = tableau[:, j + 1 :]
        line = rest.gather(2, row.view(-1, 1, 1).expand(-1, rest.shape[1], 1)).squeeze(2) / pivot
        column[at, row] -= 1
        rest.addcmul_(line.unsqueeze(-1), column.unsqueeze(1), value=-1)
    taken = weight.gather(1, which)
    return Survivors(which, held / taken.masked_fill(taken == 0, 1))


def _centred(x: Float[Tensor, "m c a"]) -> Float[Tensor, "m c a"]:
    """Points divided by their last number, centred and scaled by what the row combines; zeros where that number is."""
    mass = x[..., -1:]
    some = (mass > 0).to(x.dtype)
    centre = x[..., :-1].sum(1, keepdim=True) / mass.sum(1, keepdim=True)
    means = (x[..., :-1] / mass.masked_fill(mass == 0, 1) - centre) * some
    scale = means.abs().amax((1, 2), keepdim=True)
    return torch.cat([means / scale.masked_fill(scale == 0, 1), some], -1)
