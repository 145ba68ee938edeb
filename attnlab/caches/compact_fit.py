"""Keys that stand for many: their biases and values fitted to reference queries, and how well that went."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from attnlab.caches.contract import Refit, take_keys
from attnlab.linalg.compaction import mass_weights, moved_values
from attnlab.shapes import Bool, Float, Int

__all__ = ["Certificate", "Rows", "fit"]

# Each time it is called: chunks of (rows of W over the keys (b, g, m, k), which of them are fitted (b, m)). A row may
# sum to less than 1, where the query sees later keys too: it counts by the share that these keys have.
Rows = Callable[[], Iterator[tuple[Float[Tensor, "b g m k"], Bool[Tensor, "b m"]]]]


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

    def report(self) -> dict[str, Any]:
        """Every number as plain JSON, (rows, heads) as lists of lists; None where nothing was measured."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(t: Tensor) -> Any:
    numbers = t.tolist()
    return [[None if number != number else number for number in row] for row in numbers]


def fit(
    rows: Rows,
    k: Float[Tensor, "b g k d"],
    v: Float[Tensor, "b g k e"],
    keep: Bool[Tensor, "b g k"],
    *,
    ridge: float,
) -> Refit:
    """The kept keys with the values and biases that reproduce masses and outputs of all keys for the rows."""
    most = int(keep.sum(-1).max())
    at = keep.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :most]
    there = keep.gather(-1, at)
    kept = take_keys(v, at)
    w = _fitted_weights(rows, at, there)
    values = kept + _change(rows, v, kept, at, there, w, ridge)
    certificate = _measured(rows, v, values, at, there, w)
    index = at.unsqueeze(-1).expand_as(values)
    new = v.scatter(2, index, torch.where(there.unsqueeze(-1), values, kept))
    bias = torch.zeros_like(v[..., 0]).scatter(2, at, torch.where(there, w, 1).log())
    return Refit(k, new, bias, certificate)


def _chosen(W: Float[Tensor, "b g m k"], at: Int[Tensor, "b g n"], there: Bool[Tensor, "b g n"]) -> Tensor:
    """The columns of the kept keys; zeros where a head keeps fewer."""
    return W.gather(-1, at.unsqueeze(2).expand(-1, -1, W.shape[2], -1)) * there.unsqueeze(2)


def _fitted_weights(rows: Rows, at: Tensor, there: Tensor) -> Float[Tensor, "b g n"]:
    gram = sums = None
    for W, fitted in rows():
        A = _chosen(W, at, there)
        counted = A * fitted[:, None, :, None]
        more, total = counted.mT @ A, (counted.mT @ W.sum(-1, keepdim=True)).squeeze(-1)
        gram, sums = (more, total) if gram is None else (gram + more, sums + total)
    assert gram is not None
    return mass_weights(gram, sums, there)


def _compacted(
    W: Tensor, at: Tensor, there: Tensor, w: Tensor
) -> tuple[Float[Tensor, "b g m n"], Float[Tensor, "b g m 1"], Float[Tensor, "b g m 1"]]:
    """(Rows of the compacted W with the sums of W's, these sums, the sums that the fitted weights give)."""
    P = _chosen(W, at, there) * w.unsqueeze(2)
    share, mass = W.sum(-1, keepdim=True), P.sum(-1, keepdim=True)
    return P * (share / mass.clamp_min(torch.finfo(P.dtype).tiny)), share, mass


def _change(
    rows: Rows, v: Tensor, kept: Tensor, at: Tensor, there: Tensor, w: Tensor, ridge: float
) -> Float[Tensor, "b g n e"]:
    gram = sums = None
    for W, fitted in rows():
        P, _, _ = _compacted(W, at, there, w)
        counted = P * fitted[:, None, :, None]
        more, lack = counted.mT @ P, counted.mT @ (W @ v - P @ kept)
        gram, sums = (more, lack) if gram is None else (gram + more, sums + lack)
    assert gram is not None
    return moved_values(gram, sums, there, ridge=ridge)


def _measured(rows: Rows, v: Tensor, values: Tensor, at: Tensor, there: Tensor, w: Tensor) -> Certificate:
    longest = v.norm(dim=-1).amax(-1, keepdim=True)
    tiny = torch.finfo(v.dtype).tiny
    totals = v.new_zeros(6, *v.shape[:2])
    bound, size = v.new_zeros(2, *v.shape[:2])
    for W, fitted in rows():
        P, share, mass = _compacted(W, at, there, w)
        exact, compacted = W @ v, P @ values
        off, whole = (exact - compacted).norm(dim=-1), exact.norm(dim=-1)
        there_is = share.squeeze(-1) > 0
        ratio = (mass.clamp_min(tiny) / share.clamp_min(tiny)).log().abs().squeeze(-1) * there_is
        length = compacted.norm(dim=-1) / share.squeeze(-1).clamp_min(tiny)
        bound = bound.maximum(((off + (ratio / 4).tanh() * (length + longest)) * there_is).amax(-1))
        size = size.maximum((whole / share.squeeze(-1).clamp_min(tiny)).amax(-1))
        held_out = (~fitted[:, None] & there_is).to(v.dtype)
        in_fit = (fitted[:, None] & there_is).to(v.dtype)
        parts = (
            off.square() * held_out,
            whole.square() * held_out,
            off.square() * in_fit,
            whole.square() * in_fit,
            ratio * held_out,
            held_out,
        )
        totals = totals + torch.stack([part.sum(-1) for part in parts])
    return Certificate(
        keys=there.sum(-1),
        error=_relative(totals[0], totals[1]),
        fitted_error=_relative(totals[2], totals[3]),
        mass_error=totals[4] / totals[5],
        bound=bound / size.clamp_min(tiny),
    )


def _relative(off: Tensor, whole: Tensor) -> Tensor:
    """The root of a ratio of squares; 0 where both are 0, NaN where nothing was measured is left to the caller."""
    return torch.where((off == 0) & (whole == 0), torch.nan, (off / whole).sqrt())
