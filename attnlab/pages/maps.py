"""Attention maps of one text, a byte a weight: a grid of all heads and one head large, or two maps of one head."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attnlab.pages.html import Html, data, element

__all__ = ["map_pair", "map_viewer", "quantise"]


def quantise(name: str, values: Any) -> dict[str, Any]:
    """Maps (layer, head, query, key) as bytes: value = byte * scale; signed where any weight is negative.

    >>> packed = quantise("standard", [[[[1.0, 0.0], [0.25, 0.75]]]])
    >>> packed["queries"], packed["signed"], list(base64.b64decode(packed["data"]))
    (2, False, [255, 0, 64, 191])
    """
    raw = values["values"] if isinstance(values, Mapping) else values
    maps = np.nan_to_num(np.asarray(raw, dtype=np.float64))
    if maps.ndim != 4:
        raise ValueError(f"maps of {name!r} must be (layer, head, query, key), got {maps.ndim} dimensions {maps.shape}")
    if isinstance(values, Mapping):
        maps = maps * float(values.get("scale", 1.0))
    signed = bool((maps < 0).any())
    scale = float(np.abs(maps).max(initial=0.0) or 1.0) / (127 if signed else 255)
    packed = np.rint(maps / scale).astype(np.int8 if signed else np.uint8)
    layers, heads, queries, keys = maps.shape
    return {
        "name": name,
        "layers": layers,
        "heads": heads,
        "queries": queries,
        "keys": keys,
        "signed": signed,
        "scale": scale,
        "data": base64.b64encode(packed.tobytes()).decode(),
    }


def map_viewer(tokens: Sequence[str], maps: Mapping[str, Any]) -> Html:
    """The viewer's markup and payload; a page that holds it needs the script ``maps.js``."""
    packed = [quantise(name, values) for name, values in maps.items()]
    _check_sizes(packed, tokens)
    return element(
        "div",
        element(
            "div",
            element("span", class_="tabs", role="group", aria_label="Mechanism"),
            element("strong", class_="maps-title", aria_live="polite"),
            class_="maps-controls",
        ),
        element(
            "div",
            element(
                "div",
                element("canvas", class_="maps-grid", tabindex="0", role="img"),
                element(
                    "p", "Rows are layers, columns are heads. Click one, or walk with the arrow keys.", class_="note"
                ),
            ),
            element(
                "div",
                element("canvas", class_="maps-large", tabindex="0", role="img"),
                element("p", class_="readout", aria_live="polite"),
                element("p", "Each row is a token that looks; each column a token that is looked at.", class_="note"),
            ),
            class_="maps-body",
        ),
        data({"tokens": [str(t) for t in tokens], "maps": packed}),
        class_="card maps",
    )


def map_pair(tokens: Sequence[str], maps: Mapping[str, Any], *, note: str = "") -> Html:
    """Maps (query, key) of one head side by side, in one scale of colours; they need the script ``maps.js``, too."""
    packed = quantise(" and ".join(maps), np.asarray(list(maps.values()), dtype=np.float64)[:, None])
    _check_sizes([packed], tokens)
    drawn = [
        element(
            "div",
            element("h3", name),
            element(
                "canvas", class_="maps-large", tabindex="0", role="img", aria_label=name, data_layer=i, data_name=name
            ),
        )
        for i, name in enumerate(maps)
    ]
    return element(
        "div",
        element("div", drawn, class_="maps-body maps-pair"),
        element("p", class_="readout", aria_live="polite"),
        element("p", note, class_="note") if note else None,
        data({"tokens": [str(t) for t in tokens], "maps": [packed]}),
        class_="card maps",
    )


def _check_sizes(packed: Sequence[Mapping[str, Any]], tokens: Sequence[str]) -> None:
    for one in packed:
        if one["queries"] != len(tokens) or one["keys"] != len(tokens):
            raise ValueError(
                f"maps of {one['name']!r} are {one['queries']} x {one['keys']}, but there are {len(tokens)} tokens"
            )
