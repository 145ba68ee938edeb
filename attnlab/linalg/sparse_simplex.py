"""min |o - sum_i beta_i v_i|^2 over distributions beta on at most r of the points: greedy growth and swaps, batched.

The problem is a cardinality-constrained least squares on the simplex (OVA, section 3, leaves 1 < r < d + 1 open). The
solution for r starts from the one for r - 1, so the error never grows with r; it also starts from the r points
of largest alpha, so it is never worse than those weighted best; then single swaps improve it. On a given support the
weights are exact: Wolfe's active set (1976) on the Gram matrix of v_i - o, in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnlab.chunks import chunk_budget
from attnlab.shapes import Bool, Float, Int

__all__ = ["sparse_simplex"]

# Supports of up to SMALL points are searched by full sweeps of swaps, in chains that start from the nearest and the
# heaviest points; larger supports swap one point.
SMALL, SWEEPS = 4, 2
# Points tried at each growth or swap.
CANDIDATES = 3
# Rows that see more keys than this are searched with less effort.
CROWD = 64
# With fewer points than this many times those that get a closer look, products are made with all.
ALL_PRODUCTS = 16
# Chains times keys that are held at once, at some 60 bytes each.
CPU_PAIRS, GPU_PAIRS = 1 << 19, 1 << 27


class _Effort(NamedTuple):
    """Chains from the nearest and from the heaviest points, and how many points get a closer look at each slot."""

    chains: int
    promising: int


EFFORT, EFFORT_CROWDED = _Effort(chains=12, promising=CROWD), _Effort(chains=2, promising=16)


class _Problem(NamedTuple):
    """m problems: points (m's own group of k), targets, who may be chosen, |v_i - o|^2, how many get a closer look."""

    points: Float[Tensor, "g k e"]
    target: Float[Tensor, "g n e"]
    seen: Bool[Tensor, "g n k"]
    far: Float[Tensor, "g n k"]
    promising: int

    def repeat(self, copies: int) -> _Problem:
        """Every problem ``copies`` times, side by side."""
        target, seen, far = (t.repeat_interleave(copies, 1) for t in (self.target, self.seen, self.far))
        return _Problem(self.points, target, seen, far, self.promising)


class _Solution(NamedTuple):
    """Chosen points, which slots are filled, weights, and the squared error."""

    keys: Int[Tensor, "g n s"]
    filled: Bool[Tensor, "g n s"]
    beta: Float[Tensor, "g n s"]
    error: Float[Tensor, "g n"]


@torch.no_grad()
def sparse_simplex(
    target: Float[Tensor, "g n e"],
    points: Float[Tensor, "g k e"],
    seen: Bool[Tensor, "g n k"],
    alpha: Float[Tensor, "g n k"],
    r: int,
    *,
    on_estimate: Callable[[float], None] | None = None,
) -> tuple[Int[Tensor, "g n r"], Float[Tensor, "g n r"]]:
    """Keys and weights of the best combination found on r points; rows with nothing to see have weights of zero.

    After each part of the search ``on_estimate`` is called with the seconds that the whole is likely to take.
    """
    keys = torch.zeros(*target.shape[:2], r, dtype=torch.long, device=target.device)
    beta = torch.zeros(*target.shape[:2], r, dtype=torch.float64, device=target.device)
    crowded = seen.sum(-1) > CROWD
    limit = CPU_PAIRS if target.device.type == "cpu" else GPU_PAIRS
    efforts = ((crowded, EFFORT_CROWDED), (~crowded, EFFORT))
    work = sum(int(rows.any(0).sum()) * effort.chains for rows, effort in efforts)
    start, done = time.perf_counter(), 0
    # A row's effort depends on that row alone, whatever it shares a batch with.
    for rows, effort in efforts:
        at_once = max(1, chunk_budget(limit // (2 * effort.chains)) // max(1, points.shape[0] * points.shape[1]))
        chosen = rows.any(0).nonzero().squeeze(1)
        for columns in chosen.split(at_once) if len(chosen) else ():
            at = (slice(None), columns)
            best = _search(target[at].double(), points.double(), seen[at], alpha[at], r, effort)
            take = rows[at].unsqueeze(-1)
            keys[at] = torch.where(take, best.keys, keys[at])
            beta[at] = torch.where(take, best.beta, beta[at])
            done += len(columns) * effort.chains
            if on_estimate is not None:
                on_estimate((time.perf_counter() - start) * work / done)
    return keys, beta


def _search(target: Tensor, points: Tensor, seen: Tensor, alpha: Tensor, r: int, effort: _Effort) -> _Solution:
    far = points.square().sum(-1).unsqueeze(1) - 2 * target @ points.mT + target.square().sum(-1, keepdim=True)
    problem = _Problem(points, target, seen, far.clamp_min(0).masked_fill(~seen, torch.inf), effort.promising)
    heaviest = _first(alpha.masked_fill(~seen, -1), max(r, effort.chains), descending=True)
    nearest = _first(problem.far, effort.chains)
    best = _alone(problem, nearest[..., :1])
    # Chains keep their first point while they grow, so that their ends differ.
    # With no more points than chains, the heaviest are the nearest in another order.
    few = points.shape[1] <= effort.chains
    anchors = nearest if few else torch.cat([nearest, heaviest[..., : effort.chains]], -1)
    copies = anchors.shape[-1]
    many = problem.repeat(copies)
    chain = _alone(many, anchors.flatten(1).unsqueeze(-1))
    for size in range(2, r + 1):
        grown = _try_slot(problem, _widen(best), torch.full_like(best.keys[..., :1], size - 1))
        top = heaviest[..., :size]
        best = _better(grown, _refit(points, target, top, seen.gather(-1, top), None))
        best = _swap(problem, best)
        if size <= SMALL:
            chain = _try_slot(many, _widen(chain), torch.full_like(chain.keys[..., :1], size - 1))
            best = _better(best, _best_of(_swap(many, chain), copies))
    return best


def _first(rank: Float[Tensor, "g n k"], count: int, *, descending: bool = False) -> Int[Tensor, "g n c"]:
    """The first ``count`` in order, ties to the lowest index, without the memory of the rest."""
    return rank.sort(dim=-1, descending=descending, stable=True).indices[..., :count].clone()


def _alone(problem: _Problem, keys: Int[Tensor, "g n 1"]) -> _Solution:
    filled = problem.seen.gather(-1, keys)
    error = problem.far.gather(-1, keys).squeeze(-1)
    return _Solution(keys, filled, filled.double(), error)


def _best_of(s: _Solution, copies: int) -> _Solution:
    """The best of each problem's copies."""
    error, which = s.error.view(s.error.shape[0], -1, copies).min(-1)
    keys, filled, beta = (
        t.view(*which.shape, copies, t.shape[-1]).take_along_dim(which[..., None, None], 2).squeeze(2)
        for t in (s.keys, s.filled, s.beta)
    )
    return _Solution(keys, filled, beta, error)


def _widen(s: _Solution) -> _Solution:
    """The same solution with an empty slot at the end."""
    pad = torch.nn.functional.pad
    return _Solution(pad(s.keys, (0, 1)), pad(s.filled, (0, 1)), pad(s.beta, (0, 1)), s.error)


def _better(a: _Solution, b: _Solution) -> _Solution:
    take = (b.error < a.error).unsqueeze(-1)
    return _Solution(
        torch.where(take, b.keys, a.keys),
        torch.where(take, b.filled, a.filled),
        torch.where(take, b.beta, a.beta),
        torch.minimum(a.error, b.error),
    )


def _swap(problem: _Problem, s: _Solution) -> _Solution:
    size = s.keys.shape[-1]
    if size > SMALL:
        return _try_slot(problem, s, s.beta.masked_fill(~s.filled, -1).argmin(-1, keepdim=True))
    for _ in range(SWEEPS):
        before = s.error
        for slot in range(size):
            s = _try_slot(problem, s, torch.full_like(s.keys[..., :1], slot))
        if not (s.error < before).any():
            break
    return s


def _try_slot(problem: _Problem, s: _Solution, slot: Int[Tensor, "g n 1"]) -> _Solution:
    """The best of ``s`` and of its copies with another point in one slot; the points tried promise most on a line."""
    without = s.filled.scatter(-1, slot, False)
    rest = _refit(problem.points, problem.target, s.keys, without, s.beta)
    gain = _gain(problem, rest)
    gain = gain.scatter_reduce(-1, s.keys, torch.where(s.filled, -1.0, torch.inf).double(), "amin")
    tried = min(CANDIDATES, gain.shape[-1])
    if s.keys.shape[-1] > SMALL:
        promise, keys = gain.topk(tried, dim=-1)
    elif gain.shape[-1] <= problem.promising:
        promise, keys = _with_whole_support(problem, rest, None, gain).topk(tried, dim=-1)
    else:
        gain, some = gain.topk(problem.promising, dim=-1)
        promise, place = _with_whole_support(problem, rest, some, gain).topk(tried, dim=-1)
        keys = some.gather(-1, place)

    at, chosen, filled, target, beta = (
        t.repeat_interleave(tried, 1) for t in (slot, s.keys, without, problem.target, rest.beta)
    )
    chosen = chosen.scatter(-1, at, keys.flatten(1).unsqueeze(-1))
    filled = filled.scatter(-1, at, (promise > 0).flatten(1).unsqueeze(-1))
    return _better(s, _best_of(_refit(problem.points, target, chosen, filled, beta), tried))


def _gain(problem: _Problem, s: _Solution) -> Float[Tensor, "g n k"]:
    """How much the squared error falls on the way from the solution to each point; -1 where none may go."""
    x = _residual(problem, s)
    square = x.square().sum(-1, keepdim=True)
    toward = x @ problem.points.mT - (x * problem.target).sum(-1, keepdim=True)
    fall, length = square - toward, square - 2 * toward + problem.far
    t = (fall / length.clamp_min(1e-300)).clamp(0, 1)
    gain = 2 * t * fall - t.square() * length
    # With nothing chosen yet, the gain of a point is how near it is.
    alone = problem.far.masked_fill(~problem.seen, 0).amax(-1, keepdim=True) + 1 - problem.far
    gain = torch.where(s.filled.any(-1, keepdim=True), gain, alone)
    return gain.masked_fill(~problem.seen, -1)


def _with_whole_support(
    problem: _Problem, s: _Solution, keys: Int[Tensor, "g n m"] | None, gain: Float[Tensor, "g n m"]
) -> Float[Tensor, "g n m"]:
    """``gain`` of these keys (None: all), or more: the fall with the best weights on the support and the point.

    Where these are not all positive, ``gain`` stands.

    With C = K + s 11^T bordered by one point, min y^T C y = 1 / 1^T C^-1 1 by Schur's complement.
    """
    active = s.beta > 0
    m = _chosen(problem.points, problem.target, s.keys).masked_fill(~active.unsqueeze(-1), 0)
    scale = problem.far.masked_fill(~problem.seen, 0).amax(-1)[..., None, None].clamp_min(1e-300)
    ones = active.double().unsqueeze(-1)
    eye = torch.eye(m.shape[-2], dtype=m.dtype, device=m.device)
    system = m @ m.mT / scale + ones * ones.mT + torch.where(active, 1e-13, 1.0).unsqueeze(-1) * eye
    far, border = _far_and_border(problem, m, keys)
    border = border / scale + ones
    solved = _solve(system, torch.cat([ones, border], -1))
    one, border_solved = solved[..., :1], solved[..., 1:]
    corner = far / scale.squeeze(-1) + 1 - (border * border_solved).sum(-2)
    weight = (1 - border_solved.sum(-2)) / corner.clamp_min(1e-13)
    old = one - border_solved * weight.unsqueeze(-2)
    total = old.sum(-2) + weight
    feasible = (weight > 0) & (total > 0) & ((old > 0) | ~active.unsqueeze(-1)).all(-2) & (gain >= 0)
    error = ((1 / total - 1) * scale.squeeze(-1)).clamp_min(0)
    square = _residual(problem, s).square().sum(-1, keepdim=True)
    better = torch.maximum(gain, square - error)
    return torch.where(feasible & s.filled.any(-1, keepdim=True), better, gain)


def _far_and_border(
    problem: _Problem, m: Float[Tensor, "g n s e"], keys: Int[Tensor, "g n m"] | None
) -> tuple[Float[Tensor, "g n m"], Float[Tensor, "g n s m"]]:
    """|v_j - o|^2 and the products of v_j - o with the support's rows of ``m``, for these keys j (None: all)."""
    if keys is not None and keys.shape[-1] * ALL_PRODUCTS < problem.points.shape[1]:
        new = _chosen(problem.points, problem.target, keys)
        return new.square().sum(-1), m @ new.mT
    # Products with all points are one matrix product; copying the chosen points for each row would take far longer.
    far = problem.far.masked_fill(~problem.seen, 0)
    products = (m.flatten(1, 2) @ problem.points.mT).unflatten(1, m.shape[1:3])
    if keys is not None:
        far = far.gather(-1, keys)
        products = products.gather(-1, keys.unsqueeze(2).expand(-1, -1, m.shape[2], -1))
    return far, products - m @ problem.target.unsqueeze(-1)


def _chosen(points: Tensor, target: Tensor, keys: Int[Tensor, "g n s"]) -> Float[Tensor, "g n s e"]:
    """v_i - o of the chosen points."""
    g = torch.arange(keys.shape[0], device=keys.device)[:, None, None]
    return points[g, keys] - target.unsqueeze(2)


def _residual(problem: _Problem, s: _Solution) -> Float[Tensor, "g n e"]:
    return (s.beta.unsqueeze(-2) @ _chosen(problem.points, problem.target, s.keys)).squeeze(-2)


def _refit(points: Tensor, target: Tensor, keys: Tensor, filled: Tensor, beta: Tensor | None) -> _Solution:
    """The best weights on the filled slots, from ``beta`` (empty slots count as zero) or from nothing."""
    m = _chosen(points, target, keys)
    gram = (m @ m.mT).flatten(0, 1)
    usable = filled.flatten(0, 1)
    start = torch.zeros_like(gram[..., 0]) if beta is None else beta.flatten(0, 1) * usable
    total = start.sum(-1, keepdim=True)
    nearest = gram.diagonal(dim1=-2, dim2=-1).masked_fill(~usable, torch.inf).argmin(-1, keepdim=True)
    alone = torch.zeros_like(start).scatter_(-1, nearest, 1) * usable
    start = torch.where(total > 0, start / total.masked_fill(total == 0, 1), alone)
    fitted = _min_norm(gram, usable, start)
    fitted = fitted.view(keys.shape)
    error = (fitted.unsqueeze(-2) @ m).squeeze(-2).square().sum(-1)
    return _Solution(keys, filled, fitted, error.masked_fill(~filled.any(-1), torch.inf))


def _min_norm(gram: Float[Tensor, "m s s"], usable: Bool[Tensor, "m s"], beta: Float[Tensor, "m s"]) -> Tensor:
    """argmin beta^T gram beta over distributions on the usable slots; every step keeps beta feasible and no worse."""
    size = gram.shape[-1]
    beta, active = beta.clone(), usable.clone()
    scale = gram.diagonal(dim1=-2, dim2=-1).masked_fill(~usable, 0).amax(-1, keepdim=True)
    todo = usable.any(-1).nonzero().squeeze(1)
    for _ in range(4 * size + 8):
        if todo.numel() == 0:
            break
        k, a, b, s = gram[todo], active[todo], beta[todo], scale[todo]
        y = _affine_minimum(k, a, s)
        negative = a & (y <= 0)
        blocked = negative.any(-1, keepdim=True)
        reach = torch.where(negative, b / (b - y).clamp_min(1e-300), torch.inf)
        step = reach.amin(-1, keepdim=True).clamp_max(1)
        leaves = negative & (reach <= step)
        b = torch.where(leaves, 0, torch.where(blocked, b + step * (y - b), y)).clamp_min(0)
        a = a & ~leaves
        slope = (k @ b.unsqueeze(-1)).squeeze(-1)
        short = ((b * slope).sum(-1, keepdim=True) - slope).masked_fill(a | ~usable[todo], -torch.inf)
        most, which = short.max(-1, keepdim=True)
        enters = ~blocked & (most > 1e-11 * s)
        a = a.scatter(-1, which, a.gather(-1, which) | enters)
        beta[todo], active[todo] = b, a
        todo = todo[(blocked | enters).squeeze(-1)]
    return beta / beta.sum(-1, keepdim=True).clamp_min(1e-300)


def _affine_minimum(k: Tensor, active: Tensor, scale: Tensor) -> Tensor:
    """argmin y^T k y with sum 1 on the active slots: y ~ (k + s 11^T)^-1 1 (Wolfe, 1976)."""
    scale = torch.where(scale > 0, scale, 1).unsqueeze(-1)
    both = active.unsqueeze(-1) & active.unsqueeze(-2)
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    system = torch.where(both, k / scale + 1, eye) + 1e-13 * eye
    y = _solve(system, active.to(k.dtype).unsqueeze(-1)).squeeze(-1)
    return y / y.sum(-1, keepdim=True)


def _solve(system: Float[Tensor, "*m s s"], right: Float[Tensor, "*m s c"]) -> Float[Tensor, "*m s c"]:
    """system^-1 right for positive definite systems: many small ones are eliminated at once, not one after another."""
    size = system.shape[-1]
    if size > 8:
        return torch.cholesky_solve(right, torch.linalg.cholesky_ex(system)[0])
    # The many lie innermost, so that every step is one long vector operation.
    both = torch.cat([system, right], -1).flatten(0, -3).permute(1, 2, 0).contiguous()
    for j in range(size):
        line = both[j, j + 1 :] / both[j, j].clamp_min(1e-15)
        both[:, j + 1 :] -= both[:, j, None] * line
        both[j, j + 1 :] = line
    return both[:, size:].permute(2, 0, 1).reshape(right.shape)
