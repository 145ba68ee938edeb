"""Attention rollout (Abnar and Zuidema, 2020): attention followed down through the layers and the residual stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from attnlab.attention import normalise
from attnlab.reading.registry import reading
from attnlab.shapes import Float
from attnlab.trace import LayerTrace, Trace

__all__ = ["rollout", "rollout_by_layer"]


def rollout(
    layers: Trace | Iterable[LayerTrace | Float[Tensor, "b h q k"]], *, residual: float = 0.5
) -> list[Float[Tensor, "b 1 q k"]]:
    """For each layer, how much each input token feeds each position: the product of residual I + (1 - residual) W.

    W is averaged over heads and its rows normalised (Abnar and Zuidema, 2020, Eq. 1). Self-attention over the whole
    sequence only: a layer that attends to other tokens than its own has no residual to follow, and is left out. The
    encoder and the decoder of a recorded model are followed apart.

    >>> w = torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]])
    >>> rollout([w, w])[1]
    tensor([[[[1.0000, 0.0000],
              [0.7500, 0.2500]]]])
    """
    maps = [rolled for rolled in rollout_by_layer(layers, residual=residual) if rolled is not None]
    if not maps:
        raise ValueError("rollout was given no self-attention layer")
    return maps


@reading(
    "rollout",
    "How much an input token feeds a position through this layer and all below it (Abnar and Zuidema, 2020).",
    needs=("all layers",),
    cannot="follow cross-attention, which has no residual stream between its queries and its keys",
)
def rollout_by_layer(
    layers: Trace | Iterable[LayerTrace | Float[Tensor, "b h q k"]], *, residual: float = 0.5
) -> Iterator[Float[Tensor, "b 1 q k"] | None]:
    """``rollout``, one layer after the other; None for cross-attention."""
    if not 0 <= residual < 1:
        raise ValueError(f"residual must be in [0, 1), got {residual}")
    below: dict[str, Tensor] = {}
    for layer in layers:
        kind = layer.kind if isinstance(layer, LayerTrace) else ""
        if kind == "cross":
            yield None
            continue
        w = layer.weights() if isinstance(layer, LayerTrace) else layer
        last = below.get(kind)
        _check_stack(w, last)
        eye = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
        step = normalise(normalise(w.mean(1, keepdim=True)) * (1 - residual) + residual * eye)
        below[kind] = step if last is None else step @ last
        yield below[kind]


def _check_stack(w: Tensor, last: Tensor | None) -> None:
    if w.shape[2] != w.shape[3]:
        raise ValueError(
            f"rollout needs self-attention over whole sequences, got {w.shape[2]} queries, {w.shape[3]} keys"
        )
    if last is not None and last.shape[2:] != w.shape[2:]:
        raise ValueError(f"rollout needs one stack of layers, got lengths {last.shape[2]} and {w.shape[2]}")
