"""One table per reading: kind, layer, input, head, query, key -> value; as tensors, rows, pandas or JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.attention import visible
from attnlab.provenance import write_json
from attnlab.reading.effective import effective_attention
from attnlab.reading.gradient import gradient_times_attention, output_gradients
from attnlab.reading.heads import attention_distance, attention_entropy
from attnlab.reading.norm_based import norm_based
from attnlab.reading.rollout import rollout
from attnlab.trace import LayerTrace, Trace

__all__ = ["READINGS", "ReadingTable", "read"]


_PER_LAYER: dict[str, Callable[[LayerTrace], Tensor]] = {
    "standard": lambda layer: layer.weights(),
    "effective": lambda layer: effective_attention(layer).weights,
    "norm": norm_based,
    "entropy": attention_entropy,
    "distance": attention_distance,
}
READINGS = (*_PER_LAYER, "rollout", "gradient")


@dataclass(frozen=True, eq=False)
class ReadingTable:
    """A reading of every layer: ``maps[kind, layer]`` is (b, h, q, k), or (b, h, q) with one number per query.

    ``seen`` tells, for each layer, which pairs exist; rows of the table are made for those only. Rollout has one head.
    """

    name: str
    maps: Mapping[tuple[str, int], Tensor]
    seen: Mapping[tuple[str, int], Tensor | None]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict per value: kind, layer, input, head, query, key (absent for entropy and distance), value."""
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
            raise ValueError('to_pandas needs pandas: pip install "attnlab[notebook]"') from None
        return pd.DataFrame(list(self.rows()))

    def to_json(self, path: Path | str) -> Path:
        """The table as a JSON file: {"reading", "rows"}."""
        return write_json(path, {"reading": self.name, "rows": list(self.rows())})


def read(trace: Trace | Iterable[LayerTrace], reading: str, *, target: Tensor | None = None) -> ReadingTable:
    """The table of one of ``READINGS`` over a recorded trace; ``target`` is the number that "gradient" explains."""
    layers = list(trace)
    if reading in _PER_LAYER:
        maps = {(x.kind, x.layer): _PER_LAYER[reading](x) for x in layers}
    elif reading == "rollout":
        layers = [x for x in layers if x.kind != "cross"]
        maps = {(x.kind, x.layer): t for x, t in zip(layers, rollout(layers), strict=True)}
    elif reading == "gradient":
        if target is None:
            raise ValueError(
                "reading 'gradient' explains one number: pass target=, a logit of the recorded forward pass"
            )
        slopes = output_gradients(layers, target)
        maps = {
            (x.kind, x.layer): gradient_times_attention(x, output_gradient=slope)
            for x, slope in zip(layers, slopes, strict=True)
        }
    else:
        raise ValueError(f"no reading named {reading!r}; the readings are {', '.join(READINGS)}")
    seen: dict[tuple[str, int], Tensor | None] = {(x.kind, x.layer): visible(x.call) for x in layers}
    return ReadingTable(reading, {key: t.detach() for key, t in maps.items()}, seen)
