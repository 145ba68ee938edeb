"""What the page is given: texts, maps by reading, layer and head, statistics; packed a layer at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from attnlab.pages.explorer.codec import Coded, encode, pooled, squeeze

__all__ = ["AXES", "Item", "LayerMaps", "Packed", "Tokens", "pack"]

# Which text asks and which is asked, for each kind of attention.
AXES = {"encoder": ("source", "source"), "decoder": ("target", "target"), "cross": ("target", "source")}
# Readings whose columns are dimensions of the values rather than keys, and those that may be negative.
DIMENSIONS = "dimensions"
THUMBNAIL, SMALL_THUMBNAIL, MANY_HEADS = 64, 32, 600
# Weights stored in full, over the whole page; beyond it a layer has its thumbnails only.
LIMIT = 1 << 28
# Weights that are held at once while they are packed, over the threads.
THREADS = 2


@dataclass(frozen=True)
class Tokens:
    """One text: its tokens, the word each belongs to (for merging), and each one's type (an index, or -1)."""

    tokens: Sequence[str]
    words: Sequence[int] | None = None
    types: Sequence[int] | None = None


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """One layer: ``maps[reading]`` is (head, query, key), and ``statistics[name]`` has one value per head.

    A reading named in ``dimensions`` has columns that are no tokens, such as (W - W^) v.
    """

    kind: str
    layer: int
    maps: Mapping[str, np.ndarray]
    statistics: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    dimensions: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Item:
    """One text through one model, or one step of a run; ``layers`` is consumed once, a layer at a time."""

    name: str
    texts: Mapping[str, Tokens]
    layers: Iterable[LayerMaps]
    step: int | None = None
    scalars: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Packed:
    """The page's data: JSON-able ``meta``, and for every name in it the base64 of its heads, one after the other."""

    meta: dict[str, Any]
    blobs: dict[str, bytes]


@dataclass(frozen=True)
class _Settings:
    precise: bool
    layers: frozenset[int] | None
    limit: int
    size: int


def pack(
    items: Sequence[Item],
    *,
    title: str,
    subtitle: str = "",
    type_names: Sequence[str] = (),
    columns: Sequence[Mapping[str, str]] = (),
    panes: Sequence[tuple[int | None, str]] = (),
    metrics: Mapping[str, Any] | None = None,
    precise: bool = False,
    layers: Iterable[int] | None = None,
    limit: int = LIMIT,
    heads: int | None = None,
    notes: Sequence[str] = (),
    about: Mapping[str, Any] | None = None,
) -> Packed:
    """Pack ``items``; ``layers`` are those whose maps are kept whole (the others keep thumbnails), None for all.

    ``columns`` explain the statistics ({"key", "title", "help"}); ``panes`` name what is shown first, as (item,
    reading), item None for the step that the slider shows. ``heads``, where it is known, chooses the thumbnails' size.
    """
    if not items:
        raise ValueError("there is nothing to explore: no text was given")
    size = SMALL_THUMBNAIL if (heads or 0) > MANY_HEADS else THUMBNAIL
    settings = _Settings(precise, None if layers is None else frozenset(layers), limit, size)
    packer = _Packer(settings, len(type_names))
    packed = [packer.item(i, item) for i, item in enumerate(items)]
    unknown = sorted((settings.layers or frozenset()) - packer.layers)
    if unknown:
        there = f"0 to {max(packer.layers)}" if packer.layers else "none"
        raise ValueError(f"there is no layer {', '.join(map(str, unknown))} to keep whole; the layers are {there}")
    if packer.left_out:
        notes = [*notes, _left_out_note(packer.left_out, settings)]
    if packer.missing:
        notes = [*notes, f"{packer.missing:,} weights are not numbers (NaN or infinity); they are drawn hatched."]
    meta = {
        "format": 1,
        "title": title,
        "subtitle": subtitle,
        "precise": precise,
        "error": packer.error,
        "texts": packer.texts,
        "typeNames": list(type_names),
        "items": packed,
        "columns": [dict(column) for column in columns],
        "panes": [list(pane) for pane in panes],
        "metrics": {name: [list(pair) for pair in pairs] for name, pairs in (metrics or {}).items()},
        "notes": list(notes),
        "about": dict(about or {}),
    }
    return Packed(meta, packer.blobs)


