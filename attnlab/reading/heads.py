"""One number per head and query: how spread its attention is, and how far it looks."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.attention import normalise
from attnlab.reading._input import given
from attnlab.shapes import Bool, Float
from attnlab.trace import LayerTrace

__all__ = ["attention_distance", "attention_entropy"]


def attention_entropy(
    layer: LayerTrace | Float[Tensor, "b h q k"],
    values: Float[Tensor, "b g k e"] | None = None,
    *,
    key_visible: Bool[Tensor, "b k"] | None = None,
    causal: bool = False,
    offset: int = 0,
    mask: Bool[Tensor, "#b #h q k"] | None = None,
) -> Float[Tensor, "b h q"]:
    """-sum_j p_ij log p_ij in nats, p the absolute weights as shares of their sum; 0 for a row of zeros.

    >>> attention_entropy(torch.tensor([[[[0.5, 0.5, 0.0]]]])).item()
    0.6931471824645996
    """
    p = _shares(layer, values, key_visible, causal, offset, mask)
    return -torch.special.xlogy(p, p).sum(-1)


def attention_distance(
    layer: LayerTrace | Float[Tensor, "b h q k"],
    values: Float[Tensor, "b g k e"] | None = None,
    *,
    key_visible: Bool[Tensor, "b k"] | None = None,
    causal: bool = False,
    offset: int = 0,
    mask: Bool[Tensor, "#b #h q k"] | None = None,
) -> Float[Tensor, "b h q"]:
    """sum_j p_ij |i - j| in tokens, i the query's own position among the keys.

    >>> attention_distance(torch.tensor([[[[0.0, 0.5, 0.5]]]])).item()
    1.5
    """
    p = _shares(layer, values, key_visible, causal, offset, mask)
    start = layer.call.offset if isinstance(layer, LayerTrace) else offset
    i = torch.arange(p.shape[2], device=p.device)[:, None] + start
    far = (i - torch.arange(p.shape[3], device=p.device)).abs()
    return (p * far).sum(-1)


def _shares(
    layer: LayerTrace | Tensor,
    values: Tensor | None,
    key_visible: Tensor | None,
    causal: bool,
    offset: int,
    mask: Tensor | None,
) -> Tensor:
    if isinstance(layer, Tensor) and values is None:
        # These readings look at W alone; the values only say how many keys there are.
        values = layer.new_zeros(layer.shape[0], 1, layer.shape[-1], 1)
    g = given(layer, values, key_visible=key_visible, causal=causal, offset=offset, mask=mask)
    return normalise(g.clean_weights().abs())
