"""``record`` for the models of this package: the same ``Trace`` that Hugging Face models give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor, nn

from attnlab.attention import AttentionCall
from attnlab.models.attention import Attention, attentions
from attnlab.trace import LayerTrace, Trace

__all__ = ["record_model"]


@contextmanager
def record_model(model: nn.Module, *, keep: Literal["last", "all"] = "last") -> Iterator[Trace]:
    """Note every attention call made inside the ``with``; gradients flow if the model runs with them.

    >>> import torch
    >>> from attnlab.models import Transformer, TransformerConfig
    >>> model = Transformer(TransformerConfig(kind="encoder", vocab=11, width=8, heads=2, layers=2))
    >>> with record_model(model) as trace:
    ...     output = model(torch.tensor([[1, 2, 3]]))
    >>> trace[1].weights().shape
    torch.Size([1, 2, 3, 3])
    """
    layers = attentions(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no attention layer of this package; for others use attnlab.record"
        )
    names = {id(module): name for name, module in model.named_modules()}
    trace = Trace(keep=keep)

    def note(layer: Attention, call: AttentionCall, output: Tensor) -> None:
        trace.add(
            LayerTrace(
                call=call,
                mechanism=layer.mechanism,
                output=output,
                projection=layer.out.weight,
                kind=layer.kind,
                layer=layer.layer,
                name=names[id(layer)],
            )
        )

    for layer in layers:
        layer.observers.append(note)
    try:
        yield trace
    finally:
        for layer in layers:
            layer.observers.remove(note)
