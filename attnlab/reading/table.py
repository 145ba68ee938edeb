"""One table per reading: kind, layer, input, head, query, key -> value; as tensors, rows, pandas or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.attention import visible
from attnlab.provenance import write_json
from attnlab.reading.registry import named_reading
from attnlab.summaries import notebook_view, short_repr
from attnlab.trace import LayerTrace, Trace, recorded_layers

__all__ = ["ReadingTable", "read"]


@dataclass(frozen=True, eq=False)
class ReadingTable:
    """A reading of every layer: ``maps[kind, layer]`` is (b, h, q, k), or (b, h, q) with one number per query.

    ``seen`` holds, for each layer, which keys each query sees; the table has a row for each of these pairs. Rollout has
    one head.
    """

    name: str
    maps: Mapping[tuple[str, int], Tensor]
    seen: Mapping[tuple[str, int], Tensor | None]

    __repr__ = short_repr

    def _repr_html_(self) -> str:
        rows = []
        for (kind, layer), t in self.maps.items():
            smallest, largest = (float(t.min()), float(t.max())) if t.numel() else (None, None)
            shape = str(tuple(t.shape))
            rows.append({"kind": kind, "layer": layer, "shape": shape, "smallest": smallest, "largest": largest})
        return notebook_view(f"Reading {self.name}", rows, note="rows() and to_pandas() have every value.")

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict per value: kind, layer, input, head, query, key (absent in a reading per query), value."""
        for (kind, layer), t in self.maps.items():
            seen = self.seen[kind, layer]
            keep = torch.ones_like(t, dtype=torch.bool)
            if seen is not None:
                keep = keep & (seen if t.dim() == 4 else seen.any(-1))
            names = ("input", "head", "query", "key")[: t.dim()]
            values = t[keep].tolist()
            for index, value in zip(keep.nonzero().tolist(), values, strict=True):
                yield {"kind": kind, "layer": layer, **dict(zip(names, index, strict=True)), "value": value}

    def to_pandas(self) -> Any:
        """The rows as a pandas DataFrame."""
        try:
            import pandas as pd
        except ImportError:
            raise ValueError("to_pandas needs pandas: pip install pandas") from None
        return pd.DataFrame(list(self.rows()))

    def to_json(self, path: Path | str) -> Path:
        """The table as a JSON file: {"reading", "rows"}."""
        return write_json(path, {"reading": self.name, "rows": list(self.rows())})


def read(trace: Trace | Iterable[LayerTrace], reading: str, *, target: Tensor | None = None) -> ReadingTable:
    """The table of one of ``reading_names()`` over a recorded trace, or of a function in a file, "./my.py:function".

    ``target`` is the number that "gradient" explains. A layer that the reading cannot be made of is left out.
    """
    layers, chosen = recorded_layers(trace), named_reading(reading)
    maps: dict[tuple[str, int], Tensor] = {}
    seen: dict[tuple[str, int], Tensor | None] = {}
    for layer, t in zip(layers, chosen.of_layers(layers, target=target), strict=True):
        if t is not None:
            maps[layer.kind, layer.layer] = t.detach()
            seen[layer.kind, layer.layer] = visible(layer.call)
    if layers and not maps:
        raise ValueError(f"none of these layers has a reading {chosen.name!r}: it cannot {chosen.cannot}")
    return ReadingTable(chosen.name, maps, seen)