class _Packer:
    """Gathers what the items hold; texts that several items share are stored once."""

    def __init__(self, settings: _Settings, types: int) -> None:
        self.settings, self.types = settings, types
        self.blobs: dict[str, bytes] = {}
        self.texts: list[dict[str, Any]] = []
        self.left_out: list[tuple[str, int]] = []
        self.layers: set[int] = set()
        self.missing = 0
        self.error = 0.0
        self._stored = 0

    def item(self, number: int, item: Item) -> dict[str, Any]:
        text = {name: _text(name, told) for name, told in item.texts.items()}
        if text not in self.texts:
            self.texts.append(text)
        stacks: dict[str, dict[str, Any]] = {}
        with ThreadPoolExecutor(THREADS) as threads:
            for layer in item.layers:
                stack = stacks.setdefault(layer.kind, _stack(layer.kind))
                self._layer(number, item, layer, stack, threads)
        if not stacks:
            raise ValueError(f"{item.name!r} holds no attention layer")
        return {
            "name": item.name,
            "text": self.texts.index(text),
            "stacks": list(stacks.values()),
            "step": item.step,
            "scalars": dict(item.scalars),
        }

    def _layer(
        self, number: int, item: Item, layer: LayerMaps, stack: dict[str, Any], threads: ThreadPoolExecutor
    ) -> None:
        at = len(stack["layers"])
        stack["layers"].append(layer.layer)
        self.layers.add(layer.layer)
        for name, values in layer.statistics.items():
            known = stack["statistics"].setdefault(name, [])
            # Layers before this one that had no such number.
            known += [None] * (at - len(known))
            known.append([_plain(value) for value in values])
        chosen = self.settings.layers is None or layer.layer in self.settings.layers
        weights = sum(w.size for w in layer.maps.values())
        whole = chosen and self._stored + weights <= self.settings.limit
        self._stored += weights if whole else 0
        for name, given in layer.maps.items():
            w = _checked(name, given, item, layer)
            reading = _reading(stack, name, layer)
            if len(reading["layers"]) != at:
                raise ValueError(
                    f"{name!r} must be given for every {layer.kind} layer; layers before {layer.layer} lack it"
                )
            small = pooled(w, self.settings.size)
            reading["thumbnail"] = list(small.shape[1:])
            signed = _signed(reading, w)
            key = f"{number}.{layer.kind}.{layer.layer}.{name}"
            precise = self.settings.precise
            full = whole and small.shape != w.shape
            if not whole and small.shape != w.shape and (layer.kind, layer.layer) not in self.left_out:
                self.left_out.append((layer.kind, layer.layer))
            # Thumbnails are looked at together, so a layer's are one stream; whole maps one by one.
            thumbnails = encode(small, signed=signed, precise=precise and not full)
            small_part = self._put(f"{key}.small", thumbnails, [squeeze(b"".join(thumbnails.heads))])
            entry: dict[str, Any] = {"signed": signed, "small": small_part}
            last = thumbnails
            if full:
                coded = list(threads.map(partial(_squeezed, signed=signed, precise=precise), w[:, None]))
                last = Coded((), tuple(one.scales[0] for one, _ in coded), sum(one.missing for one, _ in coded))
                entry["full"] = self._put(key, last, [stream for _, stream in coded])
            self.missing += last.missing
            if self.types and name not in layer.dimensions:
                entry["types"] = _type_shares(w, item.texts[AXES[layer.kind][1]], self.types)
            reading["layers"].append(entry)

    def _put(self, blob: str, coded: Coded, streams: Sequence[bytes]) -> dict[str, Any]:
        self.blobs[blob] = b"".join(streams)
        self.error = max(self.error, max(coded.scales) / 2)
        scales = [float(f"{scale:.9g}") for scale in coded.scales]
        return {"blob": blob, "lengths": [len(stream) for stream in streams], "scales": scales}


