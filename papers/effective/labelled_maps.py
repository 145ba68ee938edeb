"""Labelled attention maps: collected from models, shown on contact sheets to be labelled by eye, kept in files."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.adapters import record
from attnlab.provenance import write_atomic, write_json
from attnlab.reading.effective import effective_attention
from attnlab.reading.pattern_data import CLASSES, picture

__all__ = [
    "LabelledMaps",
    "collect_maps",
    "contact_sheet",
    "load_labelled",
    "save_labelled",
    "write_png",
]

# 3 x 5 dots per digit, rows from the top.
_GLYPHS = [
    "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
    "111100111001111", "111100111101111", "111001010010010", "111101111101111", "111101111001111",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class LabelledMaps:
    """Pictures (n, SIZE, SIZE) as bytes; ``entries`` have the model, layer, head, reading, text and label of each."""

    pictures: np.ndarray
    entries: list[dict[str, Any]]

    def labels(self) -> list[int]:
        """The index of each label in ``CLASSES``."""
        return [CLASSES.index(entry["label"]) for entry in self.entries]

    def answer_shares(self) -> list[list[float]]:
        """Each class's share of the answers of all passes and the final label: what a network learns from."""
        rows = []
        for entry in self.entries:
            answers = [*entry.get("passes", ()), entry["label"]]
            rows.append([answers.count(name) / len(answers) for name in CLASSES])
        return rows

    def of(self, models: Iterable[str]) -> LabelledMaps:
        """The maps of some models only: splits are by model, so that no model is on both sides."""
        chosen = set(models)
        return self.at([i for i, entry in enumerate(self.entries) if entry["model"] in chosen])

    def at(self, places: Sequence[int]) -> LabelledMaps:
        """The maps at some places."""
        return LabelledMaps(self.pictures[list(places)], [self.entries[i] for i in places])


@torch.no_grad()
def collect_maps(
    model: nn.Module, texts: Sequence[Mapping[str, Tensor]], *, name: str, count: int, seed: int = 0
) -> LabelledMaps:
    """``count`` pictures of random heads on random texts, standard and effective in turn; their labels are None."""
    chosen = torch.Generator().manual_seed(seed)
    pictures, entries = [], []
    by_text: dict[int, list[int]] = {}
    for i, text in enumerate(torch.randint(len(texts), (count,), generator=chosen).tolist()):
        by_text.setdefault(text, []).append(i)
    for text, numbers in sorted(by_text.items()):
        with record(model) as trace:
            model(**texts[text])
        layers = list(trace)
        for i in numbers:
            layer = layers[int(torch.randint(len(layers), (1,), generator=chosen))]
            head = int(torch.randint(layer.output.shape[1], (1,), generator=chosen))
            reading = "effective" if i % 2 else "standard"
            maps = effective_attention(layer).weights if reading == "effective" else layer.weights()
            pictures.append((picture(maps[0, head][None])[0] * 255).round().byte().numpy())
            entries.append(
                {"model": name, "layer": layer.layer, "head": head, "reading": reading, "text": text, "label": None}
                | {"tokens": maps.shape[-1]}
            )
    return LabelledMaps(np.stack(pictures), entries)


def save_labelled(folder: Path | str, maps: LabelledMaps, *, made: Mapping[str, Any]) -> None:
    """Write maps.npz and labels.json; ``made`` describes how the maps were labelled."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "maps.npz", pictures=maps.pictures)
    write_json(folder / "labels.json", {"format": 1, "classes": CLASSES, "made": dict(made), "maps": maps.entries})


def load_labelled(folder: Path | str) -> LabelledMaps:
    """Read what ``save_labelled`` wrote."""
    folder = Path(folder)
    stored = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
    with np.load(folder / "maps.npz", allow_pickle=False) as file:
        pictures = file["pictures"]
    if len(pictures) != len(stored["maps"]):
        raise ValueError(f"{folder}: {len(pictures)} maps but {len(stored['maps'])} labels")
    unknown = {entry["label"] for entry in stored["maps"]} - {*CLASSES, None}
    if unknown:
        raise ValueError(f"{folder}: unknown labels {sorted(unknown)}; the classes are {', '.join(CLASSES)}")
    return LabelledMaps(pictures, stored["maps"])


def contact_sheet(pictures: np.ndarray, *, first: int = 0, columns: int = 8, scale: int = 3) -> np.ndarray:
    """Numbered pictures in a grid, dark where weights are large, as an array for ``write_png``."""
    n, size, _ = pictures.shape
    cell, margin = size * scale, 14
    rows = -(-n // columns)
    sheet = np.full((rows * (cell + margin), columns * (cell + 8)), 255, dtype=np.uint8)
    for i, one in enumerate(pictures):
        y, x = (i // columns) * (cell + margin), (i % columns) * (cell + 8)
        _write_number(sheet, first + i, y + 2, x)
        sheet[y + margin : y + margin + cell, x : x + cell] = 255 - one.repeat(scale, 0).repeat(scale, 1)
    return sheet


def write_png(path: Path | str, grey: np.ndarray) -> Path:
    """A grey picture (height, width) of bytes as a PNG file."""
    height, width = grey.shape
    lines = b"".join(b"\0" + row.tobytes() for row in np.ascontiguousarray(grey, dtype=np.uint8))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    return write_atomic(path, b"\x89PNG\r\n\x1a\n" + body)


def _write_number(sheet: np.ndarray, number: int, y: int, x: int) -> None:
    for position, digit in enumerate(str(number)):
        dots = np.array([int(c) for c in _GLYPHS[int(digit)]], dtype=np.uint8).reshape(5, 3)
        big = dots.repeat(2, 0).repeat(2, 1)
        at = x + position * 8
        sheet[y : y + 10, at : at + 6] = np.where(big == 1, 0, sheet[y : y + 10, at : at + 6])
