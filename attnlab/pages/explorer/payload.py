"""The data of a page: texts, maps by reading, layer and head, statistics; packed a layer at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from attnlab.pages.explorer.codec import Coded, encode, is_causal, pooled, squeeze
from attnlab.pages.explorer.opening import telling_share

__all__ = ["AXES", "Item", "LayerMaps", "Packed", "Tokens", "pack"]

# The texts of the queries and of the keys, for each kind of attention.
AXES = {"encoder": ("source", "source"), "decoder": ("target", "target"), "cross": ("target", "source")}
# The columns of a reading are keys, or dimensions of the values.
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
    packer.check_layers()
    meta = {
        "format": 2,
        "title": title,
        "subtitle": subtitle,
        "precise": precise,
        "error": packer.error,
        "texts": packer.texts,
        "typeNames": list(type_names),
        "items": packed,
        "columns": [dict(column) for column in columns],
        "panes": [list(pane) for pane in panes],
        "opens": packer.opens(len(items) - 1 if items[-1].step is not None else 0, packed),
        "metrics": {name: [list(pair) for pair in pairs] for name, pairs in (metrics or {}).items()},
        "notes": [*notes, *packer.notes()],
        "about": dict(about or {}),
    }
    return Packed(meta, packer.blobs)


class _Packer:
    """Packs items one after another; a text that several items share is stored once."""

    def __init__(self, settings: _Settings, types: int) -> None:
        self.settings, self.types = settings, types
        self.blobs: dict[str, bytes] = {}
        self.texts: list[dict[str, Any]] = []
        self.left_out: list[tuple[str, int]] = []
        self.layers: set[int] = set()
        self.missing = 0
        self.error = 0.0
        self._stored = 0
        # (item, kind): (layer's place in its stack, head, share) of the head with the largest share of telling weight.
        self._telling: dict[tuple[int, str], tuple[int, int, float]] = {}

    def item(self, number: int, item: Item) -> dict[str, Any]:
        text = {name: _text(name, tokens) for name, tokens in item.texts.items()}
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

    def check_layers(self) -> None:
        """A layer that is to be kept whole must be among those packed."""
        unknown = sorted((self.settings.layers or frozenset()) - self.layers)
        if unknown:
            known = f"0 to {max(self.layers)}" if self.layers else "none"
            raise ValueError(f"there is no layer {', '.join(map(str, unknown))} to keep whole; the layers are {known}")

    def notes(self) -> list[str]:
        """What the page says of layers without whole maps, and of weights that are no numbers."""
        notes = [_left_out_note(self.left_out, self.settings)] if self.left_out else []
        if self.missing:
            notes.append(f"{self.missing:,} weights are not numbers (NaN or infinity); they are drawn hatched.")
        return notes

    def opens(self, number: int, packed: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The head that is shown first: the most telling one of an item's first kind of attention."""
        kind = packed[number]["stacks"][0]["kind"]
        layer, head, share = self._telling[number, kind]
        return {"kind": kind, "layer": layer, "head": head, "share": float(f"{share:.3g}")}

    def _note_telling(self, number: int, kind: str, layer: int, small: np.ndarray) -> None:
        """Keep the layer's most telling head if no layer before has one as telling."""
        shares = telling_share(small)
        head = int(shares.argmax())
        if shares[head] > self._telling.get((number, kind), (0, 0, -1.0))[2]:
            self._telling[number, kind] = (layer, head, float(shares[head]))

    def _layer(
        self, number: int, item: Item, layer: LayerMaps, stack: dict[str, Any], threads: ThreadPoolExecutor
    ) -> None:
        index = len(stack["layers"])
        stack["layers"].append(layer.layer)
        self.layers.add(layer.layer)
        _add_statistics(stack["statistics"], layer, index)
        whole = self._keeps_whole(layer)
        for name, maps in layer.maps.items():
            w = _checked(name, maps, item, layer)
            reading = _reading(stack, name, layer)
            if len(reading["layers"]) != index:
                raise ValueError(
                    f"{name!r} must be given for every {layer.kind} layer; layers before {layer.layer} lack it"
                )
            small = pooled(w, self.settings.size)
            if reading is stack["readings"][0]:
                self._note_telling(number, layer.kind, index, small)
            key = f"{number}.{layer.kind}.{layer.layer}.{name}"
            entry = self._entry(key, w, small, reading, layer, whole, threads)
            if self.types and name not in layer.dimensions:
                entry["types"] = _type_shares(w, item.texts[AXES[layer.kind][1]], self.types)
            reading["layers"].append(entry)

    def _keeps_whole(self, layer: LayerMaps) -> bool:
        """Whether the layer's maps are stored in full: it is among the chosen, and the limit is not reached."""
        chosen = self.settings.layers is None or layer.layer in self.settings.layers
        weights = sum(w.size for w in layer.maps.values())
        whole = chosen and self._stored + weights <= self.settings.limit
        self._stored += weights if whole else 0
        return whole

    def _entry(
        self,
        key: str,
        w: np.ndarray,
        small: np.ndarray,
        reading: dict[str, Any],
        layer: LayerMaps,
        whole: bool,
        threads: ThreadPoolExecutor,
    ) -> dict[str, Any]:
        """One layer of one reading: its thumbnails, and its whole maps where they are larger and kept."""
        reading["thumbnail"] = list(small.shape[1:])
        signed = _signed(reading, w)
        precise = self.settings.precise
        reduced = small.shape != w.shape
        full = whole and reduced
        if reduced and not whole and (layer.kind, layer.layer) not in self.left_out:
            self.left_out.append((layer.kind, layer.layer))
        # The page shows a layer's thumbnails together, so they are one stream; each whole map is a stream of its own.
        causal = is_causal(small)
        coded = encode(small, signed=signed, precise=precise and not full, causal=causal)
        small_part = self._put(f"{key}.small", coded, [squeeze(b"".join(coded.heads))], causal=causal)
        entry: dict[str, Any] = {"signed": signed, "small": small_part}
        if full:
            causal = is_causal(w)
            heads = list(threads.map(partial(_squeezed, signed=signed, precise=precise, causal=causal), w[:, None]))
            coded = Coded((), tuple(one.scales[0] for one, _ in heads), sum(one.missing for one, _ in heads))
            entry["full"] = self._put(key, coded, [stream for _, stream in heads], causal=causal)
        self.missing += coded.missing
        return entry

    def _put(self, blob: str, coded: Coded, squeezed: Sequence[tuple[bytes, bool]], *, causal: bool) -> dict[str, Any]:
        """Keep the streams; where each lies and how it is read."""
        streams, differences = zip(*squeezed, strict=True)
        self.blobs[blob] = b"".join(streams)
        self.error = max(self.error, max(coded.scales) / 2)
        scales = [float(f"{scale:.9g}") for scale in coded.scales]
        lengths = [len(stream) for stream in streams]
        return {"blob": blob, "lengths": lengths, "differences": differences, "scales": scales, "causal": causal}


