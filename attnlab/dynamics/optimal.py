"""The attention that minimises the loss of a linear output layer: a convex problem on the simplex (KTIW, A.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.shapes import Float, Int
from attnlab.summaries import short_repr

__all__ = ["OptimalAttention", "optimal_attention"]


@dataclass(frozen=True)
class OptimalAttention:
    """The weights, their loss in nats, and ``gap``: a proven bound on how far each loss is above the optimum."""

    weights: Float[Tensor, "rows k"]
    nll: Float[Tensor, " rows"]
    gap: Float[Tensor, " rows"]

    __repr__ = short_repr


def optimal_attention(
    gamma: Float[Tensor, "rows k v"],
    y: Int[Tensor, " rows"],
    *,
    bias: Float[Tensor, "rows v"] | None = None,
    lengths: Int[Tensor, " rows"] | None = None,
    tolerance: float = 1e-6,
    steps: int = 2000,
) -> OptimalAttention:
    """alpha_opt = argmin over the simplex of -log softmax(sum_l alpha_l gamma_l + bias)_y (Eqs. 26, 34).

    ``gamma_l = W h_l`` and ``bias = W s_t`` (gamma_s). Accelerated projected gradient with restarts, each row with its
    own step size, until every row's duality gap is below ``tolerance`` or after ``steps``; see ``gap``. A
    row of length 0 has weights 0, and NaN for its loss. Where optima tie, one of them comes back.

    >>> gamma = torch.tensor([[[0.0, 0, 0], [0, -10, 5], [0, 5, -10]]])
    >>> optimal_attention(gamma, torch.tensor([0])).weights.round(decimals=3) + 0.0
    tensor([[0.0000, 0.5000, 0.5000]])
    """
    rows, k, v = gamma.shape
    lengths = torch.full((rows,), k, device=gamma.device) if lengths is None else lengths
    if rows and not 0 <= int(lengths.min()) <= int(lengths.max()) <= k:
        raise ValueError(f"lengths must lie between 0 and {k}, got {int(lengths.min())} to {int(lengths.max())}")
    if rows and not 0 <= int(y.min()) <= int(y.max()) < v:
        raise ValueError(f"y must lie between 0 and {v - 1}, got {int(y.min())} to {int(y.max())}")
    seen = torch.arange(k, device=gamma.device) < lengths.unsqueeze(1)
    dtype, (gamma, fixed) = gamma.dtype, _relative_logits(gamma, bias, y, seen)
    start = seen.to(gamma.dtype) / lengths.clamp_min(1).unsqueeze(1)
    alpha, nll, slope = _minimise(start, gamma, fixed, seen, tolerance=tolerance, steps=steps)
    empty = lengths == 0
    gap = _gap(alpha, slope, seen).masked_fill(empty, torch.nan)
    return OptimalAttention(alpha.to(dtype), nll.masked_fill(empty, torch.nan).to(dtype), gap.to(dtype))


def _relative_logits(gamma: Tensor, bias: Tensor | None, y: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """(gamma, bias) less their entries for the right word, so that the loss is a log-sum-exp (Eq. 34).

    In double precision: in float32 a gap below 1e-6 is lost in the rounding of the logits.
    """
    gamma = gamma.detach().double().masked_fill(~seen.unsqueeze(2), 0)
    if gamma.isnan().any() or (bias is not None and bias.isnan().any()):
        raise ValueError("gamma or bias holds a NaN at a visible position; there is no optimum")
    fixed = gamma.new_zeros(len(gamma), gamma.shape[2]) if bias is None else bias.detach().double()
    right = y.view(-1, 1, 1).expand(-1, gamma.shape[1], 1)
    return gamma - gamma.gather(2, right), fixed - fixed.gather(1, y.unsqueeze(1))


def _minimise(
    alpha: Tensor, gamma: Tensor, fixed: Tensor, seen: Tensor, *, tolerance: float, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(alpha, its loss, its gradient) by accelerated projected gradient, each row with its own rate and momentum."""
    ahead, momentum = alpha, gamma.new_ones(len(alpha), 1)
    rate = torch.ones_like(momentum)
    nll, slope = _loss(alpha, gamma, fixed)
    for _ in range(steps):
        if not (_gap(alpha, slope, seen) > tolerance).any():
            break
        at, down = _loss(ahead, gamma, fixed)
        step = _project(ahead - rate * down, seen)
        moved = step - ahead
        new, new_slope = _loss(step, gamma, fixed)
        bound = at + (down * moved).sum(1) + moved.square().sum(1) / (2 * rate.squeeze(1))
        # At the optimum both sides are equal, up to rounding.
        slack = 8 * torch.finfo(at.dtype).eps * at.abs().clamp_min(1)
        worse = (new > nll + slack).unsqueeze(1)
        too_long = (new > bound + slack).unsqueeze(1) | (worse & (momentum == 1))
        taken = ~(too_long | worse)
        # A step that is too long is repeated with half the rate; one that climbs restarts without momentum.
        rate = torch.where(too_long, rate / 2, rate * 1.05)
        after = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        ahead = torch.where(taken, step + (momentum - 1) / after * (step - alpha), torch.where(too_long, ahead, alpha))
        momentum = torch.where(taken, after, torch.where(too_long, momentum, torch.ones_like(momentum)))
        alpha, slope = torch.where(taken, step, alpha), torch.where(taken, new_slope, slope)
        nll = torch.where(taken.squeeze(1), new, nll)
    return alpha, nll, slope


def _loss(alpha: Tensor, gamma: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row and its gradient in alpha."""
    logits = torch.einsum("rk,rkv->rv", alpha, gamma) + fixed
    return logits.logsumexp(1), torch.einsum("rkv,rv->rk", gamma, logits.softmax(1))


def _gap(alpha: Tensor, slope: Tensor, seen: Tensor) -> Tensor:
    """<slope, alpha> - min slope bounds loss - optimum from above, by convexity (Frank-Wolfe's gap)."""
    least = slope.masked_fill(~seen, torch.inf).amin(1) if slope.shape[1] else slope.new_zeros(len(slope))
    return ((alpha * slope).sum(1) - least.masked_fill(~seen.any(1), 0)).clamp_min(0)


def _project(x: Tensor, seen: Tensor) -> Tensor:
    """The nearest point of the simplex over each row's visible positions (Duchi et al., 2008)."""
    x = x.masked_fill(~seen, -torch.inf)
    high = x.sort(1, descending=True).values
    rank = torch.arange(1, x.shape[1] + 1, device=x.device)
    excess = (high.masked_fill(high == -torch.inf, 0).cumsum(1) - 1) / rank
    support = ((high > excess) & (high > -torch.inf)).sum(1, keepdim=True).clamp_min(1)
    return (x - excess.gather(1, support - 1)).clamp_min(0) * seen
