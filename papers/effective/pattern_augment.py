"""Variations of a picture that keep its label, for the classifier to learn from."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.reading.pattern_features import blank_above
from attnlab.shapes import Bool, Float

__all__ = ["varied"]


def varied(
    x: Float[Tensor, "n size size"], chosen: torch.Generator, *, stays: Bool[Tensor, " n"] | None = None
) -> Float[Tensor, "n size size"]:
    """Tokens left out or repeated, the text reversed, an encoder's map made causal, another exposure, some noise.

    ``stays`` marks maps that are not made causal, since the lower half of a block is not a block.
    """
    x = _stretched(x, chosen)
    causal = blank_above(x)
    x = torch.where(_some(len(x), 0.25, chosen, x) & ~causal[:, None, None], x.flip(1, 2), x)
    can = ~causal if stays is None else ~causal & ~stays
    x = torch.where(_some(len(x), 0.2, chosen, x) & can[:, None, None], _made_causal(x), x)
    causal = causal | blank_above(x)
    power, light = (_uniform(len(x), low, high, chosen, x) for low, high in ((0.75, 1.35), (0.85, 1.0)))
    x = x.clamp(min=0) ** power * light
    noise = torch.randn(x.shape, generator=chosen, device=chosen.device).to(x) * 0.03
    # Keys that a causal model hides stay blank.
    noise = torch.where(causal[:, None, None], noise.tril(), noise)
    return (x + noise).clamp(0, 1)


def _stretched(x: Tensor, chosen: torch.Generator) -> Tensor:
    """Tokens repeated or left out at random, the same for queries and keys: lines, columns and squares remain."""
    n, size, _ = x.shape
    steps = torch.rand(n, size, generator=chosen, device=chosen.device) ** 0.7 + 0.15
    steps = torch.where(torch.rand(n, 1, generator=chosen, device=chosen.device) < 0.6, steps, 1.0)
    at = (steps.cumsum(-1) - steps[:, :1]) / (steps.sum(-1, keepdim=True) - steps[:, :1])
    at = (at * (size - 1)).round().long().to(x.device)
    x = x.gather(1, at[:, :, None].expand(-1, -1, size))
    return x.gather(2, at[:, None].expand(-1, size, -1))


def _made_causal(x: Tensor) -> Tensor:
    """The lower triangle of the weights (a picture shows their square roots), normalised and exposed again."""
    w = x.square().tril()
    w = (w / w.sum(-1, keepdim=True).clamp(min=1e-6)).sqrt()
    top = torch.quantile(w.flatten(1), 0.995, dim=1).clamp(min=1e-6)
    return (w / top[:, None, None]).clamp(max=1)


def _some(n: int, share: float, chosen: torch.Generator, like: Tensor) -> Tensor:
    return (torch.rand(n, 1, 1, generator=chosen, device=chosen.device) < share).to(like.device)


def _uniform(n: int, low: float, high: float, chosen: torch.Generator, like: Tensor) -> Tensor:
    return torch.empty(n, 1, 1, device=chosen.device).uniform_(low, high, generator=chosen).to(like)
