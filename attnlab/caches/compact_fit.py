"""Keys that stand for many: their biases and values fitted to reference queries, and how well that went."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.caches.contract import Refit, take_keys
from attnlab.chunks import chunk_budget
from attnlab.linalg.compaction import mass_weights, moved_values
from attnlab.shapes import Bool, Float, Int
from attnlab.summaries import notebook_view, short_repr

__all__ = ["Certificate", "References", "fit"]

# Heads with at most four to this power of keys are fitted together.
FEWEST = 4
# The most numbers of a chunk of W.
CHUNK = 1 << 25


@dataclass(frozen=True, eq=False)
class References:
    """Reference queries of each key/value head, and what their attention over the keys to compact was.

    A query may have seen other keys too: it counts by the share of its attention that these keys had.
    """

    q: Float[Tensor, "b g m d"]
    scale: float
    # log sum_j exp(s_ij) over all keys that the query saw; infinite for padding.
    normaliser: Float[Tensor, "b g m"]
    # sum_j alpha_ij and sum_j alpha_ij v_j over the keys to compact.
    share: Float[Tensor, "b g m"]
    target: Float[Tensor, "b g m e"]
    # Which are fitted; the others are held out.
    fitted: Bool[Tensor, "b m"]
    # The last key that each sees; None where all see all.
    last: Int[Tensor, " m"] | None

    __repr__ = short_repr

    def of(self, rows: Int[Tensor, " r"], heads: Int[Tensor, " r"]) -> References:
        """Those of some heads of some rows, each as a row of one head."""
        own = {name: getattr(self, name)[rows, heads].unsqueeze(1) for name in ("q", "normaliser", "share", "target")}
        return replace(self, **own, fitted=self.fitted[rows])

    def weights(self, keys: KeptColumns) -> Iterator[tuple[References, Float[Tensor, "b g m n"]]]:
        """Chunks of the queries, and their attention to some of the keys."""
        b, g, n = keys.at.shape
        size = max(1, chunk_budget(CHUNK) // max(1, b * g * n))
        for first in range(0, self.q.shape[2], size):
            here = slice(first, first + size)
            last = None if self.last is None else self.last[here]
            part = References(
                self.q[:, :, here],
                self.scale,
                self.normaliser[:, :, here],
                self.share[:, :, here],
                self.target[:, :, here],
                self.fitted[:, here],
                last,
            )
            A = (self.scale * part.q @ keys.k.mT - part.normaliser.unsqueeze(-1)).exp()
            seen = keys.there.unsqueeze(2)
            if last is not None:
                seen = seen & (keys.at.unsqueeze(2) <= last[:, None])
            yield part, A.masked_fill(~seen, 0)


@dataclass(frozen=True, eq=False)
class KeptColumns:
    """The keys that stay: their places, whether one is there, and the keys and values themselves."""

    at: Int[Tensor, "b g n"]
    there: Bool[Tensor, "b g n"]
    k: Float[Tensor, "b g n d"]
    v: Float[Tensor, "b g n e"]

    __repr__ = short_repr


@dataclass(frozen=True, eq=False)
class Certificate:
    """How far the outputs of one layer moved, measured for each row of the batch and each key/value head.

    ``error`` is sqrt(sum |o - o^|^2 / sum |o|^2) over the queries that were held out, ``fitted_error`` over those that
    were fitted; o is the output over the compacted keys alone. ``mass_error`` is the mean of |log(mass^ / mass)| over
    the held-out ones. NaN where there was none.

    ``bound`` holds for the queries that were measured, fitted or held out, and for no others: whatever keys come later
    and take at least the share of attention that later keys had here, with values no longer than the longest here,
    |out - out^| <= a |o - o^| + tanh(|log(mass^ / mass)| / 4) (|o^| + max |v|), where a is the share of the compacted
    keys; the largest of all these queries, relative to their largest |o|.
    """

    keys: Int[Tensor, "b g"]
    error: Float[Tensor, "b g"]
    fitted_error: Float[Tensor, "b g"]
    mass_error: Float[Tensor, "b g"]
    bound: Float[Tensor, "b g"]

    def __repr__(self) -> str:
        numbers = ", ".join(f"{f.name}={float(getattr(self, f.name).float().nanmean()):.3g}" for f in fields(self))
        return f"Certificate({numbers}; means of {self.keys.numel()} heads)"

    def _repr_html_(self) -> str:
        numbers = self.report()
        rows = [
            {"input": b, "key/value head": g, **{name: values[b][g] for name, values in numbers.items()}}
            for b in range(self.keys.shape[0])
            for g in range(self.keys.shape[1])
        ]
        return notebook_view("Certificate of a compacted layer", rows)

    def report(self) -> dict[str, Any]:
        """Every number as plain JSON, (rows, heads) as lists of lists; None where nothing was measured."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(t: Tensor) -> Any:
    numbers = t.tolist()
    return [[None if number != number else number for number in row] for row in numbers]


