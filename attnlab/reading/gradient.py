"""Gradient times attention: what a prediction would lose, to first order, if a weight were taken away."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from attnlab.attention import grouped, ungrouped
from attnlab.reading._input import given
from attnlab.shapes import Bool, Float
from attnlab.trace import LayerTrace, Trace

__all__ = ["gradient_times_attention", "output_gradients"]


def output_gradients(trace: Trace | Iterable[LayerTrace], target: Tensor) -> list[Float[Tensor, "b h q e"]]:
    """d target / d O for every recorded layer; ``target`` is a scalar of the recorded forward pass, such as a logit."""
    layers = list(trace)
    if target.numel() != 1 or not target.requires_grad:
        raise ValueError(
            f"target must be one number with a gradient, got {tuple(target.shape)}; "
            "run the model inside record() without torch.no_grad(), and sum or index its logits"
        )
    slopes = torch.autograd.grad(target, [layer.output for layer in layers], retain_graph=True, allow_unused=True)
    return [torch.zeros_like(o.output) if g is None else g for o, g in zip(layers, slopes, strict=True)]


def gradient_times_attention(
    layer: LayerTrace | Float[Tensor, "b h q k"],
    values: Float[Tensor, "b g k e"] | None = None,
    *,
    output_gradient: Float[Tensor, "b h q e"],
    key_visible: Bool[Tensor, "b k"] | None = None,
    causal: bool = False,
    offset: int = 0,
    mask: Bool[Tensor, "#b #h q k"] | None = None,
) -> Float[Tensor, "b h q k"]:
    """alpha_ij dL/dalpha_ij; since O = W V, dL/dW = (dL/dO) V^T, so W itself need not be in the model's graph.

    >>> w, v = torch.tensor([[[[0.75, 0.25]]]]), torch.tensor([[[[1.0], [2.0]]]])
    >>> gradient_times_attention(w, v, output_gradient=torch.tensor([[[[10.0]]]]))
    tensor([[[[7.5000, 5.0000]]]])
    """
    g = given(layer, values, key_visible=key_visible, causal=causal, offset=offset, mask=mask)
    w, v = g.clean_weights(), g.clean_values()
    slope = grouped(output_gradient, w.shape[1] // v.shape[1]) @ v.unsqueeze(2).mT
    return w * ungrouped(slope)
