"""``convert``: another attention in a pretrained model for good; it trains, saves, loads and generates with it."""

from __future__ import annotations

import copy as copying
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from attnlab.adapters.installed import Installed, installed_in
from attnlab.adapters.interface import install, switch_for_good, uninstall
from attnlab.adapters.sites import Layers, Site, find_sites, refuse_partial, select
from attnlab.attention import Mechanism
from attnlab.mechanisms._device import to_model_device
from attnlab.registry import mechanism, spec_of, stored_mechanism

__all__ = ["CONTAINER", "convert", "is_converted", "restore_conversion"]

# The name of the new parameters' module in the model, and of the section in its config.
CONTAINER = "attnlab"
KINDS = {"encoder": "encoder", "causal": "decoder", "decoder": "decoder", "cross": "cross"}

Model = TypeVar("Model", bound=nn.Module)
Mechanisms = Mechanism | str | Mapping[str, Mechanism | str]


def convert(
    model: Model,
    mech: Mechanisms,
    *,
    layers: Layers = None,
    kinds: Iterable[str] | None = None,
    bias: str = "refuse",
    copy: bool = False,
    example: Mapping[str, Any] | None = None,
) -> Model:
    """Make ``model`` attend by ``mech`` from now on, in place unless ``copy``; returns the converted model.

    ``mech`` is a mechanism or spec, for the attention of all ``kinds`` ("encoder", "causal", "cross": those that the
    model has), or one for each kind: {"causal": "abc-mlp:slots=8", "cross": "abc-mlp:slots=32"}.
    The pretrained weights stay. New parameters are in ``model.attnlab``, one set for all layers of a kind where the
    mechanism is tied, and in the state dict. ``bias="drop"`` leaves out T5's position bias, which slots cannot take.
    Attention dropout is left out of converted layers. ``example`` is a batch to run once, where two tokens do not do.
    """
    own = getattr(model, "convert_attention", None)
    if bias not in ("refuse", "drop"):
        raise ValueError(f"bias must be 'refuse' or 'drop', got {bias!r}")
    if copy:
        model = copying.deepcopy(model)
        own = getattr(model, "convert_attention", None)
    if own is not None:
        own(_by_kind(mech, kinds), layers=layers)
        return model
    sites = find_sites(model)
    if is_converted(model):
        raise ValueError(
            f"this {type(model).__name__} is converted already; load the unconverted model, and give convert() a "
            'mapping such as {"causal": ..., "cross": ...} for several mechanisms at once'
        )
    if layers is None:
        refuse_partial(model, sites)
    wanted = _by_kind(mech, kinds)
    chosen = [site for site in select(sites, layers) if site.kind in wanted]
    if not chosen:
        has = ", ".join(sorted({site.kind for site in sites}))
        raise ValueError(f"no attention of kind {', '.join(wanted)} among the chosen layers; the model has {has}")
    _refuse_partial_bias(chosen, sites)
    _install(model, _grouped(chosen, wanted), drop_bias=bias == "drop", example=example)
    return model


def is_converted(model: nn.Module) -> bool:
    """Whether ``convert`` was applied to this model."""
    return any(installed_in(module) is not None for module in model.modules())


