"""One number per head and query: how spread its attention is, and how far it looks."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from attnlab.attention import normalise
from attnlab.reading._input import Masks, ReadingInput
from attnlab.reading.registry import reading
from attnlab.shapes import Float
from attnlab.trace import LayerTrace

__all__ = ["attention_distance", "attention_entropy"]


@reading("entropy", "How spread a token's attention is, in nats.", per_query=True)
def attention_entropy(
    layer: LayerTrace | ReadingInput | Float[Tensor, "b h q k"],
    values: Float[Tensor, "b g k e"] | None = None,
    **masks: Unpack[Masks],
) -> Float[Tensor, "b h q"]:
    """-sum_j p_ij log p_ij in nats, p the absolute weights as shares of their sum; 0 for a row of zeros.

    >>> attention_entropy(torch.tensor([[[[0.5, 0.5, 0.0]]]])).item()
    0.6931471824645996
    """
    p = _shares(ReadingInput.of(layer, values, needs_values=False, **masks))
    return -torch.special.xlogy(p, p).sum(-1)


@reading("distance", "How far a token looks, in tokens, averaged over its weights.", per_query=True)
def attention_distance(
    layer: LayerTrace | ReadingInput | Float[Tensor, "b h q k"],
    values: Float[Tensor, "b g k e"] | None = None,
    **masks: Unpack[Masks],
) -> Float[Tensor, "b h q"]:
    """sum_j p_ij |i - j| in tokens, i the query's own position among the keys.

    >>> attention_distance(torch.tensor([[[[0.0, 0.5, 0.5]]]])).item()
    1.5
    """
    source = ReadingInput.of(layer, values, needs_values=False, **masks)
    p = _shares(source)
    i = torch.arange(p.shape[2], device=p.device)[:, None] + source.offset
    far = (i - torch.arange(p.shape[3], device=p.device)).abs()
    return (p * far).sum(-1)


def _shares(source: ReadingInput) -> Float[Tensor, "b h q k"]:
    """The absolute weights of each row as shares of their sum."""
    return normalise(source.clean_weights().abs())
