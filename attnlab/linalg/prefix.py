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

from attnlab.linalg.projection import (
    Basis,
    column_basis,
    first_visible,
    gathered_rows,
    independent_rows,
    project_rows,
    whitened,
)
from attnlab.shapes import Bool, Float, Int

__all__ = ["Prefixes", "prefix_coefficients", "prefix_map", "prefix_squares", "prefixes", "visible_counts"]

BLOCK = 64
# A pivot of I - M_U M_U^T is the share of a direction that the shorter prefix keeps: below this float64 is not enough.
SAFE_PIVOT = 1e-9
# Up to these float32 is as good: the norm of the whitening over sqrt(e), and the pivots.
EASY_NORM, EASY_PIVOT = 8.0, 0.05
# Blocks worked on at once: on a CPU as many as its cache holds, elsewhere to have few launches.
BLOCKS, MANY_BLOCKS = {"cpu": 4}, 256
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
    key_count, count = visible_counts(seen, n_q, offset)
    first, exists, _ = first_visible(v, seen[:, None], e)
    exists = exists & (torch.arange(exists.shape[-1], device=v.device) < basis.rank[..., None])
    free = independent_rows(first, exists, rtol=rtol)
    beyond = count[:, None] > basis.rank[..., None]
    lead = ~beyond & free[..., None] | (count[:, None] == 0)
    return Prefixes(whitened(v, basis.whiten), basis, seen, key_count, count, lead, beyond, offset)


def visible_counts(seen: Bool[Tensor, "b k"], n_q: int, offset: int) -> tuple[Int[Tensor, "b k"], Int[Tensor, "b q"]]:
    """How many visible keys there are up to each key, and up to each query."""
    key_count = seen.cumsum(-1)
    last = torch.arange(n_q, device=seen.device) + offset
    return key_count, torch.where(last < 0, 0, key_count[:, last.clamp(0, seen.shape[1] - 1)])


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
    by_block = w.device.type == "cpu"
    near = p.x.to(w.dtype) if by_block else p.x
    for span in _spans(p, w.shape[3]):
        if span.factors is None:
            out[..., span.lo : span.hi, :] = w[..., span.lo : span.hi, :]
            continue
        # On a CPU a block takes only the keys that it sees, and no more digits than it needs.
        easy = _easy(span.factors) if by_block and w.dtype == torch.float32 else [False] * BLOCKS["cpu"]
        pieces = [
            (lo, min(lo + BLOCK, span.hi), near if easy[i] else p.x)
            for i, lo in enumerate(range(span.lo, span.hi, BLOCK))
        ] if by_block else [(span.lo, span.hi, p.x)]  # fmt: skip
        o = [
            (w[..., lo:hi, :end].to(x.dtype) @ x[:, :, None, :end]).double()
            for lo, hi, x in pieces
            for end in (_reach(p, hi),)
        ]
        a, sound = _coefficients(span.factors, torch.cat(o, 3))
        done[..., span.lo : span.hi] |= sound & p.beyond[..., span.lo : span.hi]
        for lo, hi, x in pieces:
            end = _reach(p, hi)
            part = a[..., lo - span.lo : hi - span.lo, :].to(x.dtype) @ x[:, :, None, :end].mT
            own = min(max(lo + offset, 0), end)
            part[..., own:].tril_(lo + offset - own)
            if any(span.lead[lo - span.lo : hi - span.lo]):
                part = torch.where(p.lead[:, :, None, lo:hi, None], w[..., lo:hi, :end].to(x.dtype), part)
            out[..., lo:hi, :end] = part
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
    for span in _spans(p, n_q):
        if span.factors is None:
            continue
        rows = slice(span.lo, span.hi)
        a, sound = _coefficients(span.factors, o[..., rows, :].double() @ whiten)
        sound = sound & p.beyond[..., rows]
        done[..., rows] |= sound
        out[..., rows, :] += torch.where(sound[:, :, None, :, None], a @ whiten.mT, 0)
    if not bool(done.all()):
        left = (~done).nonzero(as_tuple=True)
        seen = p.visible(torch.arange(n_q, device=o.device))[:, None].expand(*o.shape[:2], n_q, v.shape[2])
        for (b, g, q), _, exists, values in gathered_rows(v, seen, left):
            basis = column_basis(values[:, None], exists[:, None], rtol=rtol)
            rank[b, g, q], trivial[b, g, q] = basis.rank[:, 0], basis.trivial[:, 0]
            out[b, g, :, q] = o[b, g, :, q].double() @ basis.whiten[:, 0] @ basis.whiten[:, 0].mT
    return out, p, rank, trivial


