"""Hugging Face models as the protocol sees them: every module that attends through transformers' AttentionInterface."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from attnlab.adapters.adopted import PREFIX
from attnlab.adapters.attention_function import INTERFACE, registered_name
from attnlab.adapters.evict import refuse_other_attention
from attnlab.adapters.handed_on import hands_keys_on
from attnlab.adapters.module_state import (
    CACHES,
    Installed,
    add_frame,
    argument_names,
    current_mechanism,
    evicts,
    forward_of,
    install,
    installed_in,
    remove_frame,
    uninstall,
)
from attnlab.adapters.outside_interface import family_of
from attnlab.adapters.protocol import Frame, Groups, ModelAdapter, Site
from attnlab.adapters.rotary import rotation_of
from attnlab.attention import AttentionCall, Mechanism
from attnlab.caches.contract import Place
from attnlab.caches.kv_policy import KVPolicy
from attnlab.mechanisms._device import to_model_device
from attnlab.mechanisms.softmax import Softmax
from attnlab.registry import spec_of, stored_mechanism
from attnlab.shapes import Float, Int
from attnlab.trace import Kind

__all__ = ["CONTAINER", "HuggingFaceModel", "restore_conversion"]

# The name of the new parameters' module in a converted model, and of the section in its config.
CONTAINER = "attnlab"
CROSS = re.compile(r"cross|enc_?dec|encoder_attn", re.IGNORECASE)
OUTPUT_LINEARS = ("o_proj", "out_proj", "c_proj", "Wo", "o", "out_lin", "dense", "wo", "to_out")

Model = TypeVar("Model", bound=nn.Module)


class HuggingFaceModel(ModelAdapter):
    """A model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Whether a module of the model attends through transformers' AttentionInterface, or can be led through it."""
        return any(_attends(module) for module in model.modules())

    def sites(self) -> list[Site]:
        """Its attention modules, numbered by kind."""
        modules = dict(self.model.named_modules())
        counts: dict[Kind, int] = {}
        sites = []
        for name, module in modules.items():
            if not _attends(module):
                continue
            kind = _kind(name, module)
            layer = counts.get(kind, 0)
            counts[kind] = layer + 1
            parent = modules.get(name.rpartition(".")[0])
            sites.append(Site(module, kind, layer, name, _output_linear(module, parent)))
        return sites

    @contextmanager
    def attach(self, frames: Mapping[Site, Frame]) -> Iterator[None]:
        """Make the configs name our attention function, which reads the frames."""
        with ExitStack() as undo:
            for config in _configs(self.model):
                _switch_on(config)
                undo.callback(_switch_off, config)
            for site, frame in frames.items():
                add_frame(site, frame)
                undo.callback(remove_frame, site, frame)
            yield

    def mechanism_at(self, site: Site) -> Mechanism:
        """The innermost swap, the conversion, or softmax."""
        return current_mechanism(site.module)

    def conversions(self) -> Sequence[Installed]:
        """What ``convert`` installed."""
        installed = [installed_in(module) for module in self.model.modules()]
        return [conversion for conversion in installed if conversion is not None]

    def convert(self, groups: Groups, *, drop_bias: bool, example: Mapping[str, Any] | None) -> None:
        """Install the mechanisms; their parameters go to ``model.attnlab``, their specs to the config."""
        _refuse_partial_bias([site for _, sites in groups.values() for site in sites], self.sites())
        _install(self.model, groups, drop_bias=drop_bias, example=example)

    @contextmanager
    def evicting_cache(self, policy: KVPolicy) -> Iterator[Any]:
        """A ``past_key_values``; it must be passed to every call inside the context."""
        from attnlab.adapters.evicting_cache import EvictingCache, refuse_states, whole_prompts

        sites = self.sites()
        if any(site.kind == "cross" for site in sites) or not any(site.kind == "decoder" for site in sites):
            raise ValueError(f"{type(self.model).__name__} is no decoder-only model, and only those can evict keys")
        refuse_states(self.model)
        decoder = [site for site in sites if site.kind == "decoder"]
        for site in decoder:
            refuse_other_attention(site.name, self.mechanism_at(site))
            if evicts(site.module):
                raise ValueError(
                    f"this {type(self.model).__name__} is inside evicting() already, and its layers evict from one "
                    "cache; end that context first"
                )
        cache = EvictingCache(policy, self.model.config.get_text_config(decoder=True).num_hidden_layers)
        rotations = {site.module: rotation_of(self.model, site.module, forward_of(site.module)) for site in decoder}

        def of_call() -> EvictingCache:
            """The cache itself, or the copy of it that the call under way brought."""
            assert cache.session.cache is not None
            return cache.session.cache

        def evict(site: Site, call: AttentionCall, mech: Mechanism, _output: Tensor) -> None:
            refuse_other_attention(site.name, mech)
            projection, used = site.projection(call.q.shape[1] * call.v.shape[-1]), of_call()
            place = Place(used.current, len(used.layers), projection, *rotations[site.module])
            used.of_call().evict(call, place, handed_on=hands_keys_on(forward_of(site.module)))

        frame = Frame(
            mechanism=Softmax(),
            note=evict,
            skip_dropout=True,
            direct=lambda *args: of_call().step(*args),
            cached_keys=lambda _: of_call().of_call().cached_keys(),
        )
        with self.attach(dict.fromkeys(decoder, frame)), cache.opened(self.model), whole_prompts(self.model, policy):
            yield cache

    def logits(self, ids: Int[Tensor, "b q"], *, cache: Any = None) -> Float[Tensor, "b q v"]:
        """The model's logits."""
        if cache is None:
            return self.model(ids, use_cache=False).logits
        return self.model(ids, past_key_values=cache, use_cache=True).logits


