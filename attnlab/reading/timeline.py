"""Attention while a model learns: the maps of one text at chosen steps, stored in the run folder for the explorer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.provenance import write_atomic, write_json
from attnlab.trace import LayerTrace

__all__ = ["record_step"]

FOLDER, INDEX = "steps", "index.json"
SEQUENCES = {"encoder": ("source", "source"), "decoder": ("target", "target"), "cross": ("target", "source")}

Maps = Mapping[tuple[str, int], Tensor]
Scalar = float | Tensor | Mapping[tuple[str, int], Sequence[float | None] | Tensor]


@torch.no_grad()
def record_step(
    run_dir: Path | str,
    step: int,
    trace: Iterable[LayerTrace] | Maps,
    *,
    tokens: Sequence[str] | Mapping[str, Sequence[str]],
    scalars: Mapping[str, Scalar] | None = None,
    item: int = 0,
) -> Path:
    """Write the maps of one input at one training step: ``steps/step-XXXXXXXX.safetensors`` and a line in its index.

    ``trace`` is what ``record`` filled, or {(kind, layer): weights (b, h, q, k)}; ``item`` is the input of the batch
    that is kept, the same text at every step. ``tokens`` are its strings; where there are two texts,
    {"source": [...], "target": [...]}. A scalar is one number, or one per head: a tensor (layers, heads) in the
    trace's order, or {(kind, layer): numbers}, None or NaN where a head has none. A step recorded again is replaced.
    """
    from safetensors.torch import save

    if step < 0:
        raise ValueError(f"step must be 0 or more, got {step}")
    maps = _maps(trace, item)
    sequences = _sequences(tokens, maps)
    folder = Path(run_dir) / FOLDER
    index = _index(folder, sequences)
    scalars = {name: _scalar(name, value, maps) for name, value in (scalars or {}).items()}
    file = f"step-{step:08d}.safetensors"
    entry = {"step": step, "file": file, "layers": [[kind, layer] for kind, layer in maps], "scalars": scalars}
    index["steps"] = sorted(
        [*(known for known in index["steps"] if known["step"] != step), entry], key=lambda known: known["step"]
    )
    folder.mkdir(parents=True, exist_ok=True)
    # Half precision keeps three digits of a weight, which is enough for a picture.
    stored = {f"{kind}.{layer}": w.half().contiguous() for (kind, layer), w in maps.items()}
    write_atomic(folder / file, save(stored))
    write_json(folder / INDEX, index)
    return folder / file


def _maps(trace: Iterable[LayerTrace] | Maps, item: int) -> dict[tuple[str, int], Tensor]:
    if isinstance(trace, Mapping):
        maps = {(str(kind), int(layer)): w for (kind, layer), w in trace.items()}
    else:
        maps = {(x.kind, x.layer): x.weights() for x in trace}
    if not maps:
        raise ValueError("the trace is empty; run the model inside `with attnlab.record(model) as trace:` first")
    for (kind, layer), w in maps.items():
        if kind not in SEQUENCES:
            raise ValueError(f"a map's kind must be one of {', '.join(SEQUENCES)}, got {kind!r}")
        if w.dim() != 4 or not 0 <= item < w.shape[0]:
            raise ValueError(
                f"weights of ({kind!r}, {layer}) must be (b, h, q, k) with input {item}, got {tuple(w.shape)}"
            )
    return {key: w[item].detach().cpu() for key, w in maps.items()}


def _sequences(
    tokens: Sequence[str] | Mapping[str, Sequence[str]], maps: Mapping[tuple[str, int], Tensor]
) -> dict[str, list[str]]:
    if not isinstance(tokens, Mapping):
        tokens = {SEQUENCES[next(iter(maps))[0]][0]: tokens}
    sequences = {name: [str(token) for token in strings] for name, strings in tokens.items()}
    for (kind, layer), w in maps.items():
        for name, length in zip(SEQUENCES[kind], w.shape[1:], strict=True):
            if name not in sequences or len(sequences[name]) != length:
                came = "none" if name not in sequences else str(len(sequences[name]))
                raise ValueError(f"({kind!r}, {layer}) attends over {length} {name} tokens, but tokens has {came}")
    return sequences


def _index(folder: Path, sequences: dict[str, list[str]]) -> dict[str, Any]:
    file = folder / INDEX
    if not file.exists():
        return {"format": 1, "sequences": sequences, "steps": []}
    index = json.loads(file.read_text(encoding="utf-8"))
    if index["sequences"] != sequences:
        raise ValueError(f"{folder} was recorded on other tokens; a timeline shows one text, so use another run folder")
    return index


def _scalar(name: str, value: Scalar, maps: Mapping[tuple[str, int], Tensor]) -> Any:
    if isinstance(value, Tensor) and value.dim() == 2:
        if len(value) != len(maps):
            raise ValueError(
                f"scalar {name!r} must be (layers, heads) with {len(maps)} layers, got {tuple(value.shape)}"
            )
        value = dict(zip(maps, value, strict=True))
    if not isinstance(value, Mapping):
        return _finite(float(value))
    by_layer = {}
    for (kind, layer), numbers in value.items():
        per_head = [_finite(math.nan if x is None else float(x)) for x in numbers]
        heads = maps[kind, layer].shape[0] if (kind, layer) in maps else None
        if len(per_head) != heads:
            raise ValueError(
                f"scalar {name!r} has {len(per_head)} numbers for ({kind!r}, {layer}), which has {heads} heads"
            )
        by_layer[f"{kind}.{layer}"] = per_head
    return by_layer


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