def prefix_squares(
    o: Float[Tensor, "b g r q e"], v: Float[Tensor, "b g k e"], key_visible: Tensor | None, offset: int
) -> tuple[Float[Tensor, "b g r q"], Bool[Tensor, "b g q"]]:
    """(|w_perp|^2 of rows of a causal map from outputs alone; which rows are their own w_perp, with zero as a square).

    Nothing of the size of the outputs is kept.
    """
    n_q = o.shape[3]
    p = prefixes(v, key_visible, n_q, offset, None)
    done, trivial = p.lead.clone(), p.lead.clone()
    whiten = p.basis.whiten[:, :, None]
    squares = torch.zeros(o.shape[:-1], dtype=torch.float64, device=o.device)
    for span in _spans(p, n_q):
        if span.factors is None:
            continue
        rows = slice(span.lo, span.hi)
        whitened_rows = o[..., rows, :].double() @ whiten
        a, sound = _coefficients(span.factors, whitened_rows)
        sound = sound & p.beyond[..., rows]
        done[..., rows] |= sound
        squares[..., rows] = torch.where(sound[:, :, None], (a * whitened_rows).sum(-1), 0)
    if not bool(done.all()):
        queries = (~done).flatten(0, 1).any(0).nonzero()[:, 0]
        seen = p.visible(queries)[:, None].expand(*v.shape[:2], -1, -1)
        left = (~done[..., queries]).nonzero(as_tuple=True)
        for (b, g, at), _, exists, values in gathered_rows(v, seen, left):
            basis, q = column_basis(values[:, None], exists[:, None]), queries[at]
            trivial[b, g, q] = basis.trivial[:, 0]
            squares[b, g, :, q] = (o[b, g, :, q].double() @ basis.whiten[:, 0]).square().sum(-1)
    return squares, trivial


@dataclass(frozen=True, eq=False)
class _Factors:
    """What the rows of blocks share, for all blocks at once."""

    # R_end, its norm, and whether the prefix that it whitens is full rank beyond doubt.
    whiten: Float[Tensor, "b g c e e"]
    norm: Float[Tensor, "b g c"]
    sound: Bool[Tensor, "b g c"]
    # A block's keys after its first query, last key first: whitened values, C^-1 with C C^T = I - M M^T, pivots of C.
    m: Float[Tensor, "b g c m e"]
    inverse: Float[Tensor, "b g c m m"]
    pivots: Float[Tensor, "b g c m"]


@dataclass(frozen=True, eq=False)
class _Span:
    """Queries lo to hi, which are whole blocks but for the end; which of them lead in some head."""

    lo: int
    hi: int
    lead: list[bool]
    # None where all rows lead.
    factors: _Factors | None