def restore_conversion(model: Model, section: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Model:
    """Convert as a config's section ``attnlab`` says, with the parameters that were saved beside the model's own."""
    sites = {f"{site.kind} {site.layer}": site for site in find_sites(model)}
    groups: dict[str, tuple[Mechanism, list[Site]]] = {}
    try:
        for name, group in section["groups"].items():
            groups[name] = (stored_mechanism(group["mechanism"]), [sites[key] for key in group["layers"]])
        drop_bias = section["bias"] == "drop"
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the conversion in this model's config cannot be read ({error!r})") from None
    _install(model, groups, drop_bias=drop_bias, example=None)
    container = getattr(model, CONTAINER)
    found = {name.removeprefix(f"{CONTAINER}."): t for name, t in tensors.items()}
    expected = dict(container.state_dict())
    wrong = sorted(found.keys() ^ expected.keys())
    wrong += sorted(name for name in found.keys() & expected.keys() if found[name].shape != expected[name].shape)
    if wrong:
        raise ValueError(
            f"the conversion's parameters do not fit its config: {len(wrong)} differ, such as {CONTAINER}.{wrong[0]}"
        )
    container.load_state_dict(found)
    return model


def _by_kind(mech: Mechanisms, kinds: Iterable[str] | None) -> dict[str, Mechanism]:
    """The mechanism of each kind of site."""
    named = () if kinds is None else (kinds,) if isinstance(kinds, str) else tuple(kinds)
    given: dict[str, Mechanism | str]
    if isinstance(mech, Mapping):
        given = dict(mech)
    else:
        given = dict.fromkeys(("encoder", "causal", "cross") if kinds is None else named, mech)
    for kind in (*named, *given):
        if kind not in KINDS:
            raise ValueError(f"a kind is encoder, causal (or decoder) or cross, got {kind!r}")
    if kinds is not None and {KINDS[kind] for kind in named} != {KINDS[kind] for kind in given}:
        raise ValueError(f"the mapping is for {', '.join(given)}, but kinds says {', '.join(named)}; leave kinds out")
    if not given:
        raise ValueError("no kind of attention to convert was given")
    return {KINDS[kind]: mechanism(m) for kind, m in given.items()}


def _grouped(chosen: list[Site], wanted: Mapping[str, Mechanism]) -> dict[str, tuple[Mechanism, list[Site]]]:
    """{name: (mechanism, its sites)}; layers of a kind share one that is tied or that learns nothing."""
    groups: dict[str, tuple[Mechanism, list[Site]]] = {}
    for site in chosen:
        mech = wanted[site.kind]
        tied = mech.tied_across_layers or not isinstance(mech, nn.Module)
        name = site.kind if tied else f"{site.kind}_{site.layer}"
        # A copy: another model, or another kind with other shapes, may be converted with the same object.
        groups.setdefault(name, (copying.deepcopy(mech), []))[1].append(site)
    return groups


def _install(
    model: nn.Module,
    groups: Mapping[str, tuple[Mechanism, list[Site]]],
    *,
    drop_bias: bool,
    example: Mapping[str, Any] | None,
) -> None:
    section = {
        "format": 1,
        "bias": "drop" if drop_bias else "refuse",
        "groups": {
            name: {"mechanism": spec_of(mech), "layers": [f"{site.kind} {site.layer}" for site in sites]}
            for name, (mech, sites) in groups.items()
        },
    }
    placed = [(to_model_device(model, mech), site) for mech, sites in groups.values() for site in sites]
    switch_for_good(model, on=True)
    installed = {
        (site.kind, site.layer): Installed(mech, site.kind, site.layer, site.name, drop_bias) for mech, site in placed
    }
    for (kind, layer), mine in installed.items():
        after = installed.get((kind, layer + 1))
        if after is not None and all(one.mechanism.reads_memory for one in (mine, after)):
            mine.hands_on = after.handed = {}
    for _, site in placed:
        install(site.module, installed[site.kind, site.layer])
    try:
        _run_once(model, example)
        # Parameters made at the first call are there now.
        learned = {name: mech for name, (mech, _) in groups.items() if isinstance(mech, nn.Module)}
        first = next(model.parameters())
        setattr(model, CONTAINER, nn.ModuleDict(learned).to(first.device, first.dtype).train(model.training))
    except BaseException:
        for _, site in placed:
            uninstall(site.module)
        switch_for_good(model, on=False)
        raise
    model.config.attnlab = section  # type: ignore[union-attr]


def _run_once(model: nn.Module, example: Mapping[str, Any] | None) -> None:
    """A forward pass, in which mechanisms make their parameters and refuse what they cannot do."""
    if example is None:
        tokens = torch.tensor([[0, 1]], device=next(model.parameters()).device)
        example = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if getattr(model.config, "is_encoder_decoder", False):
            example["decoder_input_ids"] = tokens
    try:
        with _evaluating(model), torch.no_grad():
            model(**example)
    except TypeError as error:
        raise ValueError(
            f"{type(model).__name__} could not be run on two tokens ({error}); pass example=, a batch it takes"
        ) from error


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, before in training.items():
            module.training = before


def _refuse_partial_bias(chosen: list[Site], sites: list[Site]) -> None:
    """T5's first layer makes the bias of all layers from its keys, of which a converted one has only the new ones."""
    names = {site.name for site in chosen}
    for site in chosen:
        if getattr(site.module, "has_relative_attention_bias", False):
            left = [other.name for other in sites if other.kind == site.kind and other.name not in names]
            if left:
                raise ValueError(
                    f"{site.name} makes the position bias of {left[0]} too, so it can be converted only together with "
                    "all layers of its kind; leave it out, or convert them all with bias='drop'"
                )
