"""Caratheodory's theorem as an algorithm: a convex combination of L points in R^e rewritten on e + 1 of them, batched.

Points are first merged into 2(e+1) clusters, whose means need only e + 1 of the clusters; the survivors are split and
merged anew, which halves the points each time (Maalouf et al., 2019). Inside, one pass over the columns of a simplex
tableau removes a column each step: float64, no loop over queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.shapes import Float

__all__ = ["caratheodory"]

# Below this, relative to the largest value, a column adds no dimension to those before it.
RANK_TOLERANCE = 1e-9
# A tableau with larger entries started from a basis too close to singular.
GROWTH = 1e6


def caratheodory(
    w: Float[Tensor, "g n k"], values: Float[Tensor, "g k e"], *, budget: int | None = None
) -> Float[Tensor, "g n k"]:
    """Weights with w' >= 0, the same sum and w' @ values == w @ values, of which at most e + 1 in a row are not zero.

    Rows of w are non-negative. A row that has at most e + 1 weights comes back as it is. Every choice inside a row
    depends on that row alone.
    """
    w, values = w.double(), values.double()
    groups, n, n_k = w.shape
    size = values.shape[-1] + 1
    if n_k <= size:
        return w
    if budget is None:
        budget = 1 << 20 if w.device.type == "cpu" else 1 << 29
    rows = ((w > 0).sum(-1) > size).reshape(-1).nonzero().squeeze(1)
    # On a CPU a block stays in the cache; the tableau of a row has 2 size x size elements.
    block = max(
        1, budget // (2 * size * max(size, -(-n_k // 2))) if w.device.type != "cpu" else budget // (2 * size**2)
    )
    out = w.reshape(-1, n_k).clone()
    for part in rows.split(block):
        out[part] = _reduce(out[part], values, part // n)
    return out.reshape(groups, n, n_k)


def _reduce(w: Tensor, points: Tensor, group: Tensor) -> Tensor:
    """Rows of w on at most ``size`` points each; ``group`` says which set of points a row combines."""
    n_k, size = points.shape[1], points.shape[2] + 1
    m = w.shape[0]
    where = torch.arange(n_k, device=w.device).expand(m, -1)
    u = w
    while u.shape[1] > size:
        clusters = min(2 * size, u.shape[1])
        deep = -(-u.shape[1] // clusters)
        short = deep * clusters - u.shape[1]
        # Key j belongs to cluster j mod clusters, so that a causal prefix fills every cluster.
        u = torch.nn.functional.pad(u, (0, short)).view(m, deep, clusters)
        where = torch.nn.functional.pad(where, (0, short)).view(m, deep, clusters)
        mass = u.sum(1)
        kept = _eliminate(_lifted(_sums(u, where, points, group), mass), mass)
        u = u * (kept / mass.masked_fill(mass == 0, 1)).unsqueeze(1)
        stay = kept.topk(size, dim=-1).indices.sort(-1).values.unsqueeze(1).expand(-1, deep, -1)
        u, where = u.gather(2, stay).flatten(1), where.gather(2, stay).flatten(1)
    return torch.zeros_like(w).scatter_add_(1, where, u)


def _sums(u: Tensor, where: Tensor, points: Tensor, group: Tensor) -> Float[Tensor, "m c e"]:
    """The weighted sum of each cluster's points."""
    total = u.new_zeros(u.shape[0], u.shape[2], points.shape[-1])
    for layer in range(u.shape[1]):
        total.addcmul_(u[:, layer].unsqueeze(-1), points[group.unsqueeze(1), where[:, layer]])
    return total


def _lifted(sums: Float[Tensor, "m c e"], mass: Float[Tensor, "m c"]) -> Float[Tensor, "m c a"]:
    """Cluster means with a 1 appended, centred and scaled by what the row itself combines; zeros for empty clusters."""
    some = (mass > 0).to(mass.dtype).unsqueeze(-1)
    centre = sums.sum(1, keepdim=True) / mass.sum(1)[:, None, None]
    means = (sums / mass.masked_fill(mass == 0, 1).unsqueeze(-1) - centre) * some
    scale = means.abs().amax((1, 2), keepdim=True)
    return torch.cat([means / scale.masked_fill(scale == 0, 1), some], -1)


