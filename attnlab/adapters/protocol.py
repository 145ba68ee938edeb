"""What attnlab asks of a model: one protocol, offered by Hugging Face models and by models with our attention layers.

``adapter_of(model)`` finds the adapter. ``swap``, ``record``, ``convert``, ``evicting``, ``guide`` and the readings use
nothing else of a model.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from attnlab.attention import AttentionCall, Mechanism
from attnlab.shapes import Float, Int
from attnlab.summaries import short_repr
from attnlab.trace import Kind

if TYPE_CHECKING:
    from attnlab.caches.kv_policy import KVPolicy

__all__ = [
    "CachedKeys",
    "Conversion",
    "Frame",
    "Groups",
    "Layers",
    "ModelAdapter",
    "Site",
    "adapter_of",
    "refuse_partial",
    "select",
]

# What ``layers=`` takes: numbers, (kind, number) pairs or kinds, one or several.
Layers = int | str | tuple[str, int] | Iterable[Any] | None

LAYER_NAME = re.compile(r"(?:(?P<kind>\w+) )?(?P<number>-?\d+)")


@dataclass(frozen=True, eq=False)
class Site:
    """One place where a model attends."""

    module: nn.Module
    kind: Kind
    layer: int
    name: str
    # The linear map that mixes the heads; None where it is not known.
    output_linear: nn.Module | None

    def projection(self, width: int) -> Tensor | None:
        """The weight of W_O as (m, h*e), given h*e; None where it is unknown or stored packed."""
        weight = getattr(self.output_linear, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            return None
        # GPT-2's Conv1D keeps its weight as (in, out).
        weight = weight.T if type(self.output_linear).__name__ == "Conv1D" else weight
        return weight if weight.shape[1] == width else None


@dataclass(frozen=True, eq=False)
class CachedKeys:
    """The keys of a site that an evicting cache holds, those of the call under way included."""

    tokens_read: int
    # The column of the text of each key, -1 where a head holds fewer keys; None where no key was evicted.
    positions: Int[Tensor, "b g n"] | None = None
    # Whether some heads hold fewer keys than others.
    ragged: bool = False
    # The keys and values themselves, where the model was given the new ones only.
    kept: tuple[Tensor, Tensor] | None = None
    # (queries) -> what is added to their scores with each key, None where nothing is.
    bias: Callable[[Tensor], Tensor | None] = lambda _: None

    __repr__ = short_repr


Note = Callable[[Site, AttentionCall, Mechanism, Tensor], None]
# (site, call, mechanism) -> the output, or None to decline.
Attend = Callable[[Site, AttentionCall, Mechanism], Tensor | None]
# (module, query, key, value, mask, the other arguments of transformers) -> (output, weights), or None to decline.
Direct = Callable[[nn.Module, Tensor, Tensor, Tensor, Any, Mapping[str, Any]], tuple[Tensor, Tensor | None] | None]


@dataclass(frozen=True, eq=False)
class Frame:
    """What one context asks of a site: to attend by a mechanism, to note its calls, or both.

    Where contexts nest, the innermost mechanism attends and every note is called. Three fields are for Hugging Face
    models only. ``direct`` attends in the mechanism's place, before any call is made, where no other context is open.
    ``attend`` computes the output of a call in the mechanism's place, or declines; notes are called after it too.
    ``cached_keys`` says that the site's cache evicts keys, and which it holds.
    """

    mechanism: Mechanism | None = None
    note: Note | None = None
    skip_dropout: bool = False
    direct: Direct | None = None
    attend: Attend | None = None
    cached_keys: Callable[[Site], CachedKeys] | None = None


@dataclass(eq=False)
class Conversion:
    """A layer that attends for good by another mechanism; ``drop_bias`` leaves out the model's position bias."""

    mechanism: Mechanism
    kind: Kind
    layer: int
    name: str
    drop_bias: bool = False


# What a model is converted to: {name: (mechanism, its sites)}.
Groups = Mapping[str, tuple[Mechanism, list[Site]]]


class ModelAdapter(ABC):
    """A model as attnlab sees it."""

    @abstractmethod
    def sites(self) -> list[Site]:
        """Every place where the model attends, in the model's order."""

    @abstractmethod
    def attach(self, frames: Mapping[Site, Frame]) -> AbstractContextManager[None]:
        """Attend as the frames say until the context ends; contexts may end in any order."""

    @abstractmethod
    def mechanism_at(self, site: Site) -> Mechanism:
        """The mechanism by which a site attends now; softmax where nothing has replaced it."""

    @abstractmethod
    def conversions(self) -> Sequence[Conversion]:
        """The layers that were converted."""

    @abstractmethod
    def convert(self, groups: Groups, *, drop_bias: bool, example: Mapping[str, Any] | None) -> None:
        """Attend by {name: (mechanism, its sites)} from now on; an error leaves the model as it was."""

    @abstractmethod
    def evicting_cache(self, policy: KVPolicy) -> AbstractContextManager[Any]:
        """A context with an empty cache that keeps the keys that the policy chooses."""

    @abstractmethod
    def logits(self, ids: Int[Tensor, "b q"], *, cache: Any = None) -> Float[Tensor, "b q v"]:
        """What may follow each token; with a cache, ``ids`` are the tokens that it has not read."""


