"""Figures 2 and 7 of Effective: the maps of one example, standard beside effective, as a page of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attnlab.adapters.load import LoadedModel, check_length
from attnlab.pages import element, heat_maps, map_viewer, page
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

    ``layer`` is the last one unless told. Returns the head's tokens, maps and how much of W never reaches the output.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    inputs = dict(tokenizer(text, pair, return_tensors="pt") if pair else tokenizer(text, return_tensors="pt"))
    if getattr(model.config, "type_vocab_size", 2) < 2:
        inputs.pop("token_type_ids", None)
    check_length(model, inputs["input_ids"].shape[1])
    device = next(model.parameters()).device
    maps, facts, layers = read_maps(model, {name: t.to(device) for name, t in inputs.items()})
    layer = len(layers) - 1 if layer is None else layer
    heads = layers[0].output.shape[1]
    if not (0 <= layer < len(layers) and 0 <= head < heads):
        raise ValueError(f"layer {layer}, head {head}: this model has {len(layers)} layers of {heads} heads, from 0")
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    found = {reading: torch.stack([w[0] for w in maps[reading]]).cpu() for reading in ("standard", "effective")}
    one = {reading: values[layer, head].tolist() for reading, values in found.items()}
    removed = facts["removed"][0, layer, head].item()
    trivial = bool(facts["trivial"][0, layer, head])
    said = (
        "The text has no more tokens than the head's values have dimensions: the two maps cannot differ."
        if trivial
        else f"{removed:.0%} of this head's attention (its squared length) never reaches the output."
    )
    body = [
        element("h1", "Standard and effective attention"),
        element("p", said, class_="note"),
        heat_maps(
            {"standard": one["standard"], "effective": one["effective"]},
            name="head",
            title=f"Layer {layer}, head {head}",
            rows="looking token",
            columns="token looked at",
            note="Numbers of tokens are places in the text: " + " ".join(f"{i}:{t}" for i, t in enumerate(tokens)),
        ),
        map_viewer(tokens, {reading: values.numpy() for reading, values in found.items()}),
    ]
    title = f"Layer {layer}, head {head}"
    write_atomic(out, page(title, body, subtitle="effective attention", scripts=("report.js", "maps.js")))
    return {"tokens": tokens, "layer": layer, "head": head, **one, "removed": removed, "trivial": trivial}