def restore_conversion(model: Model, section: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Model:
    """Convert as a config's section ``attnlab`` says, with the parameters that were saved beside the model's own."""
    sites = {f"{site.kind} {site.layer}": site for site in HuggingFaceModel(model).sites()}
    groups: dict[str, tuple[Mechanism, list[Site]]] = {}
    try:
        for name, group in section["groups"].items():
            groups[name] = (stored_mechanism(group["mechanism"]), [sites[key] for key in group["layers"]])
        drop_bias = section["bias"] == "drop"
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the conversion in this model's config cannot be read ({error!r})") from None
    _install(model, groups, drop_bias=drop_bias, example=None)
    container = getattr(model, CONTAINER)
    stored = {name.removeprefix(f"{CONTAINER}."): t for name, t in tensors.items()}
    expected = dict(container.state_dict())
    wrong = sorted(stored.keys() ^ expected.keys())
    wrong += sorted(name for name in stored.keys() & expected.keys() if stored[name].shape != expected[name].shape)
    if wrong:
        raise ValueError(
            f"the conversion's parameters do not fit its config: {len(wrong)} differ, such as {CONTAINER}.{wrong[0]}"
        )
    container.load_state_dict(stored)
    return model


# Where a model attends


def _attends(module: nn.Module) -> bool:
    if family_of(module) is not None:
        return True
    code = getattr(forward_of(module), "__code__", None)
    return code is not None and INTERFACE in code.co_names


def _kind(name: str, module: nn.Module) -> Kind:
    family = family_of(module)
    if family is not None and family.kind is not None:
        return family.kind
    own_name = ".".join(name.split(".")[-2:])
    if getattr(module, "is_cross_attention", False) or CROSS.search(own_name) or CROSS.search(type(module).__name__):
        return "cross"
    # UMT5's decoder says that it is one, and that it is not causal: its mask makes it so.
    said = [getattr(module, name, None) for name in ("is_causal", "is_decoder")]
    causal = any(said)
    if said == [None, None] and family is None:
        # Of modules that say nothing (Doge), those that take a cache read a text from left to right.
        causal = not set(CACHES).isdisjoint(argument_names(type(module).forward))
    return "decoder" if causal else "encoder"


def _output_linear(module: nn.Module, parent: nn.Module | None) -> nn.Module | None:
    for name in OUTPUT_LINEARS:
        if isinstance(getattr(module, name, None), nn.Module):
            return getattr(module, name)
    # BERT and its family keep W_O in the module beside: attention.self and attention.output.dense.
    dense = getattr(getattr(parent, "output", None), "dense", None)
    return dense if isinstance(dense, nn.Module) else None


# The switch in the configs

_lock = threading.RLock()
# By id: the config (kept alive), its implementation before the first context, and how many contexts are open.
_switched: dict[int, tuple[Any, str | None, int]] = {}


def _configs(model: nn.Module) -> list[Any]:
    """Every config object that a module of the model consults, their sub-configs included."""
    configs: dict[int, Any] = {}

    def add(config: Any) -> None:
        if config is None or id(config) in configs or not hasattr(config, "_attn_implementation"):
            return
        configs[id(config)] = config
        for name in getattr(config, "sub_configs", {}):
            add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(configs.values())


def _switch_on(config: Any) -> None:
    with _lock:
        _, before, count = _switched.get(id(config), (None, config._attn_implementation, 0))
        if count == 0:
            _set_implementation(config, registered_name((before or "eager").removeprefix(PREFIX)))
        _switched[id(config)] = (config, before, count + 1)


def _switch_off(config: Any) -> None:
    with _lock:
        _, before, count = _switched[id(config)]
        if count > 1:
            _switched[id(config)] = (config, before, count - 1)
        else:
            del _switched[id(config)]
            _set_implementation(config, before)


def _switch_for_good(model: nn.Module, *, on: bool) -> None:
    """Make every config of the model name our function, or again the one whose place it takes."""
    with _lock:
        for config in _configs(model):
            own = (config._attn_implementation or "eager").removeprefix(PREFIX)
            name = registered_name(own) if on else own
            if id(config) in _switched:
                # An open context will put this back when it ends.
                _switched[id(config)] = (config, name, _switched[id(config)][2])
            else:
                _set_implementation(config, name)


def _set_implementation(config: Any, name: str | None) -> None:
    # A dict means "this config only": a plain name would spread to its sub-configs, which have their own. Some configs
    # without any take only a name.
    config._attn_implementation = {"": name} if getattr(config, "sub_configs", None) else name


# Conversion


def _install(model: nn.Module, groups: Groups, *, drop_bias: bool, example: Mapping[str, Any] | None) -> None:
    section = _config_section(groups, drop_bias=drop_bias)
    installed = [
        (site.module, Installed(to_model_device(model, mech), site.kind, site.layer, site.name, drop_bias))
        for mech, sites in groups.values()
        for site in sites
    ]
    _connect_memories([conversion for _, conversion in installed])
    _switch_for_good(model, on=True)
    for module, conversion in installed:
        install(module, conversion)
    try:
        _run_once(model, example)
        # Parameters made at the first call exist now.
        learned = {name: mech for name, (mech, _) in groups.items() if isinstance(mech, nn.Module)}
        first = next(model.parameters())
        setattr(model, CONTAINER, nn.ModuleDict(learned).to(first.device, first.dtype).train(model.training))
    except BaseException:
        for module, _ in installed:
            uninstall(module)
        _switch_for_good(model, on=False)
        raise
    model.config.attnlab = section  # type: ignore[union-attr]


def _config_section(groups: Groups, *, drop_bias: bool) -> dict[str, Any]:
    """The section of config.json from which ``restore_conversion`` converts again."""
    return {
        "format": 1,
        "bias": "drop" if drop_bias else "refuse",
        "groups": {
            name: {"mechanism": spec_of(mech), "layers": [f"{site.kind} {site.layer}" for site in sites]}
            for name, (mech, sites) in groups.items()
        },
    }


def _connect_memories(installed: list[Installed]) -> None:
    """Let layers of a kind hand their memory to the next, where the mechanisms of both have one (LUNA)."""
    by_place = {(conversion.kind, conversion.layer): conversion for conversion in installed}
    for (kind, layer), conversion in by_place.items():
        after = by_place.get((kind, layer + 1))
        if after is not None and all(one.mechanism.reads_memory for one in (conversion, after)):
            conversion.hands_on = after.handed = {}


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
    except (NotImplementedError, RuntimeError) as error:
        if not next(model.parameters()).is_meta:
            raise
        raise ValueError(
            f"{type(model).__name__} is on the meta device and cannot be run there ({error}); load its weights first"
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
