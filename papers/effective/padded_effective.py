"""Effective attention with padding inside V: how the paper's numbers were computed, kept to show what it changes."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.reading import ReadingInput
from attnlab.reading.effective import EffectiveAttention
from attnlab.shapes import Bool, Float

__all__ = ["padded_effective_attention"]


@torch.no_grad()
def padded_effective_attention(
    weights: Float[Tensor, "b h q k"],
    values: Float[Tensor, "b h k e"],
    *,
    key_visible: Bool[Tensor, "b k"] | None = None,
    threshold: float = 1e-10,
) -> EffectiveAttention:
    """The projection by a full SVD of V with its padding rows, one rank for the whole batch, masked afterwards.

    Weight that the projection puts on padding is dropped by the mask, so W_perp V is no longer W V: ``residual`` says
    by how much. Without padding it agrees with ``effective_attention``. For comparison only.
    """
    left, sigma, _ = torch.linalg.svd(values, full_matrices=True)
    # The whole batch has one rank, its largest, by an absolute threshold.
    rank = int((sigma > threshold).sum(-1).max())
    null = left[..., rank:]
    projected = weights - (weights @ null) @ null.mT
    g = ReadingInput(weights, values, key_visible)
    if key_visible is not None:
        projected = projected.masked_fill(~key_visible[:, None, None], 0)
    w, v = g.clean_weights(), g.clean_values()
    output, difference = w @ v, w - projected
    every = torch.full(weights.shape[:3], rank, device=weights.device)
    return EffectiveAttention(
        projected,
        torch.linalg.vector_norm(difference @ v, dim=(-1, -2)) / torch.linalg.vector_norm(output, dim=(-1, -2)),
        every,
        torch.linalg.vector_norm(difference, dim=(-1, -2)).square()
        / torch.linalg.vector_norm(w, dim=(-1, -2)).square(),
        every >= weights.shape[-1],
    )