def _eliminate(x: Float[Tensor, "m c a"], w: Float[Tensor, "m c"]) -> Float[Tensor, "m c"]:
    """Weights on at most a of the c points x with the same weighted sum."""
    size = x.shape[-1]
    w, order = w.sort(dim=-1, descending=True, stable=True)
    x = x[torch.arange(x.shape[0], device=x.device).unsqueeze(1), order]
    # The heaviest points are the first basis; where they are dependent, the columns are taken in one by one instead.
    tableau, info = torch.linalg.solve_ex(x[:, :size].mT, x[:, size:].mT)
    tableau = tableau.mT.contiguous()
    good = (info == 0) & (tableau.abs().amax((1, 2)) < GROWTH)
    out = torch.zeros_like(w)
    if good.any():
        rows = slice(None) if good.all() else good
        out[rows] = _sweep(tableau[rows], w[rows, size:], w[rows, :size], size)
    if not good.all():
        out[~good] = _sweep(x[~good].clone(), w[~good], None, size)
    return torch.zeros_like(w).scatter_(1, order, out)


def _sweep(tableau: Tensor, w_out: Tensor, w_in: Tensor | None, size: int) -> Tensor:
    """One pass over the columns outside the basis: each gives its weight to the basis or takes the place of one in it.

    Column j equals tableau[:, j] combined over the basis. Without ``w_in`` the basis is artificial (the unit vectors,
    without weight), and columns first take the places of those.
    """
    m, columns = w_out.shape
    at = torch.arange(m, device=tableau.device)
    artificial = None
    if w_in is None:
        w_in = tableau.new_zeros(m, size)
        artificial = torch.ones_like(w_in, dtype=torch.bool)
        ids = torch.full((m, size), -1, device=tableau.device)
        first = 0
    else:
        w_in, first = w_in.clone(), size
        ids = torch.arange(size, device=tableau.device).repeat(m, 1)
    for j in range(columns):
        c, weight = tableau[:, j], w_out[:, j]
        real = c if artificial is None else c.masked_fill(artificial, 0)
        ratio = w_in / real
        # Down: column j gives weight away, until it is empty or a member of the basis with a negative share is.
        t_down, row_down = torch.where(real < -1e-12, -ratio, torch.inf).min(-1)
        # Up: column j takes weight, until a member with a positive share is empty.
        t_up, row_up = torch.where(real > 1e-12, ratio, torch.inf).min(-1)
        empty = t_down >= weight
        # The larger pivot of the two is the one to divide by.
        down = (c[at, row_down].abs() >= c[at, row_up]) | t_up.isinf()
        step = torch.where(empty, weight, torch.where(down, t_down, -t_up))
        row = torch.where(down, row_down, row_up)
        enters = ~empty
        if artificial is not None:
            size_left, free_row = c.abs().masked_fill(~artificial, -1).max(-1)
            joins = (size_left > RANK_TOLERANCE) & (weight > 0)
            row, enters = torch.where(joins, free_row, row), (enters | joins) & (weight > 0)
            step = torch.where(joins | (weight == 0), 0, step)
            artificial[at[joins], free_row[joins]] = False
        w_in = (w_in + step.unsqueeze(-1) * real).clamp_min_(0)
        w_in[at, row] = torch.where(enters, weight - step, w_in[at, row])
        ids[at, row] = torch.where(enters, first + j, ids[at, row])
        pivot = c[at, row].unsqueeze(-1)
        rest = tableau[:, j + 1 :]
        line = rest.gather(2, row.view(-1, 1, 1).expand(-1, rest.shape[1], 1)).squeeze(2)
        line = line / torch.where(enters.unsqueeze(-1), pivot, torch.inf)
        c = c.clone()
        c[at, row] -= 1
        rest.addcmul_(line.unsqueeze(-1), c.unsqueeze(1), value=-1)
    out = w_out.new_zeros(m, first + columns + 1)
    return out.scatter_(1, ids % out.shape[1], w_in)[:, :-1]
