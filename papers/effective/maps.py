"""Figures 2 and 7 of Effective: the maps of one example, standard beside effective, as a page of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.adapters.load import LoadedModel, check_length
from attnlab.pages import element, heat_maps, map_viewer, page
from attnlab.progress import note
from attnlab.provenance import write_atomic
from papers.effective.tables import read_maps

__all__ = ["write_maps_page"]


def write_maps_page(
    loaded: LoadedModel,
    text: str,
    out: Path | str,
    *,
    pair: str | None = None,
    layer: int | None = None,
    head: int = 0,
) -> dict[str, Any]:
    """Write the maps of every head of an encoder on ``text`` (and ``pair``), with one head drawn large.

    ``layer`` is the last one by default. The colours of effective attention run from the least to the largest weight
    over all layers and heads, those of standard attention from 0 to 1. Returns the head's tokens and maps, that range,
    and the share of W that never reaches the output.
    """
    inputs = _encoded(loaded, text, pair)
    note(f"reading {inputs['input_ids'].shape[1]} tokens")
    maps, facts, layers = read_maps(loaded.model, inputs)
    layer = len(layers) - 1 if layer is None else layer
    heads = layers[0].output.shape[1]
    if not (0 <= layer < len(layers) and 0 <= head < heads):
        raise ValueError(f"layer {layer}, head {head}: this model has {len(layers)} layers of {heads} heads, from 0")
    tokens = loaded.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    # (layer, head, query, key)
    stacked = {reading: torch.stack([w[0] for w in maps[reading]]).cpu() for reading in ("standard", "effective")}
    colour_range = {"standard": (0.0, 1.0)}
    colour_range["effective"] = stacked["effective"].min().item(), stacked["effective"].max().item()
    of_head = {reading: values[layer, head].tolist() for reading, values in stacked.items()}
    removed, trivial = (facts[name][0, layer, head].item() for name in ("removed", "trivial"))
    large = [
        heat_maps(
            {reading: of_head[reading]},
            name=f"head_{reading}",
            title=f"Layer {layer}, head {head}: {reading} attention",
            rows="looking token",
            columns="token looked at",
            note="Numbers of tokens are places in the text: " + " ".join(f"{i}:{t}" for i, t in enumerate(tokens)),
            low=colour_range[reading][0],
            high=colour_range[reading][1],
        )
        for reading in ("standard", "effective")
    ]
    body = [
        element("h1", "Standard and effective attention"),
        element("p", _share_removed(removed, trivial=bool(trivial)), class_="note"),
        *large,
        map_viewer(tokens, {reading: values.numpy() for reading, values in stacked.items()}),
    ]
    title = f"Layer {layer}, head {head}"
    write_atomic(out, page(title, body, subtitle="effective attention", scripts=("report.js", "maps.js")))
    head_facts = {"removed": removed, "trivial": bool(trivial), "range": colour_range["effective"]}
    return {"tokens": tokens, "layer": layer, "head": head, **of_head, **head_facts}


def _encoded(loaded: LoadedModel, text: str, pair: str | None) -> dict[str, Tensor]:
    """The text, or the pair of texts, as the model's inputs."""
    model, tokenizer = loaded.model, loaded.tokenizer
    inputs = dict(tokenizer(text, pair, return_tensors="pt") if pair else tokenizer(text, return_tensors="pt"))
    if getattr(model.config, "type_vocab_size", 2) < 2:
        inputs.pop("token_type_ids", None)
    check_length(model, inputs["input_ids"].shape[1])
    device = next(model.parameters()).device
    return {name: t.to(device) for name, t in inputs.items()}


def _share_removed(removed: float, *, trivial: bool) -> str:
    if trivial:
        return "The text has no more tokens than the head's values have dimensions: the two maps cannot differ."
    return f"{removed:.0%} of this head's attention (its squared length) never reaches the output."
