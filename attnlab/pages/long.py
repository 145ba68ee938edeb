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
# A weight is stored as its logarithm: so many steps for each halving, so that it is known to 4.4%.
STEPS_PER_HALVING = 8
# Statistics whose logarithm is stored, since a few tokens have a thousand times what the others have.
LOGARITHMIC = frozenset({"received"})
LEAST = 1e-6
# Statistics whose root is stored, since the first tokens of a text have far more than those after them.
ROOTS = frozenset({"sinks", "recent", "distance"})
# A character for each of the digits 0 to 84.
FIRST_DIGIT = ord("(")
# What stands between two tokens, as a digit for each.
SPACES = {"": "0", " ": "1", "\n": "2"}
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
    """A text and what the heads of a model did with it; ``before`` is the space or line break before each token."""

    title: str
    subtitle: str
    tokens: Sequence[str]
    before: Sequence[str]
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
        blobs[name], differences = squeeze(raw, base85)
        return {"blob": name, "differences": differences}

    meta = {
        "title": text.title,
        "subtitle": text.subtitle,
        "tokens": [str(token) for token in text.tokens],
        "before": "".join(SPACES[space] for space in text.before),
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


def base85(raw: bytes) -> bytes:
    """Bytes as the text of a page, 5 characters for 4 bytes: digits from "(" on, and "~" for "<"; base64 takes 5.3.

    >>> base85(bytes([0, 0, 0, 84, 1]))
    b'((((|(CC1)3'
    """
    words = np.frombuffer(raw + bytes(-len(raw) % 4), ">u4").astype(np.int64)
    digits = np.stack([words // 85**power % 85 for power in (4, 3, 2, 1, 0)], 1).astype(np.uint8) + FIRST_DIGIT
    digits[digits == ord("<")] = ord("~")
    # The last character says how many bytes were added.
    return digits.tobytes() + str(-len(raw) % 4).encode()


def _squares(layer: LayerSquares, stream: Any) -> dict[str, Any]:
    """Roots of weights, since those of most squares are a thousandth of the largest."""
    roots = _roots(layer.squares)
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
        numbers, scale = _scaled(name, np.asarray(values, dtype=np.float64))
        coded, low, step = _bytes(numbers)
        described[name] = {"low": low, "step": step, "scale": scale}
        parts.append(coded.tobytes())
    places = np.where(head.places < 0, NO_PLACE, head.places).astype("<u2")
    # One plane of low bytes and one of high ones.
    planes = places.ravel().view(np.uint8).reshape(-1, 2).T
    return {
        "layer": head.layer,
        "head": head.head,
        "k": places.shape[1],
        "lanes": described,
        "values": stream(f"lanes-{number}", b"".join(parts)),
        "places": [stream(f"places-{number}-{half}", planes[half].tobytes()) for half in (0, 1)],
        "weights": stream(f"weights-{number}", _logarithms(head.largest, head.places < 0).tobytes()),
    }


def _scaled(name: str, values: np.ndarray) -> tuple[np.ndarray, str]:
    """The numbers that are stored for a statistic, and how they follow from it."""
    if name in LOGARITHMIC and (values >= 0).all():
        return np.log10(np.maximum(values, LEAST)), "logarithm"
    if name in ROOTS:
        return _roots(values), "root"
    return values, "linear"


def _roots(values: np.ndarray) -> np.ndarray:
    return np.sign(values) * np.sqrt(np.abs(values))


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
    """A byte for each weight, (rank, token): how often it is halved, in steps, as the difference to the rank before.

    >>> _logarithms(np.array([[0.5, 0.25, 0.0]]), np.array([[False, False, True]])).tolist()
    [[8], [8], [239]]
    """
    halvings = -np.log2(np.clip(weights, 1e-9, 1.0))
    steps = np.minimum(np.rint(STEPS_PER_HALVING * halvings), STEPS)
    coded = np.where(none, NOT_A_NUMBER, steps).astype(np.uint8)
    return np.diff(coded, axis=1, prepend=np.uint8(0)).T


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
