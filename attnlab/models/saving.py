"""Models as folders: config.json and model.safetensors, each written to a temporary name and renamed."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from attnlab.models.config import FIELDS, config_from_dict, config_to_dict, specs_per_layer
from attnlab.models.transformer import Transformer
from attnlab.provenance import write_atomic, write_json
from attnlab.registry import stored_mechanism

__all__ = ["CONFIG", "MODEL_TYPE", "load_transformer", "save_transformer"]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# What config.json says it is, so that it is not taken for a model of transformers.
MODEL_TYPE = "attnlab"


def save_transformer(model: Transformer, folder: Path | str) -> Path:
    """Write the model into a folder; a process killed while writing leaves the old, the new or a detected mix."""
    from safetensors.torch import save

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = config_to_dict(model.config)
    tensors = {name: t.detach().cpu().contiguous() for name, t in _tensors(model).items()}
    # The weights name the config they belong to, so that loading notices a kill between the two files.
    write_atomic(folder / WEIGHTS, save(tensors, metadata={"config": json.dumps(config)}))
    write_json(folder / CONFIG, {"model_type": MODEL_TYPE, **config})
    return folder


def load_transformer(
    folder: Path | str, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> Transformer:
    """Read what ``save_transformer`` wrote, in evaluation mode; the random state of the caller is left as it is."""
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no saved model: {name} is missing")
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            written_for = (file.metadata() or {}).get("config")
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} holds a damaged model: {error}; save it again") from None
    if not isinstance(values, dict) or values.pop("model_type", MODEL_TYPE) != MODEL_TYPE:
        raise ValueError(f"{folder / CONFIG} is not that of a model of attnlab.models; attnlab.load_model opens others")
    config = config_from_dict(values)
    if written_for is not None and config_from_dict(json.loads(written_for)) != config:
        raise ValueError(f"{folder}: {WEIGHTS} was written for another config than {CONFIG}; save the model again")
    for spec in (spec for kind in FIELDS if config.depth(kind) for spec in specs_per_layer(config, kind)):
        stored_mechanism(spec)
    with torch.random.fork_rng(devices=[]):
        model = Transformer(config)
    _fill(model, stored, folder)
    return model.to(device=device, dtype=dtype).eval()


def _tensors(model: Transformer) -> dict[str, Tensor]:
    """Parameters and buffers, each once however many layers share it."""
    seen: set[int] = set()
    tensors = {}
    for name, t in model.state_dict(keep_vars=True).items():
        if id(t) not in seen:
            seen.add(id(t))
            tensors[name] = t
    return tensors


def _fill(model: Transformer, stored: dict[str, Tensor], folder: Path) -> None:
    wanted = _tensors(model)
    missing, extra = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or extra:
        raise ValueError(f"{folder / WEIGHTS} does not fit its config: missing {missing}, not in the model {extra}")
    with torch.no_grad():
        for name, t in wanted.items():
            if t.shape != stored[name].shape:
                raise ValueError(
                    f"{folder / WEIGHTS}: {name} must be {tuple(t.shape)} by its config, "
                    f"got {tuple(stored[name].shape)}"
                )
            # A copy lies aligned in memory, as the saved one did: matrix products round alike, to the last bit.
            t.data = stored[name].clone()
