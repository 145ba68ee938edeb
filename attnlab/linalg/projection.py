"""Orthonormal bases of what values can express: the columns of V restricted to the keys that may be seen.

The projection of W on the column space of V is W_perp = W V (V^T V)^+ V^T, the effective attention of Sun and Marasović
(2021). Here it is (W B) B^T with B = V R orthonormal, which in float32 loses no digits to the conditioning of V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.chunks import chunk_budget
from attnlab.shapes import Bool, Float, Int

__all__ = [
    "SAFE_CONDITION",
    "Basis",
    "column_basis",
    "first_visible",
    "gathered_rows",
    "gram_factor",
    "independence_limit",
    "independent_rows",
    "project",
    "project_rows",
    "quick_columns",
    "whitened",
]

# V^T V squares the condition number: up to this one, V R is orthonormal to 1e-7 when computed in float64.
SAFE_CONDITION = 3e4
# Up to these float32 is as good: how far its columns were from orthonormal before the step that makes them so, and the
# condition number, by which rounding of V R is amplified.
QUICK_ERROR, QUICK_CONDITION = 1e-3, 1e3
# Elements of values gathered at once where every query has its own set of keys.
ROWS_BUDGET = 1 << 22


@dataclass(frozen=True, eq=False)
class Basis:
    """``columns = V @ whiten`` are orthonormal, or zero beyond ``rank``; ``count`` keys are visible."""

    columns: Float[Tensor, "b g k e"]
    whiten: Float[Tensor, "b g e e"]
    rank: Int[Tensor, "b g"]
    count: Int[Tensor, "b g"]

    @property
    def trivial(self) -> Bool[Tensor, "b g"]:
        """No vector but zero is invisible to the values: W_perp = W."""
        return self.count <= self.rank


def column_basis(
    v: Float[Tensor, "b g k e"], seen: Bool[Tensor, "b ... k"] | None = None, *, rtol: float | None = None
) -> Basis:
    """A basis of the column space of each head's visible values, with singular values below rtol * largest left out.

    Gram matrix and Cholesky in float64; only heads that this cannot prove well-conditioned pay for a decomposition.
    """
    b, g, k, e = v.shape
    if seen is not None:
        v = v.masked_fill(~seen[..., None], 0)
        count = seen.sum(-1).expand(b, g)
    else:
        count = torch.full((b, g), k, device=v.device)
    refine = v.dtype == torch.float64 or (torch.is_grad_enabled() and v.requires_grad)
    columns, whiten, condition = _cholesky_coordinates(v.detach().double())
    columns = columns.to(_working(v))
    rank = torch.full((b, g), e, device=v.device)
    doubtful = ~(condition < SAFE_CONDITION)
    if bool(doubtful.any()):
        refine = True
        whiten = whiten.clone()
        at = doubtful.nonzero(as_tuple=True)
        whiten[at], rank[at] = _singular_coordinates(v.detach()[at], count[at], rtol)
    if refine:
        columns = _orthonormalised(whitened(v, whiten), rank).to(_working(v))
    return Basis(columns, whiten, rank, count)


def project(
    w: Float[Tensor, "b g r k"],
    v: Float[Tensor, "b g k e"],
    seen: Bool[Tensor, "b ... k"] | None = None,
    *,
    rtol: float | None = None,
    clean: bool = False,
) -> tuple[Float[Tensor, "b g r k"], Int[Tensor, "b g"], Bool[Tensor, "b g"]]:
    """(W_perp, rank, trivial) where all rows of a head see the same keys; a trivial head's W comes back untouched.

    ``clean`` promises that weights and values are zero at hidden keys.
    """
    if rtol is None:
        from attnlab.linalg._projection_gpu import project_on_gpu, supports_gpu_projection

        if supports_gpu_projection(w, v):
            projected, rank, trivial, doubtful = project_on_gpu(w, v, seen)
            if not bool(doubtful.any()):
                return projected, rank, trivial
            at = doubtful.any(1).nonzero()[:, 0]
            parts = _project_carefully(w[at], v[at], None if seen is None else seen[at], rtol, clean)
            whole = zip((projected, rank, trivial), parts, strict=True)
            projected, rank, trivial = (t.index_copy(0, at, part) for t, part in whole)
            return projected, rank, trivial
    return _project_carefully(w, v, seen, rtol, clean)


def _project_carefully(
    w: Tensor, v: Tensor, seen: Tensor | None, rtol: float | None, clean: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if seen is None and v.shape[2] > v.shape[3]:
        return _projected(w, v, None, rtol)
    if seen is None:
        seen = torch.ones(v.shape[0], 1, v.shape[2], dtype=torch.bool, device=v.device)
    elif not clean:
        w, v = w.masked_fill(~seen[:, :, None], 0), v.masked_fill(~seen[..., None], 0)
    count = seen.sum(-1).expand(v.shape[:2])
    # At most e keys: if their values are independent, nothing is invisible, and no decomposition is needed.
    short = (count <= v.shape[-1]).all(1)
    trivial = torch.zeros(v.shape[:2], dtype=torch.bool, device=v.device)
    if bool(short.any()):
        trivial[short] = independent_rows(*first_visible(v[short], seen[short], v.shape[-1])[:2], rtol=rtol)
    rest = ~trivial.all(1)
    if not bool(rest.any()):
        return w, count, trivial
    if bool(rest.all()):
        return _projected(w, v, seen, rtol)
    at = rest.nonzero()[:, 0]
    part, rank_part, trivial_part = _projected(w[at], v[at], seen[at], rtol)
    return (
        w.index_copy(0, at, part),
        count.index_copy(0, at, rank_part),
        trivial.index_copy(0, at, trivial_part),
    )


def gathered_rows(
    v: Float[Tensor, "b g k e"], seen: Bool[Tensor, "b g q k"], rows: tuple[Tensor, ...]
) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor], Int[Tensor, "p c"], Bool[Tensor, "p c"], Float[Tensor, "p c e"]]]:
    """The given (batch, head, query) rows in chunks: (rows, visible keys, which of them exist, their values)."""
    size = max(1, chunk_budget(ROWS_BUDGET) // max(1, v.shape[2] * v.shape[3]))
    for bi, gi, qi in zip(*(t.split(size) for t in rows), strict=True):
        row = seen[bi, gi, qi]
        order = torch.argsort(~row, dim=-1, stable=True)[:, : max(1, int(row.sum(-1).max()))]
        yield (bi, gi, qi), order, row.gather(-1, order), v[bi[:, None], gi[:, None], order]


def project_rows(
    w: Float[Tensor, "b g r q k"],
    v: Float[Tensor, "b g k e"],
    seen: Bool[Tensor, "b g q k"],
    rows: tuple[Tensor, ...],
    into: tuple[Float[Tensor, "b g r q k"], Int[Tensor, "b g q"], Bool[Tensor, "b g q"]],
    *,
    rtol: float | None = None,
) -> None:
    """``project`` for rows that each have their own set of keys, written into (W_perp, rank, trivial)."""
    out, rank, trivial = into
    for (b, g, q), keys, exists, values in gathered_rows(v, seen, rows):
        at = keys[:, None].expand(-1, w.shape[2], -1)
        part = w[b, g, :, q].gather(-1, at)[:, None]
        projected, part_rank, part_trivial = project(part, values[:, None], exists[:, None], rtol=rtol)
        rank[b, g, q], trivial[b, g, q] = part_rank[:, 0], part_trivial[:, 0]
        out[b, g, :, q] = torch.zeros_like(w[b, g, :, q]).scatter(-1, at, projected[:, 0])


def whitened(v: Float[Tensor, "*b k e"], whiten: Float[Tensor, "*b e e"]) -> Float[Tensor, "*b k e"]:
    """V R in float64: coordinates in which the Gram matrix of all visible values is the identity."""
    return v.double() @ whiten


def relative_threshold(dtype: torch.dtype, n: int) -> float:
    """The default rtol: rounding of float32 values (half precision is exact in float32), or of float64 arithmetic."""
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return max(16 * eps, n * torch.finfo(torch.float64).eps)


def independence_limit(dtype: torch.dtype, n: int, *, rtol: float | None = None) -> float:
    """Values with a condition number below this are linearly independent in spite of their rounding."""
    return 1 / max(rtol or relative_threshold(dtype, n), 1e-6)


def _singular_coordinates(
    v: Float[Tensor, "p k e"], count: Int[Tensor, " p"], rtol: float | None
) -> tuple[Float[Tensor, "p e e"], Int[Tensor, " p"]]:
    """(R, rank) with V R orthonormal in its first columns and zero in the others, from singular values and vectors."""
    x = v.double()
    if not bool(torch.isfinite(x).all()):
        raise ValueError(
            "values hold NaN or infinity at a visible key; hide that key, or find where the model overflows"
        )
    if rtol is None:
        rtol = relative_threshold(v.dtype, max(v.shape[1:]))
    if v.dtype == torch.float64:
        # The Gram matrix would lose half of float64's digits; a square factor of V keeps them.
        _, sigma, directions = torch.linalg.svd(torch.linalg.qr(x, mode="r")[1], full_matrices=False)
        directions = directions.mT
    else:
        lam, directions = torch.linalg.eigh(x.mT @ x)
        sigma, directions = lam.clamp(min=0).sqrt().flip(-1), directions.flip(-1)
    kept = (sigma > rtol * sigma[:, :1]) & (torch.arange(sigma.shape[-1], device=v.device) < count[:, None])
    whiten = directions * torch.where(kept, 1 / sigma.masked_fill(~kept, 1), 0)[:, None]
    if whiten.shape[-1] < v.shape[-1]:
        whiten = torch.nn.functional.pad(whiten, (0, v.shape[-1] - whiten.shape[-1]))
    return whiten, kept.sum(-1)


def independent_rows(
    v: Float[Tensor, "b g k e"], seen: Bool[Tensor, "b ... k"], *, rtol: float | None = None
) -> Bool[Tensor, "b g"]:
    """Whether visible values are provably linearly independent: then so are those of every subset of keys."""
    x = v.detach().masked_fill(~seen[..., None], 0).double()
    # A hidden key gets a direction of its own, of the size of the others.
    size = x.square().sum((-1, -2)).clamp(min=torch.finfo(torch.float64).tiny)
    gram = x @ x.mT + torch.diag_embed((~seen).double() * size[..., None])
    factor, info = torch.linalg.cholesky_ex(gram)
    inverse = torch.linalg.solve_triangular(factor, _eye(gram), upper=False)
    condition = size.sqrt() * torch.linalg.vector_norm(inverse, dim=(-1, -2))
    return (info == 0) & (condition < independence_limit(v.dtype, max(v.shape[2:]), rtol=rtol))


def first_visible(
    v: Float[Tensor, "b g k e"], seen: Bool[Tensor, "b ... k"], n: int
) -> tuple[Float[Tensor, "b g n e"], Bool[Tensor, "b ... n"], Int[Tensor, "b ... n"]]:
    """The first n visible keys of each head: their values, which of the n exist, and where they were."""
    order = torch.argsort(~seen, dim=-1, stable=True)[..., :n]
    at = order.expand(*v.shape[:2], order.shape[-1])[..., None].expand(-1, -1, -1, v.shape[-1])
    return v.gather(2, at), seen.gather(-1, order), order


def _projected(w: Tensor, v: Tensor, seen: Tensor | None, rtol: float | None) -> tuple[Tensor, Tensor, Tensor]:
    if v.dtype == torch.float64 or (torch.is_grad_enabled() and v.requires_grad):
        basis = column_basis(v, seen, rtol=rtol)
        columns, rank, trivial = basis.columns, basis.rank, basis.trivial
    else:
        columns, rank, trivial = quick_columns(v, seen, rtol=rtol)
    columns = columns.to(w.dtype)
    out = (w @ columns) @ columns.mT
    if bool(trivial.any()):
        out = torch.where(trivial[..., None, None], w, out)
    return out, rank, trivial


def quick_columns(
    v: Float[Tensor, "b g k e"], seen: Bool[Tensor, "b ... k"] | None = None, *, rtol: float | None = None
) -> tuple[Float[Tensor, "b g k e"], Int[Tensor, "b g"], Bool[Tensor, "b g"]]:
    """(columns, rank, trivial) of ``column_basis`` in float32, with one step that corrects it; float64 where needed.

    ``v`` is zero at hidden keys.

    With B^T B = I + E, B (I - E/2) is orthonormal to E^2, and E says what the squared condition number has cost.
    """
    b, g, k, e = v.shape
    columns, _, condition = _cholesky_coordinates(v.float())
    flat = columns.flatten(0, 1)
    error = flat.mT @ flat
    error.diagonal(dim1=-2, dim2=-1).sub_(1)
    columns = torch.baddbmm(flat, flat, error, alpha=-0.5).view_as(columns)
    lost = torch.linalg.vector_norm(error, dim=(-1, -2)).view(b, g)
    count = torch.full((b, g), k, device=v.device) if seen is None else seen.sum(-1).expand(b, g)
    rank, trivial = torch.full_like(count, e), count <= e
    doubtful = ~((lost < QUICK_ERROR) & (condition < QUICK_CONDITION) & ~trivial)
    if bool(doubtful.any()):
        at = doubtful.nonzero(as_tuple=True)
        shown = None if seen is None else seen.expand(b, g, k)[at][:, None]
        basis = column_basis(v[at][:, None], shown, rtol=rtol)
        columns[at], rank[at], trivial[at] = basis.columns[:, 0], basis.rank[:, 0], basis.trivial[:, 0]
    return columns, rank, trivial


def _cholesky_coordinates(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(X R, R, a bound on the condition number of X) with R = L^-T, L L^T = X^T X; not finite where Cholesky fails."""
    gram, factor, info = gram_factor(x)
    whiten = torch.linalg.solve_triangular(factor.mT, _eye(factor), upper=False).mT
    # |X|_F |R|_F lies between cond(X) and e cond(X).
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
    condition = size * torch.linalg.vector_norm(whiten, dim=(-1, -2))
    return x @ whiten, whiten, condition.masked_fill(info != 0, torch.inf)


def gram_factor(x: Float[Tensor, "*b k e"]) -> tuple[Float[Tensor, "*b e e"], Float[Tensor, "*b e e"], Tensor]:
    """(X^T X, its upper Cholesky factor, 0 where there is one): the decomposition that stands in for the SVD."""
    gram = x.mT @ x
    # The upper factor, transposed, lies in memory as LAPACK wants it: no copies.
    factor, info = torch.linalg.cholesky_ex(gram, upper=True)
    return gram, factor, info


def _orthonormalised(columns: Tensor, rank: Tensor) -> Tensor:
    """Nearly orthonormal columns made so; this is also where a gradient flows to the values."""
    dropped = torch.arange(columns.shape[-1], device=columns.device) >= rank[..., None]
    factor = torch.linalg.cholesky(columns.mT @ columns + torch.diag_embed(dropped.double()))
    return torch.linalg.solve_triangular(factor, columns.mT, upper=False).mT


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)


def _working(v: Tensor) -> torch.dtype:
    return torch.promote_types(v.dtype, torch.float32)
