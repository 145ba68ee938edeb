"""Effective attention times the norms: what effective attention adds to norm-based analysis."""

from __future__ import annotations

from torch import Tensor

from attnlab.reading._input import ReadingInput
from attnlab.reading.effective import effective_of_input
from attnlab.reading.norm_based import transformed_norms
from attnlab.reading.registry import reading
from attnlab.shapes import Float
from attnlab.trace import LayerTrace

__all__ = ["effective_norm"]


@reading(
    "effective norm",
    "The effective weight times the length of the value after W_O.",
    needs=("values",),
    cannot="read values that are NaN or infinite at a visible key",
    control=True,
)
def effective_norm(layer: LayerTrace | ReadingInput) -> Float[Tensor, "b h q k"]:
    """|W_perp_ij| |v_j W_O^h|: ``norm_based`` with effective attention in place of W."""
    source = ReadingInput.of(layer)
    w = effective_of_input(source).weights
    return w.abs() * transformed_norms(source.clean_values(), w.shape[1], source.projection)[:, :, None].to(w.dtype)
