"""What a model folder's files must be before transformers reads them, and what its weights must be afterwards."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.errors import first_line, read_json_object
from attnlab.sizes import check_bytes

__all__ = [
    "check_config",
    "check_ids",
    "check_layer_count",
    "check_reads_text",
    "check_weights",
    "files_of_index",
    "refuse_layers_without_place",
    "unknown_tokens",
    "weight_files",
]

# The share of a text's tokens that may be unknown.
MOST_UNKNOWN = 0.5
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

# Fields of a config that count something; None stands for a default.
COUNTS = re.compile(r"(num|n|d)_\w+|\w+_(size|layers|heads|dim)|max_position_embeddings")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
# A number between dots in a tensor's name is that of its layer.
LAYER_NUMBER = re.compile(r"(.*?)\.(\d+)\.")
MOST_LAYERS_OF_ONE_TENSOR = 1000
# Arguments of a forward pass that hold something else than text.
OTHER_INPUTS = re.compile(
    r"pixel_values\w*|input_(features|values)|flattened_patches|visual_\w+|bbox|action_embeds|\w*audio\w*"
)


def check_config(file: Path) -> Mapping[str, Any]:
    """The content of a config.json; fields of a kind or a size that no model has are refused, by name."""
    config = read_json_object(file, remedy="copy it again")
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"{file}: architectures must be a list of class names, got {_shown(names)}")
    for name in ("dtype", "torch_dtype"):
        _check_dtype(file, name, config.get(name))
    if not isinstance(config.get("model_type", ""), str):
        raise ValueError(f"{file}: model_type must be a name, got {_shown(config['model_type'])}")
    for name, value in config.items():
        if COUNTS.fullmatch(name) and isinstance(value, (str, float)):
            raise ValueError(f"{file}: {name} must be a whole number, got {_shown(value)}")
        if name in LAYERS and isinstance(value, int) and value < 0:
            raise ValueError(f"{file}: {name} must not be negative, got {value}")
    for name in ("hidden_size", "vocab_size", "max_position_embeddings", "intermediate_size", "n_positions"):
        if isinstance(value := config.get(name), int):
            # A position takes a number of 8 bytes at least, a unit or a word a weight for each of some others.
            check_bytes(f"{file}: {name}={value}", 8 * value, instead="correct it")
    return config


def files_of_index(index: Path) -> list[str]:
    """The weight files that an index names: files of its own folder."""
    weight_map = read_json_object(index, remedy="copy it again").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} is not a valid index of weights: weight_map must map each tensor to its file")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index} is not a valid index of weights: {_shown(name)} is no file of its folder")
    return sorted(set(weight_map.values()))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder; a folder that has none, or lacks some, is refused."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = files_of_index(index)
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise ValueError(f"{folder} lacks {len(absent)} of its {len(names)} weight files, such as {absent[0]}")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder} holds its weights only as a pickle ({pickles[0]}), which could run code when opened; "
            "convert it to model.safetensors"
        )
    raise ValueError(f"{folder} holds no weights: model.safetensors is missing")


def check_layer_count(folder: Path, config: Mapping[str, Any], files: Iterable[Path]) -> None:
    """Refuse a number of layers for which the files hold far too few tensors, before they are all built."""
    from safetensors import safe_open

    tensors = 0
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors += len(opened.keys())
    for name in LAYERS:
        value = config.get(name)
        # Layers that share their weights have one tensor for all.
        if isinstance(value, int) and value > max(tensors, MOST_LAYERS_OF_ONE_TENSOR):
            raise ValueError(
                f"{folder / 'config.json'}: {name} is {value}, but the weights are {tensors} tensors in all; "
                "copy config.json again from where the weights are from"
            )


def refuse_layers_without_place(name: str, model: Any, unexpected: Iterable[str]) -> None:
    """Raise if the weights hold layers that the model has not: its config names fewer than were saved."""
    modules = dict(model.named_modules())
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for key in sorted(unexpected):
        for match in LAYER_NUMBER.finditer(key):
            stack = key[: match.end(1)]
            layers = next((modules[n] for n in (stack, stack.removeprefix(prefix), prefix + stack) if n in modules), ())
            if isinstance(layers, torch.nn.ModuleList) and int(match[2]) >= len(layers) > 0:
                raise ValueError(
                    f"{name}: its weights hold more layers than its config.json names ({len(layers)} of {stack}, but "
                    f"there is {key}); copy config.json again from where the weights are from"
                )


def check_weights(name: str, model: Any) -> None:
    """Raise if a weight is not a finite number; the tensor is named."""
    for key, weight in model.named_parameters():
        if weight.is_meta or weight.numel() == 0 or weight.dtype.itemsize < 2 or not weight.is_floating_point():
            continue
        low, high = torch.aminmax(weight.detach())
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            kind = "NaN" if bool(torch.isnan(low)) else "infinity"
            raise ValueError(
                f"{name}: its weights hold {kind}, in {key}; the training diverged, or the file is damaged: take an "
                "earlier checkpoint"
            )


def check_ids(model: Any, ids: Tensor) -> None:
    """Raise if a token has no embedding: the tokenizer is that of another model."""
    embedding = _embedding_of_tokens(model)
    rows = getattr(embedding, "num_embeddings", None)
    if rows is None or ids.numel() == 0:
        return
    least, most = (int(end) for end in torch.aminmax(ids))
    if least < 0 or most >= rows:
        raise ValueError(
            f"the tokenizer made the id {most if most >= rows else least}, but {type(model).__name__} has {rows} "
            "embeddings; is it the tokenizer of another model?"
        )


def unknown_tokens(tokenizer: Any, ids: Tensor) -> str | None:
    """What to tell a user of a text that the tokenizer mostly does not know; None where it does."""
    unknown = tokenizer.unk_token_id
    if unknown is None or ids.numel() == 0:
        return None
    share = float((ids == unknown).float().mean())
    if share <= MOST_UNKNOWN:
        return None
    return (
        f"{share:.0%} of the text's tokens are unknown to the tokenizer ({tokenizer.unk_token}): is it text of the "
        "kind that the model reads?"
    )


def _embedding_of_tokens(model: Any) -> Any:
    """The table of embeddings that a text's tokens have in a model; None where it names none."""
    try:
        return model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    except NotImplementedError:
        # CLIP has one in its text tower, and none itself.
        return None


@torch.no_grad()
def check_reads_text(model: Any) -> None:
    """Raise if the model needs an image, sound or places beside a text; one that may take them reads two tokens."""
    names = inspect.signature(model.forward).parameters
    needed = {name for name, one in names.items() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD}
    others = [name for name in names if OTHER_INPUTS.fullmatch(name) or name in needed - {"input_ids"}]
    if "input_ids" in names and not others:
        return
    device = next(model.parameters()).device
    tokens = torch.tensor([[0, 1]], device=device)
    batch = {name: tokens for name in ("input_ids", "decoder_input_ids") if name in names}
    try:
        if "input_ids" not in batch:
            raise TypeError("it takes no input_ids")
        model(**batch)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not read a text alone, but {(*others, *names)[0]} ({first_line(error)}); "
            "give a model of text"
        ) from None


def _check_dtype(file: Path, name: str, value: Any) -> None:
    known = isinstance(value, str) and isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype)
    if value not in (None, "auto") and not known and not isinstance(value, dict):
        raise ValueError(f"{file}: {name} must be the name of a dtype such as float32, got {_shown(value)}")


def _shown(value: Any) -> str:
    """A value as an error shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
