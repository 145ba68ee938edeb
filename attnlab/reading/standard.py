"""The weights themselves: W as the mechanism made it."""

from __future__ import annotations

from torch import Tensor

from attnlab.reading.registry import reading
from attnlab.shapes import Float
from attnlab.trace import LayerTrace

__all__ = ["standard_weights"]


@reading("standard", "The attention weight W.")
def standard_weights(layer: LayerTrace) -> Float[Tensor, "b h q k"]:
    """W of a recorded layer."""
    return layer.weights()
