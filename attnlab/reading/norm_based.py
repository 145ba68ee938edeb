"""Norm-based analysis (Kobayashi et al., 2020): how long the vector is that a key adds to a query's output."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.attention import repeat_groups
from attnlab.reading._input import given
from attnlab.shapes import Bool, Float
from attnlab.trace import LayerTrace

__all__ = ["norm_based"]


def norm_based(
    layer: LayerTrace | Float[Tensor, "b h q k"],
    values: Float[Tensor, "b g k e"] | None = None,
    *,
    projection: Float[Tensor, "m he"] | None = None,
    key_visible: Bool[Tensor, "b k"] | None = None,
    causal: bool = False,
    offset: int = 0,
    mask: Bool[Tensor, "#b #h q k"] | None = None,
) -> Float[Tensor, "b h q k"]:
    """|alpha_ij f(x_j)| = |alpha_ij| |v_j W_O^h| (Kobayashi et al., 2020), W_O^h the head's part of ``projection``.

    A recorded layer brings its projection; where none is known the norm is that of v_j itself.

    >>> w, v = torch.tensor([[[[0.75, 0.25]]]]), torch.tensor([[[[1.0, 0.0], [3.0, 4.0]]]])
    >>> norm_based(w, v)
    tensor([[[[0.7500, 1.2500]]]])
    """
    g = given(layer, values, key_visible=key_visible, causal=causal, offset=offset, mask=mask)
    if isinstance(layer, LayerTrace) and projection is None:
        projection = layer.projection
    w = g.clean_weights()
    return w.abs() * transformed_norms(g.clean_values(), w.shape[1], projection)[:, :, None].to(w.dtype)


def transformed_norms(
    v: Float[Tensor, "b g k e"], heads: int, projection: Float[Tensor, "m he"] | None
) -> Float[Tensor, "b h k"]:
    """|v_j W_O^h| for every query head, without making the (b, h, k, m) vectors."""
    v = repeat_groups(v, heads // v.shape[1])
    if projection is None:
        return torch.linalg.vector_norm(v, dim=-1)
    if projection.shape[1] != heads * v.shape[-1]:
        raise ValueError(
            f"projection must be (m, heads * width) = (m, {heads * v.shape[-1]}), got {tuple(projection.shape)}; "
            "is it the weight of W_O, not its transpose?"
        )
    # (h, m, e)
    parts = projection.detach().unflatten(1, (heads, v.shape[-1])).transpose(0, 1).double()
    gram = parts.mT @ parts
    squares = ((v.double() @ gram) * v.double()).sum(-1)
    return squares.clamp(min=0).sqrt().to(v.dtype)