def _spans(p: Prefixes, n_q: int) -> Iterator[_Span]:
    x, (n_k, e) = p.x, p.x.shape[2:]
    before = x[:, :, : min(max(p.offset, 0), n_k)]
    gram = before.mT @ before + torch.diag_embed((torch.arange(e, device=x.device) >= p.basis.rank[..., None]).double())
    all_lead, any_lead = (t.tolist() for t in (p.lead.all(1).all(0), p.lead.any(1).any(0)))
    size = BLOCK * BLOCKS.get(x.device.type, MANY_BLOCKS)
    for lo in range(0, n_q, size):
        hi = min(lo + size, n_q)
        # The newest key of each query.
        keys = torch.arange(lo, hi + -(hi - lo) % BLOCK, device=x.device) + p.offset
        own = x[:, :, keys.clamp(0, n_k - 1)] * ((keys >= 0) & (keys < n_k))[:, None]
        own = own.unflatten(2, (-1, BLOCK))
        grams = gram.unsqueeze(2) + (own.mT @ own).cumsum(2)
        gram = grams[:, :, -1]
        factors = None if all(all_lead[lo:hi]) else _factors(p, grams, own, keys, lo, hi)
        yield _Span(lo, hi, any_lead[lo:hi], factors)


def _reach(p: Prefixes, hi: int) -> int:
    """The number of keys that queries before ``hi`` can see."""
    return min(max(hi + p.offset, 0), p.x.shape[2])


def _factors(p: Prefixes, grams: Tensor, own: Tensor, keys: Tensor, lo: int, hi: int) -> _Factors:
    # Blocks of which every row leads have too few keys for a factor, and need none.
    lead = _padded(p.lead[..., lo:hi], value=True).unflatten(-1, (-1, BLOCK)).all(-1)
    eye = torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device)
    factor, sound = _cholesky(torch.where(lead[..., None, None], eye, grams))
    whiten = _inverse(factor).mT
    norm = torch.linalg.vector_norm(whiten.detach(), dim=(-1, -2))
    # A key that only lead rows do not see is never taken away.
    counts = p.key_count[:, keys.clamp(0, p.x.shape[2] - 1)].unflatten(-1, (-1, BLOCK))[:, None, :, 1:]
    taken = counts > p.basis.rank[..., None, None] + 1
    m = ((own[..., 1:, :] @ whiten) * taken[..., None]).flip(3)
    rest = torch.eye(BLOCK - 1, dtype=m.dtype, device=m.device) - m @ m.mT
    factor, positive = _cholesky(rest)
    pivots = torch.where(positive[..., None], factor.detach().diagonal(dim1=-2, dim2=-1).square(), 0)
    return _Factors(whiten, norm, sound & (norm < SAFE_NORM), m, _inverse(factor), pivots)


def _easy(f: _Factors) -> list[bool]:
    """Blocks whose products lose nothing in float32, in any head."""
    easy = f.sound & (f.norm < EASY_NORM * f.whiten.shape[-1] ** 0.5) & (f.pivots.amin(-1) > EASY_PIVOT)
    return easy.all(1).all(0).tolist()


def _coefficients(f: _Factors, o: Float[Tensor, "b g r q e"]) -> tuple[Tensor, Tensor]:
    """(G_i^-1 o_i for every row i of the blocks, whether it is to be trusted)."""
    n = o.shape[3]
    o = _padded(o.mT, value=0.0).mT.unflatten(3, (-1, BLOCK))
    whiten, m, inverse = (t.unsqueeze(2) for t in (f.whiten, f.m, f.inverse))
    o = o @ whiten
    # Key j after the first of a block lies ahead of its first j + 1 queries; the last key comes first.
    ahead = torch.ones(BLOCK, BLOCK - 1, dtype=torch.bool, device=o.device).triu().flip(1)
    u = (o @ m.mT @ inverse.mT).masked_fill(~ahead, 0)
    o = o + u @ inverse @ m
    smallest = torch.where(ahead, f.pivots.unsqueeze(3), 1).amin(-1)
    sound = f.sound[..., None] & (smallest > SAFE_PIVOT)
    return (o @ whiten.mT).flatten(3, 4)[..., :n, :], sound.flatten(2)[..., :n]


def _padded(t: Tensor, *, value: float | bool) -> Tensor:
    """Whole blocks along the last axis."""
    rest = -t.shape[-1] % BLOCK
    return torch.nn.functional.pad(t, (0, rest), value=value) if rest else t


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
