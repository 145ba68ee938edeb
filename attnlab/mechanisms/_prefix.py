"""Causal effective attention: row i projected on the column space of V[:i+1], all rows for the price of a few blocks.

Within a block of queries, G_i = G_end - U^T U: the Gram matrix of the block's last prefix less the keys after i. With
M = V R_end whitened by it, G_i^-1 = R_end (I + M_U^T (I - M_U M_U^T)^-1 M_U) R_end^T (Woodbury), and the leading
truncations of one Cholesky factor, taken over the block's keys from last to first, serve every row. The sum has no
cancellation, so a row is as accurate as its own prefix allows, however ill-conditioned the prefixes before it were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.mechanisms._projection import (
    Basis,
    column_basis,
    first_visible,
    gathered_rows,
    independent_rows,
    project_rows,
    whitened,
)
from attnlab.shapes import Bool, Float, Int

__all__ = ["Prefixes", "prefix_coefficients", "prefix_map", "prefixes"]

BLOCK = 64
# A pivot of I - M_U M_U^T is the share of a direction that the shorter prefix keeps: below this float64 is not enough.
SAFE_PIVOT = 1e-9
# A prefix is whitened relative to the whole sequence; this norm of the whitening still leaves ten digits.
SAFE_NORM = 1e5


@dataclass(frozen=True, eq=False)
class Prefixes:
    """Values whitened by the whole sequence, and what each query sees of them."""

    x: Float[Tensor, "b g k e"]
    basis: Basis
    seen: Bool[Tensor, "b k"]
    # Visible keys up to each key, and up to each query.
    key_count: Int[Tensor, "b k"]
    count: Int[Tensor, "b q"]
    # Queries that see at most rank keys with independent values: nothing is invisible to them.
    lead: Bool[Tensor, "b g q"]
    # Queries that see more than rank keys: only from their prefixes are keys taken away.
    beyond: Bool[Tensor, "b g q"]
    offset: int

    def visible(self, q: Tensor) -> Bool[Tensor, "b q k"]:
        """Which keys the queries at indices ``q`` see."""
        k = torch.arange(self.x.shape[2], device=self.x.device)
        return self.seen[:, None] & (k <= q[:, None] + self.offset)


def prefixes(v: Tensor, key_visible: Tensor | None, n_q: int, offset: int, rtol: float | None) -> Prefixes:
    """What the rows of a causal map share."""
    b, _, n_k, e = v.shape
    seen = torch.ones(b, n_k, dtype=torch.bool, device=v.device) if key_visible is None else key_visible
    basis = column_basis(v, seen[:, None], rtol=rtol)
    key_count = seen.cumsum(-1)
    last = torch.arange(n_q, device=v.device) + offset
    count = torch.where(last < 0, 0, key_count[:, last.clamp(0, n_k - 1)])
    first, exists, _ = first_visible(v, seen[:, None], e)
    exists = exists & (torch.arange(exists.shape[-1], device=v.device) < basis.rank[..., None])
    free = independent_rows(first, exists, rtol=rtol)
    beyond = count[:, None] > basis.rank[..., None]
    lead = ~beyond & free[..., None] | (count[:, None] == 0)
    return Prefixes(whitened(v, basis.whiten), basis, seen, key_count, count, lead, beyond, offset)


def prefix_map(
    w: Float[Tensor, "b g r q k"],
    v: Float[Tensor, "b g k e"],
    key_visible: Tensor | None,
    offset: int,
    rtol: float | None,
) -> tuple[Float[Tensor, "b g r q k"], Int[Tensor, "b g q"], Bool[Tensor, "b g q"]]:
    """(W_perp, rank, trivial) of a causal map."""
    p = prefixes(v, key_visible, w.shape[3], offset, rtol)
    rank, done = _ranks(p), p.lead.clone()
    trivial = p.lead.clone()
    out = torch.zeros_like(w)
    for block in _blocks(p, w.shape[3]):
        rows = w[..., block.lo : block.hi, : block.end].to(torch.float64, copy=True)
        rows[..., block.first :].masked_fill_(block.ahead, 0)
        if key_visible is not None:
            rows.masked_fill_(~key_visible[:, None, None, None, : block.end], 0)
        part = rows
        if block.factors is not None:
            x = p.x[:, :, None, : block.end]
            a, sound = _coefficients(block.factors, rows @ x, block.ahead)
            done[..., block.lo : block.hi] |= sound & p.beyond[..., block.lo : block.hi]
            part = a @ x.mT
            part[..., block.first :].masked_fill_(block.ahead, 0)
            if block.any_lead:
                part = torch.where(p.lead[:, :, None, block.lo : block.hi, None], rows, part)
        out[..., block.lo : block.hi, : block.end] = part
    if not bool(done.all()):
        left = (~done).nonzero(as_tuple=True)
        seen = p.visible(torch.arange(w.shape[3], device=w.device))[:, None].expand(*w.shape[:2], *w.shape[3:])
        project_rows(w, v, seen, left, (out, rank, trivial), rtol=rtol)
    return out, rank, trivial


def prefix_coefficients(
    o: Float[Tensor, "b g r q e"],
    v: Float[Tensor, "b g k e"],
    key_visible: Tensor | None,
    offset: int,
    rtol: float | None,
) -> tuple[Float[Tensor, "b g r q e"], Prefixes, Int[Tensor, "b g q"], Bool[Tensor, "b g q"]]:
    """(a with W_perp = a V^T over each row's prefix, what the rows share, rank, trivial), from outputs alone.

    In a ``lead`` row the e numbers are instead its weights on the first e visible keys.
    """
    n_q = o.shape[3]
    p = prefixes(v, key_visible, n_q, offset, rtol)
    rank, done = _ranks(p), p.lead.clone()
    trivial = p.lead.clone()
    whiten = p.basis.whiten[:, :, None]
    out = torch.where(p.lead[:, :, None, :, None], _lead_weights(o, v, p), 0)
    for block in _blocks(p, n_q):
        if block.factors is None:
            continue
        a, sound = _coefficients(block.factors, o[..., block.lo : block.hi, :].double() @ whiten, block.ahead)
        sound = sound & p.beyond[..., block.lo : block.hi]
        done[..., block.lo : block.hi] |= sound
        out[..., block.lo : block.hi, :] += torch.where(sound[:, :, None, :, None], a @ whiten.mT, 0)
    if not bool(done.all()):
        left = (~done).nonzero(as_tuple=True)
        seen = p.visible(torch.arange(n_q, device=o.device))[:, None].expand(*o.shape[:2], n_q, v.shape[2])
        for (b, g, q), _, exists, values in gathered_rows(v, seen, left):
            basis = column_basis(values[:, None], exists[:, None], rtol=rtol)
            rank[b, g, q], trivial[b, g, q] = basis.rank[:, 0], basis.trivial[:, 0]
            out[b, g, :, q] = o[b, g, :, q].double() @ basis.whiten[:, 0] @ basis.whiten[:, 0].mT
    return out, p, rank, trivial


@dataclass(frozen=True, eq=False)
class _Factors:
    # R_end, and whether the prefix that it whitens is full rank beyond doubt.
    whiten: Float[Tensor, "b g e e"]
    sound: Bool[Tensor, "b g"]
    # The block's keys after its first query, last key first: whitened values, C^-1 with C C^T = I - M M^T, pivots of C.
    m: Float[Tensor, "b g m e"]
    inverse: Float[Tensor, "b g m m"]
    pivots: Float[Tensor, "b g m"]


@dataclass(frozen=True, eq=False)
class _Block:
    """Queries lo to hi; the last of them sees keys up to ``end``, the first of them those before ``first``."""

    lo: int
    hi: int
    first: int
    end: int
    # Which of the keys from ``first`` to ``end`` lie ahead of which query.
    ahead: Bool[Tensor, "q m"]
    any_lead: bool
    # None where all rows lead.
    factors: _Factors | None


def _blocks(p: Prefixes, n_q: int) -> Iterator[_Block]:
    x, (n_k, e) = p.x, p.x.shape[2:]
    dropped = torch.diag_embed((torch.arange(e, device=x.device) >= p.basis.rank[..., None]).double())
    gram, start = dropped, 0
    all_lead, any_lead = (t.tolist() for t in (p.lead.all(1).all(0), p.lead.any(1).any(0)))
    for lo in range(0, n_q, BLOCK):
        hi = min(lo + BLOCK, n_q)
        end = min(max(hi + p.offset, 0), n_k)
        first = min(max(lo + p.offset + 1, 0), end)
        keys = torch.arange(first, end, device=x.device)
        ahead = keys > torch.arange(lo, hi, device=x.device)[:, None] + p.offset
        gram = gram + x[:, :, start:end].mT @ x[:, :, start:end]
        start = end
        factors = None if all(all_lead[lo:hi]) else _factors(p, gram, keys)
        yield _Block(lo, hi, first, end, ahead, any(any_lead[lo:hi]), factors)


def _factors(p: Prefixes, gram: Tensor, keys: Tensor) -> _Factors:
    factor, sound = _cholesky(gram)
    whiten = _inverse(factor).mT
    sound = sound & (torch.linalg.vector_norm(whiten.detach(), dim=(-1, -2)) < SAFE_NORM)
    # A key that only lead rows do not see is never taken away.
    taken = p.key_count[:, None, keys] > p.basis.rank[..., None] + 1
    m = ((p.x[:, :, keys] @ whiten) * taken[..., None]).flip(2)
    rest = torch.eye(len(keys), dtype=m.dtype, device=m.device) - m @ m.mT
    factor, positive = _cholesky(rest)
    pivots = torch.where(positive[..., None], factor.detach().diagonal(dim1=-2, dim2=-1).square(), 0)
    return _Factors(whiten, sound, m, _inverse(factor), pivots)


def _coefficients(f: _Factors, o: Tensor, ahead: Tensor) -> tuple[Tensor, Tensor]:
    """(G_i^-1 o_i for every row i of a block, whether it is to be trusted)."""
    o = o @ f.whiten[:, :, None]
    sound = f.sound[..., None].expand(*f.sound.shape, ahead.shape[0])
    if ahead.shape[1]:
        m, inverse, keep = f.m[:, :, None], f.inverse[:, :, None], ahead.flip(1)
        u = (o @ m.mT @ inverse.mT).masked_fill(~keep, 0)
        o = o + u @ inverse @ m
        smallest = torch.where(keep, f.pivots[:, :, None], 1).amin(-1)
        sound = sound & (smallest > SAFE_PIVOT)
    return o @ f.whiten[:, :, None].mT, sound


def _lead_weights(o: Tensor, v: Tensor, p: Prefixes) -> Tensor:
    """The only weights on independent values with these outputs: o_i V_i^T (V_i V_i^T)^-1 over leading truncations."""
    e = v.shape[-1]
    first, exists, _ = first_visible(v.double(), p.seen[:, None], e)
    index = torch.arange(exists.shape[-1], device=v.device)
    exists = exists & (index < p.basis.rank[..., None])
    x = first.masked_fill(~exists[..., None], 0)
    factor, _ = _cholesky(x @ x.mT + torch.diag_embed((~exists).double()))
    inverse = _inverse(factor)[:, :, None]
    keep = index < p.count[:, None, None, :, None]
    w = ((o.double() @ x[:, :, None].mT @ inverse.mT) * keep) @ inverse
    return torch.nn.functional.pad(w, (0, e - w.shape[-1]))


def _ranks(p: Prefixes) -> Tensor:
    return torch.minimum(p.count[:, None], p.basis.rank[..., None])


def _cholesky(a: Tensor) -> tuple[Tensor, Tensor]:
    """(factor, whether it exists); the identity stands in where it does not, so that nothing turns into NaN."""
    factor, info = torch.linalg.cholesky_ex(a)
    exists = info == 0
    if not bool(exists.all()):
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        factor = torch.linalg.cholesky(torch.where(exists[..., None, None], a, eye))
    return factor, exists


def _inverse(factor: Tensor) -> Tensor:
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand_as(factor)
    return torch.linalg.solve_triangular(factor, eye, upper=False)
