"""Another attention with the same output: what Appendix A of Effective says exists, constructed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from attnlab.attention import grouped, ungrouped
from attnlab.fields import check_int
from attnlab.linalg.projection import column_basis
from attnlab.reading._input import Masks, ReadingInput
from attnlab.shapes import Bool, Float
from attnlab.summaries import notebook_view, short_repr
from attnlab.trace import LayerTrace

__all__ = ["AlternativeAttention", "alternative_attention"]

# Elements of the rows' own value matrices held at once.
BUDGET = 1 << 22


@dataclass(frozen=True, eq=False)
class AlternativeAttention:
    """``weights`` give the same output as the original ones; where ``exists`` is False they are the original ones.

    ``distance`` is the total variation between the two rows, half the sum of absolute differences.
    """

    weights: Float[Tensor, "b h q k"]
    exists: Bool[Tensor, "b h q"]
    distance: Float[Tensor, "b h q"]

    __repr__ = short_repr

    def _repr_html_(self) -> str:
        exists, distance = (t.double().mean((0, 2)).tolist() for t in (self.exists, self.distance))
        rows = [
            {"head": head, "exists": share, "distance": mean}
            for head, (share, mean) in enumerate(zip(exists, distance, strict=True))
        ]
        note = "exists: the share of rows with another distribution of the same output; distance: its total variation."
        return notebook_view(f"Alternative attention {tuple(self.weights.shape)}", rows, note=note)


@torch.no_grad()
def alternative_attention(
    layer: LayerTrace | ReadingInput | Float[Tensor, "b h q k"],
    values: Float[Tensor, "b g k e"] | None = None,
    *,
    seed: int = 0,
    **masks: Unpack[Masks],
) -> AlternativeAttention:
    """Non-negative weights with the same row sums and the same output, as far from W as a random direction leads.

    A row w becomes w (1 + t eta) with eta in the left nullspace of diag(w) [V, 1], so output, sum and zeros stay; t is
    the largest that keeps it on the simplex, where a weight reaches zero. Such a row exists if and only if more of its
    weights are positive than diag(w) [V, 1] has rank: always with more than e + 1 of them. Zeros stay zero, so
    an answer of False is about distributions over the keys that the row uses.

    >>> v = torch.tensor([[[[1.0], [2.0], [3.0]]]])
    >>> a = alternative_attention(torch.tensor([[[[0.25, 0.5, 0.25]]]]), v)
    >>> bool(a.exists), (a.weights @ v).item(), round(a.weights.sum().item(), 5)
    (True, 2.0, 1.0)
    """
    check_int("seed", seed, least=0)
    source = ReadingInput.of(layer, values, **masks)
    w, v = source.clean_weights(), source.clean_values()
    if bool((w < 0).any()):
        raise ValueError("weights must not be negative: an alternative is sought among distributions")
    groups = w.shape[1] // v.shape[1]
    ones = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1).double()
    direction = torch.randn(w.shape[-1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        v.device
    )
    flat = grouped(w, groups).flatten(2, 3)
    size = max(1, BUDGET // max(1, ones[:, :, 0].numel() * w.shape[-1]))
    parts = [_moved(part, ones, direction) for part in flat.double().split(size, dim=2)]
    moved, exists = (torch.cat(t, 2).unflatten(2, (groups, w.shape[2])) for t in zip(*parts, strict=True))
    other = ungrouped(moved).to(w.dtype)
    return AlternativeAttention(other, ungrouped(exists), 0.5 * (other - w).abs().sum(-1))


def _moved(w: Tensor, ones: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """(rows moved along their nullspace until a weight is zero, whether the nullspace has a dimension)."""
    b, g, r, k = w.shape
    used = w > 0
    # Every row is a problem of its own: (b * g * r, 1, k, e + 1).
    rows = (w[..., None] * ones[:, :, None]).flatten(0, 2)[:, None]
    basis = column_basis(rows, used.flatten(0, 2)[:, None], rtol=1e-12)
    columns = basis.columns[:, 0]
    eta = (direction * used.flatten(0, 2)).unsqueeze(-1)
    for _ in range(2):
        eta = eta - columns @ (columns.mT @ eta)
    eta = eta.squeeze(-1).view(b, g, r, k) * used
    exists = (basis.count > basis.rank).view(b, g, r)
    # Both ends of the segment lie on the simplex's border; take the farther one.
    ends = torch.stack([eta.amin(-1).neg(), eta.amax(-1)]).clamp(min=torch.finfo(torch.float64).tiny)
    step = torch.where(ends[0] < ends[1], 1 / ends[0], -1 / ends[1])
    moved = (w * (1 + step[..., None] * eta)).clamp(min=0)
    return torch.where(exists[..., None], moved, w), exists
