"""The two least-squares fits of attention matching (Zweiger et al., 2026, arXiv 2602.16284), batched: arrays in, out.

n keys stand for many. Their weights w are fitted so that a query's mass stays what it was, then their values so that
its output does. Both fits need only sums over the queries, so that no matrix of queries by keys is held.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnlab.shapes import Bool, Float

__all__ = ["LARGEST", "SMALLEST", "mass_weights", "moved_values"]

# Weights are kept within these: a key with none would be lost, and one with more holds the mass of a whole text.
SMALLEST, LARGEST = 1e-4, 1e6
# Steps of the search for the largest eigenvalue; its bound from above holds after any number.
POWER_STEPS = 16


def mass_weights(
    gram: Float[Tensor, "*batch n n"],
    sums: Float[Tensor, "*batch n"],
    there: Bool[Tensor, "*batch n"],
    *,
    ridge: float = 1e-3,
    steps: int = 200,
) -> Float[Tensor, "*batch n"]:
    """The w > 0 that minimises |A w - s|^2 + ridge mean(diag) |w - 1|^2, from A^T A and A^T s; 1 where no key is.

    A has no negative number. By accelerated projected gradients (Beck and Teboulle, 2009) with unit diagonal.

    >>> mass_weights(torch.eye(2), torch.tensor([2.0, -1.0]), torch.ones(2, dtype=torch.bool), ridge=0.0).tolist()
    [2.0, 9.999999747378752e-05]
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    count = there.sum(-1, keepdim=True).clamp_min(1)
    pull = ridge * diagonal.sum(-1, keepdim=True) / count
    # Keys that no query sees keep their weight of 1.
    own = (diagonal + pull).clamp_min(torch.finfo(gram.dtype).tiny)
    root = own.sqrt()
    unit = gram / (root.unsqueeze(-1) * root.unsqueeze(-2))
    unit = unit + torch.diag_embed(pull / own)
    target = (sums + pull) / root
    low, high = SMALLEST * root, LARGEST * root
    step = 1 / _largest_eigenvalue(unit)
    x = ahead = root
    momentum = 1.0
    for _ in range(steps):
        down = (unit @ ahead.unsqueeze(-1)).squeeze(-1) - target
        new = (ahead - step * down).clamp(low, high)
        after = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead, x, momentum = new + (momentum - 1) / after * (new - x), new, after
    w = x / root
    return torch.where(there & (diagonal > 0) & w.isfinite(), w, 1)


def _largest_eigenvalue(gram: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch 1"]:
    """An upper bound of the largest eigenvalue of matrices without negative numbers (Collatz and Wielandt)."""
    x = gram.new_ones(gram.shape[:-1])
    for _ in range(POWER_STEPS):
        y = (gram @ x.unsqueeze(-1)).squeeze(-1)
        x = y / y.amax(-1, keepdim=True).clamp_min(torch.finfo(y.dtype).tiny)
        # A positive vector is needed for the bound.
        x = x.clamp_min(1e-6)
    y = (gram @ x.unsqueeze(-1)).squeeze(-1)
    return (y / x).amax(-1, keepdim=True).clamp_min(torch.finfo(y.dtype).tiny)


def moved_values(
    gram: Float[Tensor, "*batch n n"],
    residual: Float[Tensor, "*batch n e"],
    there: Bool[Tensor, "*batch n"],
    *,
    ridge: float = 1e-2,
) -> Float[Tensor, "*batch n e"]:
    """The change D of the values that minimises |P D - R|^2 + ridge mean(diag) |D|^2, from P^T P and P^T R.

    R is what the outputs lack with the values as they are, so that a key of which the queries say nothing keeps its
    value. Zeros where no key is, and where the system cannot be solved.
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    pull = ridge * diagonal.sum(-1, keepdim=True) / there.sum(-1, keepdim=True).clamp_min(1)
    # Places without a key have rows of zeros; any positive number makes them solvable.
    pull = torch.where(there & (pull > 0), pull, 1)
    factor, failed = torch.linalg.cholesky_ex(gram + torch.diag_embed(pull))
    change = torch.cholesky_solve(residual, factor)
    good = there & (failed == 0).unsqueeze(-1) & change.isfinite().all(-1)
    return torch.where(good.unsqueeze(-1), change, 0)
