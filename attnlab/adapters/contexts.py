"""``swap`` and ``record``: context managers over one model, nestable, undone on exit whatever happens inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from attnlab.adapters.protocol import Frame, Layers, Site, adapter_of, refuse_partial, select
from attnlab.attention import AttentionCall, Mechanism
from attnlab.mechanisms._device import to_model_device
from attnlab.registry import mechanism
from attnlab.trace import LayerTrace, Trace

if TYPE_CHECKING:
    from attnlab.adapters.plan import Plan

__all__ = ["record", "swap"]


@contextmanager
def swap(
    model: nn.Module,
    mech: Mechanism | str | Plan,
    *,
    layers: Layers = None,
    dropout: str = "refuse",
) -> Iterator[nn.Module]:
    """Inside the context, ``model`` attends by ``mech``, in all layers or in those named: 3, ("cross", 3), "decoder".

    Negative numbers count from the end, as in Python: -1 is the last layer; a number that no layer has is refused.
    Any Hugging Face model, and any with attention layers of ``attnlab.models``. Other layers keep the model's own
    attention. A model in training mode that drops attention weights is refused unless ``mech`` is softmax, whose
    dropout is the model's own, or ``dropout="skip"``. A ``Plan`` names a mechanism for each of its layers.
    """
    from attnlab.adapters.plan import Plan, swap_plan

    if isinstance(mech, Plan):
        if layers is not None:
            raise ValueError("a plan names its layers itself; leave layers= out")
        with swap_plan(model, mech, dropout=dropout):
            yield model
        return
    adapter = adapter_of(model)
    mech = to_model_device(model, mechanism(mech))
    if dropout not in ("refuse", "skip"):
        raise ValueError(f"dropout must be 'refuse' or 'skip', got {dropout!r}")
    frame = Frame(mechanism=mech, skip_dropout=dropout == "skip")
    sites = adapter.sites()
    if layers is None:
        refuse_partial(model, sites)
    chosen = select(sites, layers)
    with adapter.attach({site: replace(frame, mechanism=mech.in_layer(site.kind, site.layer)) for site in chosen}):
        yield model


@contextmanager
def record(model: nn.Module, *, layers: Layers = None, keep: str = "last") -> Iterator[Trace]:
    """Inside the context, every forward pass fills the trace with each layer's q, k, v, x and output, without copies.

    A layer's last call is kept: after ``generate``, the last decoding step. ``keep="all"`` keeps every call, which
    ``trace.history(3)`` lists. Tensors stay in the autograd graph when the model runs with gradients.

    >>> import torch
    >>> from attnlab.models import Transformer, TransformerConfig
    >>> model = Transformer(TransformerConfig(kind="encoder", vocab=11, width=8, heads=2, layers=2))
    >>> with record(model) as trace:
    ...     output = model(torch.tensor([[1, 2, 3]]))
    >>> trace[1].weights().shape
    torch.Size([1, 2, 3, 3])
    """
    adapter = adapter_of(model)
    trace = Trace(keep=keep, metadata={"model": type(model).__name__})

    def note(site: Site, call: AttentionCall, mech: Mechanism, output: Tensor) -> None:
        width = output.shape[1] * output.shape[3]
        trace.add(LayerTrace(call, mech, output, site.projection(width), site.kind, site.layer, site.name))

    frame = Frame(note=note)
    with adapter.attach(dict.fromkeys(select(adapter.sites(), layers), frame)):
        yield trace
