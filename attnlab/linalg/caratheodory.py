"""Caratheodory's theorem as an algorithm: a convex combination of L points in R^e rewritten on e + 1 of them, batched.

Points are first merged into 2(e+1) clusters, whose sums need only e + 1 of the clusters; the survivors are split and
merged anew, which halves the points each time (Maalouf et al., 2019). Which points survive is found in float32; their
weights are then solved for in float64. Rows whose weights come out negative or inexact are done again in float64, and
those that fail once more, because their points are dependent, by a slower way that any points will do for; the rounding
it gathers on its way is taken out at its end. Every row is checked. One that still differs, as may happen where points
repeat, is solved alone (``linalg.basic_solution``); if that fails too, the row keeps the weights that it came with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from attnlab.chunks import chunk_budget
from attnlab.linalg.basic_solution import basic_solution
from attnlab.linalg.tableau import Survivors, by_any_basis, by_heaviest_basis
from attnlab.shapes import Bool, Float, Int

__all__ = ["caratheodory"]

# The largest difference of a weighted sum that is accepted, relative to the largest number in it.
EXACT = 1e-13
# The same for rows with dependent points, before they are solved alone.
VERIFIED = 1e-12
# Relative to the points' largest norm: what makes products of dependent points invertible.
RIDGE = 1e-12


def caratheodory(
    w: Float[Tensor, "g n k"], values: Float[Tensor, "g k e"], *, block: int | None = None
) -> Float[Tensor, "g n k"]:
    """Weights with w' >= 0, the same sum and w' @ values == w @ values, of which at most e + 1 in a row are not zero.

    Rows of w are non-negative. A row that has at most e + 1 weights comes back as it is. Every choice inside a row
    depends on that row alone. ``block`` rows are worked on at once.
    """
    w, values = w.double(), values.double()
    groups, n, n_k = w.shape
    size = values.shape[-1] + 1
    if n_k <= size:
        return w
    if block is None:
        # On a CPU a block stays in the cache; the tableau of a row has size x size elements.
        budget = chunk_budget(1 << 20 if w.device.type == "cpu" else 1 << 27)
        block = max(1, budget // (2 * size**2 + 8 * n_k * (w.device.type != "cpu")))
    lifted = torch.cat([values, values.new_ones(groups, n_k, 1)], -1)
    sums = (w @ lifted).flatten(0, 1)
    lifted = lifted.flatten(0, 1)
    out = w.reshape(-1, n_k).clone()
    rows = ((w > 0).sum(-1) > size).reshape(-1).nonzero().squeeze(1)
    for points in (lifted.float(), lifted):
        hard = [rows[:0]]
        for part in _blocks(rows, block):
            first = part // n * n_k
            keys, _ = _survivors(out[part].to(points.dtype), points, first, by_heaviest_basis)
            beta, good = _solved(lifted[keys], sums[part], out[part].gather(1, keys - first.unsqueeze(1)) > 0)
            hard.append(part[~good])
            _write(out, part[good], (keys - first.unsqueeze(1))[good], beta[good])
        rows = torch.cat(hard)
    for part in _blocks(rows, block):
        first = part // n * n_k
        keys, beta = _survivors(out[part], lifted, first, by_any_basis)
        beta = _corrected(beta, lifted[keys], sums[part])
        good = _off(beta, lifted[keys], sums[part]) <= VERIFIED * lifted[keys].abs().amax((1, 2))
        _write(out, part[good], (keys - first.unsqueeze(1))[good], beta[good])
        for row in part[~good].tolist():
            _solve_alone(out[row], lifted[row // n * n_k : row // n * n_k + n_k])
    return out.reshape(groups, n, n_k)


def _solve_alone(w: Float[Tensor, " k"], points: Float[Tensor, "k a"]) -> None:
    """Rewrite one row's weights in place; they stay as they are if no exact ones are found."""
    used = (w > 0).nonzero().squeeze(1)
    # Largest number 1, so that coordinates weigh alike in a least-squares step.
    scale = points[used].abs().amax(0).clamp_min(torch.finfo(points.dtype).tiny)
    scaled = (points[used] / scale).cpu()
    total = w[used].cpu() @ scaled
    beta = basic_solution(scaled, total, tolerance=VERIFIED * float(w.sum()))
    if beta is not None:
        w.zero_()[used] = beta.to(w.device)


