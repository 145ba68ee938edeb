"""Where a model attends: its attention modules, told apart as encoder, decoder and cross, and numbered."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from attnlab.trace import Kind

__all__ = ["Layers", "Site", "find_sites", "own_attention", "refuse_partial", "select"]

# What ``layers=`` takes: numbers, (kind, number) pairs or kinds, one or several.
Layers = int | str | tuple[str, int] | Iterable[Any] | None

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
CROSS = re.compile(r"cross|enc_?dec|encoder_attn", re.IGNORECASE)
OUTPUT_LINEARS = ("o_proj", "out_proj", "c_proj", "Wo", "o", "out_lin", "dense", "wo", "to_out")


@dataclass(frozen=True, eq=False)
class Site:
    """One attention module of a model."""

    module: nn.Module
    kind: Kind
    layer: int
    name: str
    # The linear map that mixes the heads, where we know where it lies.
    output_linear: nn.Module | None

    def projection(self, width: int) -> Tensor | None:
        """The weight of W_O as (m, h*e), given h*e; None where it is unknown or stored packed."""
        weight = getattr(self.output_linear, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            return None
        # GPT-2's Conv1D keeps its weight as (in, out).
        weight = weight.T if type(self.output_linear).__name__ == "Conv1D" else weight
        return weight if weight.shape[1] == width else None


def find_sites(model: Any) -> list[Site]:
    """Every module of ``model`` that attends through transformers' AttentionInterface, in the model's order."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"a model (torch.nn.Module) was expected, got {type(model).__name__}")
    modules = dict(model.named_modules())
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
    if not sites:
        raise ValueError(
            f"{type(model).__name__} cannot be swapped or recorded: none of its modules calls transformers' "
            "AttentionInterface, the one place where attention can be replaced; a model class written for "
            "transformers 5 whose attention does (BERT, GPT-2, Llama, T5, ...) works"
        )
    return sites


def refuse_partial(model: nn.Module, sites: list[Site]) -> None:
    """Raise a ValueError if the model also attends elsewhere, so that swapping all of ``sites`` is not swapping all."""
    names = {site.name for site in sites}
    for name, module in model.named_modules():
        if "Attention" not in type(module).__name__ or next(module.parameters(), None) is None:
            continue
        if not any(other == name or other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in names):
            raise ValueError(
                f"{type(model).__name__} can be swapped only in part: {type(module).__name__} ({name}) does not call "
                "transformers' AttentionInterface; name the layers to swap with layers="
            )


def select(sites: list[Site], layers: Layers) -> list[Site]:
    """The sites that ``layers`` names; all of them for None."""
    if layers is None:
        return sites
    if isinstance(layers, (int, str)) or (isinstance(layers, tuple) and layers and isinstance(layers[0], str)):
        layers = [layers]
    chosen = [site for key in layers for site in _matching(sites, key)]
    if not chosen:
        raise ValueError("layers is empty; None means every layer")
    return list(dict.fromkeys(chosen))


def own_attention(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The function this module would call under ``implementation``, looked up as its own forward does."""
    forward = _forward(module)
    eager = [name for name in forward.__code__.co_names if name.startswith("eager")]
    default = forward.__globals__[eager[0]] if eager else None
    found = forward.__globals__[INTERFACE].get_interface(implementation, default)
    if found is None:
        raise ValueError(f"{type(module).__name__} has no {implementation!r} attention of its own to fall back to")
    return found


def _forward(module: nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _attends(module: nn.Module) -> bool:
    code = getattr(_forward(module), "__code__", None)
    return code is not None and INTERFACE in code.co_names


def _kind(name: str, module: nn.Module) -> Kind:
    own_name = ".".join(name.split(".")[-2:])
    if getattr(module, "is_cross_attention", False) or CROSS.search(own_name) or CROSS.search(type(module).__name__):
        return "cross"
    return "decoder" if getattr(module, "is_causal", False) else "encoder"


def _output_linear(module: nn.Module, parent: nn.Module | None) -> nn.Module | None:
    for name in OUTPUT_LINEARS:
        if isinstance(getattr(module, name, None), nn.Module):
            return getattr(module, name)
    # BERT and its family keep W_O in the module beside: attention.self and attention.output.dense.
    beside = getattr(getattr(parent, "output", None), "dense", None)
    return beside if isinstance(beside, nn.Module) else None


def _matching(sites: list[Site], key: Any) -> list[Site]:
    if isinstance(key, str):
        found = [site for site in sites if site.kind == key]
    elif isinstance(key, int):
        kinds = sorted({site.kind for site in sites} - {"cross"}) or ["cross"]
        if len(kinds) > 1:
            raise ValueError(
                f"layer {key} is ambiguous in this model; write ({kinds[0]!r}, {key}) or ({kinds[1]!r}, {key})"
            )
        return _matching(sites, (kinds[0], key))
    elif isinstance(key, tuple) and len(key) == 2:
        kind, number = key
        of_kind = [site for site in sites if site.kind == kind]
        number = number + len(of_kind) if number < 0 else number
        found = [site for site in of_kind if site.layer == number]
    else:
        raise ValueError(f"a layer is a number, a kind or (kind, number), got {key!r}")
    if not found:
        has = {kind: sum(site.kind == kind for site in sites) for kind in dict.fromkeys(site.kind for site in sites)}
        raise ValueError(f"no layer {key!r} in this model; its numbers of layers are {has}")
    return found
