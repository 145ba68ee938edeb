"""The explorer of a long text: statistics of its heads as one offline page; no map of weights is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnlab.pages.explorer.codec import encode, is_causal, squeeze
from attnlab.pages.explorer.page import explorer_page
from attnlab.pages.explorer.payload import Packed
from attnlab.pages.html import asset

__all__ = ["LAST_PLACE", "HeadLanes", "LayerSquares", "LongText", "Region", "long_page", "pack_long"]

# A place takes 16 bits; the largest number of them means that there is no such key.
LAST_PLACE = NO_PLACE = 0xFFFF
# The 255th byte of a lane stands for NaN, and that of a weight for none.
STEPS, NOT_A_NUMBER = 254, 255
# A weight is stored as its logarithm: so many steps for each halving, which is 2.2% at most between two.
STEPS_PER_HALVING = 16
# Statistics whose logarithm is stored, since a few tokens have a thousand times what the others have.
LOGARITHMIC = frozenset({"received"})
LEAST = 1e-6
MODULES = "data colour surface dom long_data long_maps long_lanes long_text"


@dataclass(frozen=True, eq=False)
class LayerSquares:
    """One layer: the mean weight in squares of tokens, (head, row, column)."""

    layer: int
    squares: np.ndarray


@dataclass(frozen=True, eq=False)
class HeadLanes:
    """A chosen head: {statistic: a number for each token}, and the largest weights (token, k) with their places."""

    layer: int
    head: int
    lanes: Mapping[str, np.ndarray]
    largest: np.ndarray
    places: np.ndarray


@dataclass(frozen=True, eq=False)
class Region:
    """Weights of one head, (query, key), from the token ``first_query`` and the token ``first_key`` on."""

    layer: int
    head: int
    first_query: int
    first_key: int
    weights: np.ndarray


@dataclass(frozen=True, eq=False)
class LongText:
    """A text and what the heads of a model did with it; ``words`` numbers the word that each token belongs to."""

    title: str
    subtitle: str
    tokens: Sequence[str]
    words: Sequence[int]
    # Tokens along the side of a square.
    block: int
    layers: Sequence[LayerSquares]
    chosen: Sequence[HeadLanes]
    # How the heads were chosen, in one sentence.
    choice: str
    # {statistic: (its title, what it is)}
    statistics: Mapping[str, tuple[str, str]]
    regions: Sequence[Region] = ()
    notes: Sequence[str] = ()
    about: Mapping[str, str] = field(default_factory=dict)


def long_page(packed: Packed) -> bytes:
    """The whole file, as bytes."""
    return explorer_page(packed, entry="long", modules=MODULES, more_style=asset("long.css"))


def pack_long(text: LongText) -> Packed:
    """What the page's script reads: numbers in few bits, deflated, a stream for each layer and each chosen head."""
    if len(text.tokens) > LAST_PLACE:
        raise ValueError(f"a page shows at most {LAST_PLACE:,} tokens, and the text has {len(text.tokens):,}")
    blobs: dict[str, bytes] = {}

    def stream(name: str, raw: bytes) -> dict[str, Any]:
        blobs[name], differences = squeeze(raw)
        return {"blob": name, "differences": differences}

    meta = {
        "title": text.title,
        "subtitle": text.subtitle,
        "tokens": [str(token) for token in text.tokens],
        "words": [int(word) for word in text.words],
        "block": text.block,
        "stepsPerHalving": STEPS_PER_HALVING,
        "layers": [_squares(layer, stream) for layer in text.layers],
        "chosen": [_lanes(head, i, stream) for i, head in enumerate(text.chosen)],
        "choice": text.choice,
        "statistics": {name: {"title": title, "help": help} for name, (title, help) in text.statistics.items()},
        "regions": [_region(region, i, stream) for i, region in enumerate(text.regions)],
        "notes": list(text.notes),
        "about": dict(text.about),
    }
    return Packed(meta, blobs)


def _squares(layer: LayerSquares, stream: Any) -> dict[str, Any]:
    """Roots of weights, since those of most squares are a thousandth of the largest."""
    roots = np.sign(layer.squares) * np.sqrt(np.abs(layer.squares))
    signed, causal = bool((roots < 0).any()), is_causal(roots)
    coded = encode(roots, signed=signed, precise=False, causal=causal)
    _, rows, columns = roots.shape
    return {
        "layer": layer.layer,
        "rows": rows,
        "cols": columns,
        "signed": signed,
        "causal": causal,
        "scales": list(coded.scales),
        **stream(f"squares-{layer.layer}", b"".join(coded.heads)),
    }


def _lanes(head: HeadLanes, number: int, stream: Any) -> dict[str, Any]:
    described, parts = {}, []
    for name, values in head.lanes.items():
        logarithm = name in LOGARITHMIC
        numbers = np.log10(np.maximum(values, LEAST)) if logarithm else np.asarray(values, dtype=np.float64)
        coded, low, step = _bytes(numbers)
        described[name] = {"low": low, "step": step, "logarithm": logarithm}
        parts.append(coded.tobytes())
    places = np.where(head.places < 0, NO_PLACE, head.places).astype("<u2")
    # One plane of low bytes and one of high ones, the largest of all tokens first: neighbours look at neighbours.
    planes = places.T.ravel().view(np.uint8).reshape(-1, 2).T
    return {
        "layer": head.layer,
        "head": head.head,
        "k": places.shape[1],
        "lanes": described,
        "values": stream(f"lanes-{number}", b"".join(parts)),
        "places": [stream(f"places-{number}-{half}", planes[half].tobytes()) for half in (0, 1)],
        "weights": stream(f"weights-{number}", _logarithms(head.largest, head.places < 0).tobytes()),
    }


def _bytes(values: np.ndarray) -> tuple[np.ndarray, float, float]:
    """(a byte for each value, the value of byte 0, the difference between two bytes).

    >>> coded, low, step = _bytes(np.array([1.0, 3.0, np.nan]))
    >>> coded.tolist(), low, step * 254
    ([0, 254, 255], 1.0, 2.0)
    """
    finite = np.isfinite(values)
    low = float(values[finite].min()) if finite.any() else 0.0
    step = (float(values[finite].max()) - low) / STEPS if finite.any() else 0.0
    steps = np.rint((np.where(finite, values, low) - low) / (step or 1.0))
    return np.where(finite, steps, NOT_A_NUMBER).astype(np.uint8), low, step


def _logarithms(weights: np.ndarray, none: np.ndarray) -> np.ndarray:
    """A byte for each weight: how often it is halved, in sixteenths.

    >>> _logarithms(np.array([1.0, 0.5, 0.0]), np.array([False, False, True])).tolist()
    [0, 16, 255]
    """
    halvings = -np.log2(np.clip(weights, 1e-9, 1.0))
    steps = np.minimum(np.rint(STEPS_PER_HALVING * halvings), STEPS)
    return np.where(none, NOT_A_NUMBER, steps).astype(np.uint8)


def _region(region: Region, number: int, stream: Any) -> dict[str, Any]:
    low, high = float(region.weights.min()), float(region.weights.max())
    low = min(low, 0.0)
    step = (high - low) / NO_PLACE
    coded = np.rint((region.weights - low) / (step or 1.0)).astype("<u2")
    rows, columns = coded.shape
    return {
        "layer": region.layer,
        "head": region.head,
        "firstQuery": region.first_query,
        "firstKey": region.first_key,
        "rows": rows,
        "cols": columns,
        "low": low,
        "step": step,
        **stream(f"region-{number}", coded.ravel().view(np.uint8).reshape(-1, 2).T.tobytes()),
    }
