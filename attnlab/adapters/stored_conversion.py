"""A conversion as it is stored: its section of config.json and its parameters, beside a model's weights or alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from attnlab.adapters.convert import is_converted
from attnlab.adapters.hugging_face import CONTAINER, restore_conversion
from attnlab.adapters.model_files import check_config, files_of_index, weight_files

__all__ = ["reconvert", "save_conversion"]


def reconvert(model: Any, path_or_hub_name: str | Path) -> Any:
    """Convert a model, in place, as the converted one in this folder is, with the parameters it learned.

    For another head on a converted body: ``AutoModelForSequenceClassification.from_pretrained(folder)`` reads all of it
    but the conversion. A folder may also hold a conversion alone (its section of config.json and its parameters), for
    the model that was converted.
    """
    if is_converted(model):
        raise ValueError(f"this {type(model).__name__} is converted already")
    section = getattr(model.config, CONTAINER, None) or _stored_section(Path(path_or_hub_name).expanduser())
    if section is None:
        raise ValueError(
            f"the config of this {type(model).__name__} says nothing of a conversion; read the model from that folder"
        )
    return restore_conversion(model, section, _converted_tensors(str(path_or_hub_name)))


def save_conversion(converted: Path | str, folder: Path | str) -> Path:
    """Write only what a conversion added to the model saved in ``converted``: a section of the config, and parameters.

    ``reconvert`` reads such a folder, for the model that was converted.
    """
    from safetensors.torch import save_file

    section = check_config(Path(converted) / "config.json").get(CONTAINER)
    if section is None:
        raise ValueError(f"{converted} holds no conversion: its config.json has no section {CONTAINER!r}")
    folder = Path(folder)
    if folder.resolve() == Path(converted).resolve():
        raise ValueError(f"{folder} holds the model's own weights too; give another folder for its conversion alone")
    tensors = _converted_tensors(str(converted))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({CONTAINER: section}, indent=2) + "\n", encoding="utf-8")
    return folder


def _stored_section(folder: Path) -> Any:
    """The conversion in a folder that holds nothing else; None for a folder with a model of its own."""
    file = folder / "config.json"
    config = check_config(file) if file.is_file() else {}
    return config.get(CONTAINER) if config.keys() == {CONTAINER} else None


def _converted_tensors(name: str) -> dict[str, Tensor]:
    """A conversion's parameters from the weight files of a folder, or of a hub name that was loaded before."""
    from safetensors import safe_open

    folder = Path(name).expanduser()
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder) if folder.is_dir() else _hub_files(name):
        with safe_open(path, framework="pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys() if key.startswith(f"{CONTAINER}.")}  # noqa: SIM118
    return tensors


def _hub_files(name: str) -> list[Path]:
    from transformers.utils import cached_file

    def local(file: str) -> Path | None:
        cached = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        return None if cached is None else Path(cached)

    index = local("model.safetensors.index.json")
    names = ["model.safetensors"]
    if index is not None:
        names = files_of_index(index)
    return [path for path in map(local, names) if path is not None]
