"""``convert``: another attention in a pretrained model for good; it trains, saves, loads and generates with it."""

from __future__ import annotations

import copy as copying
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from attnlab.adapters.plan import Plan, refuse_other_model
from attnlab.adapters.protocol import Layers, ModelAdapter, Site, adapter_of, refuse_partial, select
from attnlab.attention import Mechanism
from attnlab.fields import expect
from attnlab.registry import mechanism

__all__ = ["convert", "is_converted"]

KINDS = {"encoder": "encoder", "causal": "decoder", "decoder": "decoder", "cross": "cross"}

Model = TypeVar("Model", bound=nn.Module)
Mechanisms = Mechanism | str | Mapping[str, Mechanism | str]


def convert(
    model: Model,
    mech: Mechanisms | Plan,
    *,
    layers: Layers = None,
    kinds: Iterable[str] | None = None,
    bias: str = "refuse",
    copy: bool = False,
    example: Mapping[str, Any] | None = None,
) -> Model:
    """Make ``model`` attend by ``mech`` from now on, in place unless ``copy``; returns the converted model.

    ``mech`` is a mechanism or spec, for the attention of all ``kinds`` ("encoder", "causal", "cross": those that the
    model has), or one for each kind: {"causal": "abc-mlp:slots=8", "cross": "abc-mlp:slots=32"}, or a ``Plan``, which
    names one for each of its layers.
    The pretrained weights stay. New parameters are part of the model and of its state dict, one set for all layers of a
    kind where the mechanism is tied: in ``model.attnlab`` of a Hugging Face model, in the layers of our Transformer,
    whose config then names the mechanisms. ``bias="drop"`` leaves out T5's position bias, which slots cannot take.
    Attention dropout is left out of converted layers. ``example`` is a batch for the one forward pass in which the
    parameters are made, for models that cannot run on two tokens.
    """
    if bias not in ("refuse", "drop"):
        raise ValueError(f"bias must be 'refuse' or 'drop', got {bias!r}")
    expect("model", model, nn.Module, "a model (torch.nn.Module)")
    meta = [parameter.is_meta for parameter in model.parameters()]
    if any(meta) and (not all(meta) or any(hasattr(module, "_hf_hook") for module in model.modules())):
        raise ValueError(
            f"parameters of this {type(model).__name__} are offloaded, so no new ones can be made beside them; load "
            "the whole model, convert it, then offload it"
        )
    if copy:
        model = copying.deepcopy(model)
    adapter = adapter_of(model)
    _refuse_converted(model, adapter)
    sites = adapter.sites()
    if isinstance(mech, Plan):
        refuse_other_model(model, mech)
        adapter.convert(_planned(sites, mech, layers, kinds), drop_bias=bias == "drop", example=example)
        return model
    if layers is None:
        refuse_partial(model, sites)
    mechanisms = _by_kind(mech, kinds)
    chosen = [site for site in select(sites, layers) if site.kind in mechanisms]
    if not chosen:
        present = ", ".join(sorted({site.kind for site in sites}))
        raise ValueError(
            f"no attention of kind {', '.join(mechanisms)} among the chosen layers; the model has {present}"
        )
    adapter.convert(_grouped(chosen, mechanisms), drop_bias=bias == "drop", example=example)
    return model


def is_converted(model: nn.Module) -> bool:
    """Whether a layer of the model attends for good by another mechanism than softmax.

    ``convert`` makes it so, and so does the config of our Transformer.
    """
    try:
        return bool(adapter_of(model).conversions())
    except ValueError:
        return False


def _refuse_converted(model: nn.Module, adapter: ModelAdapter) -> None:
    conversions = adapter.conversions()
    if conversions:
        first = conversions[0]
        raise ValueError(
            f"this {type(model).__name__} is converted already ({first.kind} layer {first.layer} attends by "
            f"{first.mechanism!r}); convert a model whose attention is softmax, and give convert() a mapping such as "
            '{"causal": ..., "cross": ...} for several mechanisms at once'
        )


def _by_kind(mech: Mechanisms, kinds: Iterable[str] | None) -> dict[str, Mechanism]:
    """The mechanism of each kind of site."""
    named = () if kinds is None else (kinds,) if isinstance(kinds, str) else tuple(kinds)
    mechanisms: dict[str, Mechanism | str]
    if isinstance(mech, Mapping):
        mechanisms = dict(mech)
    else:
        mechanisms = dict.fromkeys(("encoder", "causal", "cross") if kinds is None else named, mech)
    for kind in (*named, *mechanisms):
        if kind not in KINDS:
            raise ValueError(f"a kind is encoder, causal (or decoder) or cross, got {kind!r}")
    if kinds is not None and {KINDS[kind] for kind in named} != {KINDS[kind] for kind in mechanisms}:
        raise ValueError(
            f"the mapping is for {', '.join(mechanisms)}, but kinds says {', '.join(named)}; leave kinds out"
        )
    if not mechanisms:
        raise ValueError("no kind of attention to convert was given")
    return {KINDS[kind]: mechanism(m) for kind, m in mechanisms.items()}


def _planned(
    sites: list[Site], plan: Plan, layers: Layers, kinds: Iterable[str] | None
) -> dict[str, tuple[Mechanism, list[Site]]]:
    """{name: (mechanism, its one layer)}."""
    if layers is not None or kinds is not None:
        raise ValueError("a plan names its layers itself; leave layers= and kinds= out")
    if not plan.layers:
        raise ValueError("the plan names no layer, so there is nothing to convert")
    groups = {}
    for key, spec in plan.layers.items():
        for site in select(sites, [key]):
            groups[f"{site.kind}_{site.layer}"] = (mechanism(spec).in_layer(site.kind, site.layer), [site])
    return groups


def _grouped(chosen: list[Site], mechanisms: Mapping[str, Mechanism]) -> dict[str, tuple[Mechanism, list[Site]]]:
    """{name: (mechanism, its sites)}; layers of a kind share one that is tied or that learns nothing."""
    groups: dict[str, tuple[Mechanism, list[Site]]] = {}
    for site in chosen:
        mech = mechanisms[site.kind].in_layer(site.kind, site.layer)
        tied = mech.tied_across_layers or (mech is mechanisms[site.kind] and not isinstance(mech, nn.Module))
        name = site.kind if tied else f"{site.kind}_{site.layer}"
        # A copy: another model, or another kind with other shapes, may be converted with the same object.
        groups.setdefault(name, (copying.deepcopy(mech), []))[1].append(site)
    return groups