def _squeezed(maps: np.ndarray, *, signed: bool, precise: bool, causal: bool) -> tuple[Coded, tuple[bytes, bool]]:
    coded = encode(maps, signed=signed, precise=precise, causal=causal)
    return coded, squeeze(coded.heads[0])


def _add_statistics(statistics: dict[str, list[Any]], layer: LayerMaps, index: int) -> None:
    """Append the layer's numbers; layers before it that had no such number have None."""
    for name, values in layer.statistics.items():
        by_layer = statistics.setdefault(name, [])
        by_layer += [None] * (index - len(by_layer))
        by_layer.append([_plain(value) for value in values])


def _text(name: str, text: Tokens) -> dict[str, Any]:
    tokens = [str(token) for token in text.tokens]
    if not tokens:
        raise ValueError(f"the {name} text is empty: there is no token to look at")
    for what, numbers in (("words", text.words), ("types", text.types)):
        if numbers is not None and len(numbers) != len(tokens):
            raise ValueError(f"{what} must have one number per token: got {len(numbers)} for {len(tokens)} tokens")
    return {
        "tokens": tokens,
        "words": None if text.words is None else [int(word) for word in text.words],
        "types": None if text.types is None else [int(kind) for kind in text.types],
    }


def _stack(kind: str) -> dict[str, Any]:
    if kind not in AXES:
        raise ValueError(f"a layer's kind must be one of {', '.join(AXES)}, got {kind!r}")
    queries, keys = AXES[kind]
    return {"kind": kind, "queries": queries, "keys": keys, "layers": [], "readings": [], "statistics": {}}


def _checked(name: str, maps: Any, item: Item, layer: LayerMaps) -> np.ndarray:
    w = np.asarray(maps)
    w = np.ascontiguousarray(w, dtype=np.float64 if w.dtype == np.float64 else np.float32)
    where = f"{name!r} of {layer.kind} layer {layer.layer}"
    if w.ndim != 3 or 0 in w.shape:
        raise ValueError(f"maps of {where} must be (head, query, key), none of them empty, got {w.shape}")
    for axis, text in zip((1, 2), AXES[layer.kind], strict=True):
        if axis == 2 and name in layer.dimensions:
            continue
        count = len(item.texts[text].tokens) if text in item.texts else 0
        if w.shape[axis] != count:
            raise ValueError(f"maps of {where} are {w.shape[1]} x {w.shape[2]}, but there are {count} {text} tokens")
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
    received = w.mean(1)
    if not np.isfinite(received).all():
        received = np.where(np.isfinite(w), w, 0).mean(1)
    shares = received @ of_type
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
