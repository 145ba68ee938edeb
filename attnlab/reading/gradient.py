"""Gradient times attention: what a prediction would lose, to first order, if a weight were taken away."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from typing_extensions import Unpack

from attnlab.attention import grouped, ungrouped
from attnlab.reading._input import Masks, ReadingInput
from attnlab.reading.registry import reading
from attnlab.shapes import Float
from attnlab.trace import LayerTrace, Trace

__all__ = ["gradient_times_attention", "output_gradients"]

CANNOT = "explain more than one number, and a forward pass that was recorded without gradients"


def output_gradients(trace: Trace | Iterable[LayerTrace], target: Tensor) -> list[Float[Tensor, "b h q e"]]:
    """d target / d O for every recorded layer; ``target`` is a scalar of the recorded forward pass, such as a logit."""
    layers = list(trace)
    if target.numel() != 1 or not target.requires_grad:
        raise ValueError(
            f"target must be one number with a gradient, got {tuple(target.shape)}; "
            "run the model inside record() without torch.no_grad(), and sum or index its logits"
        )
    slopes = torch.autograd.grad(target, [layer.output for layer in layers], retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(layer.output) if slope is None else slope for layer, slope in zip(layers, slopes, strict=True)
    ]


@reading(
    "gradient summed",
    "Gradient times attention whose signs cancel when it is summed over heads and queries.",
    needs=("values", "gradients"),
    cannot=CANNOT,
    signed=True,
    control=True,
)
@reading(
    "gradient",
    "What a predicted number would lose, to first order, if the weight were taken away.",
    needs=("values", "gradients"),
    cannot=CANNOT,
)
def gradient_times_attention(
    layer: LayerTrace | ReadingInput | Float[Tensor, "b h q k"],
    values: Float[Tensor, "b g k e"] | None = None,
    *,
    output_gradient: Float[Tensor, "b h q e"],
    **masks: Unpack[Masks],
) -> Float[Tensor, "b h q k"]:
    """alpha_ij dL/dalpha_ij; since O = W V, dL/dW = (dL/dO) V^T, so W itself need not be in the model's graph.

    >>> w, v = torch.tensor([[[[0.75, 0.25]]]]), torch.tensor([[[[1.0], [2.0]]]])
    >>> gradient_times_attention(w, v, output_gradient=torch.tensor([[[[10.0]]]]))
    tensor([[[[7.5000, 5.0000]]]])
    """
    source = ReadingInput.of(layer, values, **masks)
    w, v = source.clean_weights(), source.clean_values()
    slope = grouped(output_gradient, w.shape[1] // v.shape[1]) @ v.unsqueeze(2).mT
    return w * ungrouped(slope)