def _squeezed(maps: np.ndarray, *, signed: bool, precise: bool) -> tuple[Coded, bytes]:
    coded = encode(maps, signed=signed, precise=precise)
    return coded, squeeze(coded.heads[0])


def _text(name: str, told: Tokens) -> dict[str, Any]:
    tokens = [str(token) for token in told.tokens]
    if not tokens:
        raise ValueError(f"the {name} text is empty: there is no token to look at")
    for what, numbers in (("words", told.words), ("types", told.types)):
        if numbers is not None and len(numbers) != len(tokens):
            raise ValueError(f"{what} must have one number per token: got {len(numbers)} for {len(tokens)} tokens")
    return {
        "tokens": tokens,
        "words": None if told.words is None else [int(word) for word in told.words],
        "types": None if told.types is None else [int(one) for one in told.types],
    }


def _stack(kind: str) -> dict[str, Any]:
    if kind not in AXES:
        raise ValueError(f"a layer's kind must be one of {', '.join(AXES)}, got {kind!r}")
    queries, keys = AXES[kind]
    return {"kind": kind, "queries": queries, "keys": keys, "layers": [], "readings": [], "statistics": {}}


def _checked(name: str, given: Any, item: Item, layer: LayerMaps) -> np.ndarray:
    w = np.asarray(given)
    w = np.ascontiguousarray(w, dtype=np.float64 if w.dtype == np.float64 else np.float32)
    where = f"{name!r} of {layer.kind} layer {layer.layer}"
    if w.ndim != 3 or 0 in w.shape:
        raise ValueError(f"maps of {where} must be (head, query, key), none of them empty, got {w.shape}")
    for axis, text in zip((1, 2), AXES[layer.kind], strict=True):
        if axis == 2 and name in layer.dimensions:
            continue
        told = len(item.texts[text].tokens) if text in item.texts else 0
        if w.shape[axis] != told:
            raise ValueError(f"maps of {where} are {w.shape[1]} x {w.shape[2]}, but there are {told} {text} tokens")
    return w


def _reading(stack: dict[str, Any], name: str, layer: LayerMaps) -> dict[str, Any]:
    for known in stack["readings"]:
        if known["name"] == name:
            return known
    shape = np.shape(layer.maps[name])
    columns = DIMENSIONS if name in layer.dimensions else "keys"
    stack["readings"].append({"name": name, "columns": columns, "size": list(shape[1:]), "layers": []})
    return stack["readings"][-1]


def _signed(reading: dict[str, Any], w: np.ndarray) -> bool:
    """Whether any weight is below zero; a reading that had a sign in one layer keeps it in the next."""
    before = bool(reading["layers"]) and reading["layers"][-1]["signed"]
    with np.errstate(invalid="ignore"):
        return before or bool(np.nanmin(w, initial=0.0) < 0)


def _type_shares(w: np.ndarray, keys: Tokens, types: int) -> list[list[float]] | None:
    """(head, type): what a query gives to the keys of each type, averaged over queries."""
    if keys.types is None:
        return None
    of_type = (np.asarray(keys.types)[:, None] == np.arange(types)).astype(w.dtype)
    given = w.mean(1)
    if not np.isfinite(given).all():
        given = np.where(np.isfinite(w), w, 0).mean(1)
    shares = given @ of_type
    return [[float(f"{share:.5g}") for share in row] for row in shares]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    number = float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None


def _left_out_note(left_out: Sequence[tuple[str, int]], settings: _Settings) -> str:
    names = ", ".join(f"{kind} {layer}" for kind, layer in left_out[:8]) + (" and more" if len(left_out) > 8 else "")
    return (
        f"Layers kept as thumbnails of at most {settings.size} x {settings.size} cells only: {names}. A cell is what a "
        "block of queries gives to a block of keys. Choose the layers to keep whole with --layers."
    )