def _blocks(rows: Int[Tensor, " m"], block: int) -> tuple[Tensor, ...]:
    """``block`` rows at a time, and nothing where there are none: an empty block would go through every step."""
    return rows.split(block) if len(rows) else ()


def _write(out: Tensor, rows: Tensor, keys: Tensor, beta: Tensor) -> None:
    out[rows] = out.new_zeros(len(rows), out.shape[1]).scatter_add_(1, keys, beta)


def _survivors(
    w: Float[Tensor, "m k"],
    points: Float[Tensor, "p a"],
    first: Int[Tensor, " m"],
    eliminate: Callable[[Tensor], Survivors],
) -> tuple[Int[Tensor, "m a"], Float[Tensor, "m a"]]:
    """The at most ``a`` points that carry each row, and their weights; a row's k points start at ``first``."""
    m, size = w.shape[0], points.shape[-1]
    keys = first.unsqueeze(1) + torch.arange(w.shape[1], device=w.device)
    while w.shape[1] > size:
        # Heaviest first, so that the first clusters are the heaviest and hidden keys fill the last ones.
        w, order = w.sort(dim=-1, descending=True, stable=True)
        keys = keys.gather(1, order)
        clusters = min(2 * size, w.shape[1])
        deep = -(-w.shape[1] // clusters)
        short = deep * clusters - w.shape[1]
        w = pad(w, (0, short)).view(m, deep, clusters)
        keys = torch.cat([keys, first.unsqueeze(1).expand(-1, short)], 1).view(m, deep, clusters)
        sums = embedding_bag(keys.mT.reshape(-1, deep), points, per_sample_weights=w.mT.reshape(-1, deep), mode="sum")
        left = eliminate(sums.view(m, clusters, size))
        stay = left.which.unsqueeze(1).expand(-1, deep, -1)
        w = (w.gather(2, stay) * left.share.unsqueeze(1)).flatten(1)
        keys = keys.gather(2, stay).flatten(1)
    return keys, w


def _solved(
    chosen: Float[Tensor, "m a a"], sums: Float[Tensor, "m a"], weighed: Bool[Tensor, "m a"]
) -> tuple[Float[Tensor, "m a"], Bool[Tensor, " m"]]:
    """Non-negative weights of the chosen points, none on those not ``weighed`` before; and whether they give the sums.

    Points without weight are chosen where a row has few others; rounding would give them some.
    """
    beta, _ = torch.linalg.solve_ex(chosen, sums.unsqueeze(1), left=False)
    beta = beta.squeeze(1).clamp_min(0).masked_fill(~weighed, 0)
    # Not-a-number compares as false.
    return beta, _off(beta, chosen, sums) <= EXACT * chosen.abs().amax((1, 2))


def _off(beta: Float[Tensor, "m a"], chosen: Float[Tensor, "m a a"], sums: Float[Tensor, "m a"]) -> Float[Tensor, " m"]:
    """The largest difference between what the weights sum up to and what they should."""
    return ((beta.unsqueeze(1) @ chosen).squeeze(1) - sums).abs().amax(-1)


def _corrected(
    beta: Float[Tensor, "m a"], chosen: Float[Tensor, "m a a"], sums: Float[Tensor, "m a"]
) -> Float[Tensor, "m a"]:
    """The weights moved by the least that gives the sums, where that brings them nearer; none that is zero moves."""
    held = chosen * (beta > 0).unsqueeze(2)
    products = held.mT @ held
    ridge = RIDGE * products.diagonal(dim1=1, dim2=2).amax(1)
    factor, _ = torch.linalg.cholesky_ex(products + torch.diag_embed(ridge.unsqueeze(1).expand_as(sums)))
    off = sums - (beta.unsqueeze(1) @ chosen).squeeze(1)
    moved = (beta + (held @ torch.cholesky_solve(off.unsqueeze(2), factor)).squeeze(2)).clamp_min(0)
    left = sums - (moved.unsqueeze(1) @ chosen).squeeze(1)
    nearer = left.abs().amax(1, keepdim=True) < off.abs().amax(1, keepdim=True)
    return torch.where(nearer, moved, beta)