def adapter_of(model: Any) -> ModelAdapter:
    """The adapter of a model; a ValueError where attention cannot be replaced."""
    from attnlab.adapters.hugging_face import HuggingFaceModel
    from attnlab.adapters.own_models import OwnModel

    if not isinstance(model, nn.Module):
        raise ValueError(f"a model (torch.nn.Module) was expected, got {type(model).__name__}")
    kinds: list[type[HuggingFaceModel] | type[OwnModel]] = [
        kind for kind in (OwnModel, HuggingFaceModel) if kind.fits(model)
    ]
    if not kinds:
        raise ValueError(
            f"{type(model).__name__} cannot be swapped or recorded: none of its modules is an attention layer of "
            "attnlab.models, calls transformers' AttentionInterface (BERT, GPT-2, Llama, T5, ...), or is of a family "
            "that attnlab leads through it (DeBERTa, RoFormer, GPT-J, Falcon, Bloom, ...); use a model class that is"
        )
    if len(kinds) > 1:
        raise ValueError(
            f"{type(model).__name__} holds both layers of attnlab.models and layers of transformers; pass the part of "
            "it that is meant"
        )
    return kinds[0](model)


def refuse_partial(model: nn.Module, sites: list[Site]) -> None:
    """Raise a ValueError if the model also attends elsewhere, so that swapping all of ``sites`` is not swapping all."""
    names = {site.name for site in sites}
    for name, module in model.named_modules():
        if "Attention" not in type(module).__name__ or next(module.parameters(), None) is None:
            continue
        if not any(other == name or other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in names):
            raise ValueError(
                f"{type(model).__name__} can be swapped only in part: {type(module).__name__} ({name}) does not call "
                "transformers' AttentionInterface, nor is it a layer of attnlab.models; name the layers to swap with "
                "layers="
            )


def select(sites: list[Site], layers: Layers) -> list[Site]:
    """The sites that ``layers`` names; all of them for None."""
    if layers is None:
        return sites
    if isinstance(layers, (int, str)) or (isinstance(layers, tuple) and layers and isinstance(layers[0], str)):
        layers = [layers]
    if not isinstance(layers, Iterable):
        raise ValueError(f"layers is a number, a kind, (kind, number) or a list of these, got {layers!r}")
    chosen = [site for key in layers for site in _matching(sites, key)]
    if not chosen:
        raise ValueError("layers is empty; None means every layer")
    return list(dict.fromkeys(chosen))


def _matching(sites: list[Site], key: Any) -> list[Site]:
    if isinstance(key, str) and (named := LAYER_NAME.fullmatch(key)):
        number = int(named["number"])
        key = number if named["kind"] is None else (named["kind"], number)
    match key:
        case bool():
            raise ValueError(f"a layer is a number, a kind or (kind, number), got {key}")
        case str():
            matching = [site for site in sites if site.kind == key]
        case int():
            return _matching(sites, (_only_kind(sites, key), key))
        case (str() as kind, int() as number):
            matching = _numbered([site for site in sites if site.kind == kind], number)
        case _:
            raise ValueError(f"a layer is a number, a kind or (kind, number), got {key!r}")
    if not matching:
        counts = {site.kind: sum(other.kind == site.kind for other in sites) for site in sites}
        raise ValueError(f"no layer {key!r} in this model; its numbers of layers are {counts}")
    return matching


def _only_kind(sites: list[Site], number: int) -> Kind:
    """The kind that a plain number means: the model's one kind of self-attention, or cross where there is none."""
    kinds = sorted({site.kind for site in sites} - {"cross"}) or ["cross"]
    if len(kinds) > 1:
        raise ValueError(
            f"layer {number} is ambiguous in this model; write ({kinds[0]!r}, {number}) or ({kinds[1]!r}, {number})"
        )
    return kinds[0]


def _numbered(sites: list[Site], number: int) -> list[Site]:
    """The site of this number; negative ones count from the end."""
    if number < 0 and sites:
        number += max(site.layer for site in sites) + 1
    return [site for site in sites if site.layer == number]
