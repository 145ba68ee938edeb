"""Random numbers in place of a map: the control that a reading must beat."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.attention import visible
from attnlab.reading.registry import reading
from attnlab.shapes import Float
from attnlab.trace import LayerTrace

__all__ = ["random_map"]


@reading("random", "A random number between 0 and 1.", needs=("noise",), control=True)
def random_map(layer: LayerTrace, *, generator: torch.Generator) -> Float[Tensor, "b h q k"]:
    """Uniform random numbers at the visible keys of each query."""
    numbers = torch.rand(layer.call.sizes, generator=generator).to(layer.call.q.device)
    seen = visible(layer.call)
    return numbers if seen is None else numbers.masked_fill(~seen, 0)
