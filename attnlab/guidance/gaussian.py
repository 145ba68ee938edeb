"""Hard-coded Gaussian heads (You et al., 2020): attention by position alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, visible
from attnlab.mechanisms.softmax import softmax
from attnlab.shapes import Float

__all__ = ["GaussianHeads"]


@dataclass(frozen=True)
class GaussianHeads(Mechanism):
    """w_ij ~ exp(-(j - i - shift)^2 / (2 std^2)) over the visible keys, places counted among them; rows sum to 1.

    Head h has ``shifts[h % len(shifts)]``: around the previous, the same and the next token. Queries and keys are not
    read, nor is a bias.
    """

    shifts: tuple[int, ...] = (-1, 0, 1)
    std: float = 1.0

    exempt = {"gradients": "queries and keys are not read, so the output has no gradient by them"}
    # A query's position is its row, which a chunk of rows does not know.
    whole_queries = True

    def __post_init__(self) -> None:
        if not self.shifts or not (math.isfinite(self.std) and self.std > 0):
            raise ValueError(f"shifts must name a place and std be positive, got {self.shifts} and {self.std}")

    def cannot(self) -> dict[str, str]:
        return {
            "bias": "its weights are fixed, so there are no scores to add to",
            "cross": "a query has no place among the keys of another sequence",
        }

    def reference(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        b, h, n_q, n_k = call.sizes
        keys = torch.ones(b, n_k, dtype=torch.bool, device=call.q.device)
        keys = keys if call.key_visible is None else call.key_visible
        of_keys = keys.cumsum(-1) - 1
        own = torch.arange(n_q, device=keys.device) + call.offset
        of_queries = of_keys[:, own.clamp(0, max(n_k - 1, 0))]
        # Filled on the device, so that a captured graph can hold it.
        turn = torch.arange(h, device=keys.device) % len(self.shifts)
        shift = torch.stack([torch.full_like(turn, s) * (turn == i) for i, s in enumerate(self.shifts)]).sum(0)
        far = of_keys[:, None, None, :] - of_queries[:, None, :, None] - shift[:, None, None]
        s = -far.to(call.q.dtype).square() / (2 * self.std**2)
        seen = visible(call)
        return softmax(s if seen is None else s.masked_fill(~seen, -math.inf))
