"""Norm-based analysis (Kobayashi et al., 2020): how long the vector is that a key adds to a query's output."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from attnlab.attention import repeat_groups
from attnlab.reading._input import Masks, ReadingInput
from attnlab.reading.registry import reading
from attnlab.shapes import Float
from attnlab.trace import LayerTrace

__all__ = ["norm_based", "transformed_norms"]


@reading(
    "norm",
    "The length of the vector that a key adds to a query, after W_O (Kobayashi et al., 2020).",
    needs=("values",),
    cannot="know W_O of a quantised model; the length is then that of the value itself",
)
def norm_based(
    layer: LayerTrace | ReadingInput | Float[Tensor, "b h q k"],
    values: Float[Tensor, "b g k e"] | None = None,
    *,
    projection: Float[Tensor, "m he"] | None = None,
    **masks: Unpack[Masks],
) -> Float[Tensor, "b h q k"]:
    """|alpha_ij f(x_j)| = |alpha_ij| |v_j W_O^h| (Kobayashi et al., 2020), W_O^h the head's part of ``projection``.

    A recorded layer brings its projection; where none is known the norm is that of v_j itself.

    >>> w, v = torch.tensor([[[[0.75, 0.25]]]]), torch.tensor([[[[1.0, 0.0], [3.0, 4.0]]]])
    >>> norm_based(w, v)
    tensor([[[[0.7500, 1.2500]]]])
    """
    source = ReadingInput.of(layer, values, **masks)
    w = source.clean_weights()
    norms = transformed_norms(
        source.clean_values(), w.shape[1], source.projection if projection is None else projection
    )
    return w.abs() * norms[:, :, None].to(w.dtype)


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
