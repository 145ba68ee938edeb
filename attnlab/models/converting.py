"""Another attention in a transformer that is made already: its weights stay, its config names the new mechanisms."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from attnlab.attention import Mechanism
from attnlab.mechanisms._device import to_model_device
from attnlab.models.attention import Attention, attentions, put_mechanism
from attnlab.models.config import FIELDS, Kind, specs_per_layer
from attnlab.registry import mechanism, spec_of

if TYPE_CHECKING:
    from attnlab.models.transformer import Transformer

__all__ = ["convert_attention"]


def convert_attention(model: Transformer, mechs: Mapping[Kind, Mechanism | str], *, layers: Any = None) -> None:
    """Give the layers of these kinds their mechanism, one for all where it is tied; ``al.convert`` calls this."""
    chosen = [layer for layer in attentions(model) if layer.kind in mechs and _named(layer, layers)]
    if not chosen:
        raise ValueError(f"this model has no attention of kind {', '.join(mechs)} among the layers {layers!r}")
    converted = [layer for layer in attentions(model) if spec_of(layer.mechanism) != "softmax"]
    if converted:
        raise ValueError(
            f"layer {converted[0].layer} ({converted[0].kind}) of this model attends by "
            f"{spec_of(converted[0].mechanism)!r} already; convert a model whose attention is softmax"
        )
    specs = {kind: list(specs_per_layer(model.config, kind)) for kind in mechs if model.config.depth(kind)}
    shared: dict[Kind, Mechanism] = {}
    before = [(layer, layer.mechanism) for layer in chosen]
    for layer in chosen:
        mech = shared.get(layer.kind) or copy.deepcopy(mechanism(mechs[layer.kind]))
        if mech.tied_across_layers:
            shared[layer.kind] = mech
        put_mechanism(layer, to_model_device(model, mech))
        specs[layer.kind][layer.layer] = spec_of(mech)
    try:
        model.make_lazy_parameters()
    except BaseException:
        for layer, mech in before:
            put_mechanism(layer, mech)
        raise
    first = next(model.parameters())
    for layer in chosen:
        if isinstance(layer.mechanism, nn.Module):
            layer.mechanism.to(first.device, first.dtype)
    new: dict[str, Any] = {
        FIELDS[kind]: names[0] if len(set(names)) == 1 else tuple(names) for kind, names in specs.items()
    }
    config = replace(model.config, **new)
    for module in (model, model.encoder, model.decoder):
        if module is not None:
            module.config = config


def _named(layer: Attention, layers: Any) -> bool:
    if layers is None:
        return True
    keys: Iterable[Any] = layers if isinstance(layers, Iterable) and not isinstance(layers, (str, tuple)) else [layers]
    for key in keys:
        match key:
            case str():
                found = key == layer.kind
            case int():
                found = layer.kind != "cross" and key == layer.layer
            case (kind, number):
                found = (kind, number) == (layer.kind, layer.layer)
            case _:
                raise ValueError(f"a layer is a number, a kind or (kind, number), got {key!r}")
        if found:
            return True
    return False
