"""The projection of every head in one go: one Cholesky factorisation each, and no wait for the device on the way.

A batch of padded inputs has heads with more visible keys than dimensions, which need a basis of their values' columns,
and heads with at most as many, where independent values make W_perp = W. Either is decided by a matrix of e x e, V^T V
or V V^T over the visible keys, so one batch of factorisations serves both. What it cannot prove is said in
``doubtful``, for the careful way to decide.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.mechanisms._projection import SAFE_CONDITION, first_visible, independence_limit
from attnlab.shapes import Bool, Float, Int

__all__ = ["project_at_once"]


def project_at_once(
    w: Float[Tensor, "b g r k"], v: Float[Tensor, "b g k e"], seen: Bool[Tensor, "b 1 k"] | None
) -> tuple[Float[Tensor, "b g r k"], Int[Tensor, "b g"], Bool[Tensor, "b g"], Bool[Tensor, "b g"]]:
    """(W_perp, rank, trivial, doubtful) of weights and values that are zero at hidden keys.

    Where ``doubtful``, the others mean nothing. No gradient reaches ``v``.
    """
    b, g, k, e = v.shape
    x = v.detach().double()
    count = torch.full((b, g), k, device=v.device) if seen is None else seen.sum(-1).expand(b, g)
    if k <= e:
        gram = x @ x.mT
        size = _trace(gram)
        _, sound = _whitening(_with_hidden(gram, seen, size), size, independence_limit(v.dtype, max(k, e)))
        return w, count, sound, ~sound
    gram = x.mT @ x
    size = _trace(gram)
    limit: Tensor | float = SAFE_CONDITION
    if seen is not None:
        short = count <= e
        first, exists, _ = first_visible(x, seen, e)
        gram = torch.where(short[..., None, None], _with_hidden(first @ first.mT, exists, size), gram)
        limit = torch.where(short, independence_limit(v.dtype, max(k, e)), SAFE_CONDITION)
    whiten, sound = _whitening(gram, size, limit)
    columns = (x @ whiten).to(w.dtype)
    found = (w @ columns) @ columns.mT
    if seen is None:
        return found, torch.full_like(count, e), torch.zeros_like(sound), ~sound
    trivial = short & sound
    return torch.where(trivial[..., None, None], w, found), count.clamp(max=e), trivial, ~sound


def _trace(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).sum(-1)


def _with_hidden(gram: Tensor, exists: Tensor | None, size: Tensor) -> Tensor:
    """V V^T in which a key that is not there has a direction of its own, of the size of the others."""
    if exists is None:
        return gram
    return gram + torch.diag_embed((~exists).double() * torch.where(size > 0, size, 1)[..., None])


def _whitening(gram: Tensor, size: Tensor, limit: Tensor | float) -> tuple[Tensor, Tensor]:
    """(L^-T with L L^T the Gram matrix, whether a bound on the condition number of the values is below ``limit``)."""
    factor, info = torch.linalg.cholesky_ex(gram)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
    inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
    condition = size.sqrt() * torch.linalg.vector_norm(inverse, dim=(-1, -2))
    return inverse.mT, (info == 0) & (condition < limit)