def fit(
    references: References,
    k: Float[Tensor, "b g k d"],
    v: Float[Tensor, "b g k e"],
    keep: Bool[Tensor, "b g k"],
    *,
    ridge: float,
) -> Refit:
    """The kept keys with the values and biases that reproduce masses and outputs of all keys for the queries.

    Heads that keep about as many keys are fitted together: where they share a budget, some keep a hundred times as many
    as others, and the cost grows with the cube of the most.
    """
    counts = keep.sum(-1)
    new, bias = v.clone(), torch.zeros_like(v[..., 0])
    measured = {
        f.name: torch.full(counts.shape, torch.nan, dtype=v.dtype, device=v.device) for f in fields(Certificate)
    }
    for rows, heads in _alike(counts):
        at, values, w, certificate = _fit_heads(references.of(rows, heads), k[rows, heads], v[rows, heads],
                                                keep[rows, heads], ridge=ridge)  # fmt: skip
        new[rows, heads] = new[rows, heads].scatter(1, at.unsqueeze(-1).expand_as(values), values)
        bias[rows, heads] = bias[rows, heads].scatter(1, at, w.log())
        for name, numbers in measured.items():
            numbers[rows, heads] = getattr(certificate, name)[:, 0].to(v.dtype)
    return Refit(k, new, bias, Certificate(**{**measured, "keys": counts}))


def _alike(counts: Int[Tensor, "b g"]) -> Iterator[tuple[Int[Tensor, " r"], Int[Tensor, " r"]]]:
    """(rows, heads) whose numbers of keys lie between two neighbouring powers of four."""
    sizes = counts.clamp_min(1).double().log2().div(2).ceil().clamp_min(FEWEST).long()
    for size in sizes.unique().tolist():
        rows, heads = torch.nonzero(sizes == size, as_tuple=True)
        yield rows, heads


def _fit_heads(
    references: References,
    k: Float[Tensor, "r k d"],
    v: Float[Tensor, "r k e"],
    keep: Bool[Tensor, "r k"],
    *,
    ridge: float,
) -> tuple[Int[Tensor, "r n"], Float[Tensor, "r n e"], Float[Tensor, "r n"], Certificate]:
    """(Places of the kept keys, their values, their weights, the certificate) of some heads."""
    k, v, keep = k.unsqueeze(1), v.unsqueeze(1), keep.unsqueeze(1)
    most = int(keep.sum(-1).max())
    at = keep.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :most]
    kept = KeptColumns(at, keep.gather(-1, at), take_keys(k, at), take_keys(v, at))
    w = _fitted_weights(references, kept)
    values = kept.v + _change(references, kept, w, ridge)
    longest = v.norm(dim=-1).amax(-1, keepdim=True)
    # Where fewer are kept than the most, places of keys that are dropped get what they had.
    return at[:, 0], values[:, 0], w[:, 0], _measured(references, kept, w, values, longest)


def _fitted_weights(references: References, kept: KeptColumns) -> Float[Tensor, "b g n"]:
    b, g, n = kept.at.shape
    gram, sums = kept.v.new_zeros(b, g, n, n), kept.v.new_zeros(b, g, n)
    for part, A in references.weights(kept):
        counted = A * part.fitted[:, None, :, None]
        gram += counted.mT @ A
        sums += (counted.mT @ part.share.unsqueeze(-1)).squeeze(-1)
    return mass_weights(gram, sums, kept.there)


def _compacted(part: References, A: Tensor, w: Tensor) -> tuple[Float[Tensor, "b g m n"], Float[Tensor, "b g m"]]:
    """(The compacted attention with the shares that the keys had, the shares that the fitted weights give)."""
    P = A * w.unsqueeze(2)
    mass = P.sum(-1)
    return P * (part.share / mass.clamp_min(torch.finfo(P.dtype).tiny)).unsqueeze(-1), mass


def _change(references: References, kept: KeptColumns, w: Tensor, ridge: float) -> Float[Tensor, "b g n e"]:
    b, g, n = kept.at.shape
    gram, sums = kept.v.new_zeros(b, g, n, n), torch.zeros_like(kept.v)
    for part, A in references.weights(kept):
        P, _ = _compacted(part, A, w)
        counted = P * part.fitted[:, None, :, None]
        gram += counted.mT @ P
        sums += counted.mT @ (part.target - P @ kept.v)
    return moved_values(gram, sums, kept.there, ridge=ridge)


def _measured(references: References, kept: KeptColumns, w: Tensor, values: Tensor, longest: Tensor) -> Certificate:
    tiny = torch.finfo(w.dtype).tiny
    totals = w.new_zeros(6, *w.shape[:2])
    bound, size = w.new_zeros(2, *w.shape[:2])
    for part, A in references.weights(kept):
        P, mass = _compacted(part, A, w)
        share, output = part.share, P @ values
        off, whole = (part.target - output).norm(dim=-1), part.target.norm(dim=-1)
        counts = share > 0
        ratio = (mass.clamp_min(tiny) / share.clamp_min(tiny)).log().abs() * counts
        length = output.norm(dim=-1) / share.clamp_min(tiny)
        bound = bound.maximum(((off + (ratio / 4).tanh() * (length + longest)) * counts).amax(-1))
        size = size.maximum((whole / share.clamp_min(tiny) * counts).amax(-1))
        held_out, in_fit = (~part.fitted[:, None] & counts).to(w.dtype), (part.fitted[:, None] & counts).to(w.dtype)
        squares = off.square(), whole.square()
        parts = [each * held_out for each in squares] + [each * in_fit for each in squares]
        totals = totals + torch.stack([each.sum(-1) for each in (*parts, ratio * held_out, held_out)])
    return Certificate(
        keys=kept.there.sum(-1),
        error=(totals[0] / totals[1]).sqrt(),
        fitted_error=(totals[2] / totals[3]).sqrt(),
        mass_error=totals[4] / totals[5],
        bound=bound / size.clamp_min(tiny),
    )
