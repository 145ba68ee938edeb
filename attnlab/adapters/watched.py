"""What ``watch`` returns: statistics of every attention layer, which can be saved and loaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.linalg.streaming import Measures, RowStatistics
from attnlab.provenance import saved_folder, write_atomic, write_json
from attnlab.shapes import Float
from attnlab.summaries import notebook_view
from attnlab.trace import Kind, find_layer

__all__ = ["AttentionStatistics", "LayerStatistics"]

TENSORS, INDEX = "statistics.safetensors", "statistics.json"
FORMAT = 1


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class LayerStatistics(RowStatistics):
    """Statistics of one layer, on the CPU.

    Padding counts nowhere: distances, first and last keys are those of visible keys. A field that is None was not asked
    for, or ``missing`` says why it is.
    """

    kind: Kind
    layer: int
    name: str
    # The number of the first query in its text: above 0 where the watch began with keys in the cache.
    first: int
    # The mass on each set of keys.
    sets: dict[str, Float[Tensor, "b h q"]]
    # The mean weight in squares of ``block`` tokens, hidden pairs included.
    blocks: Float[Tensor, "b h i j"] | None
    block: int
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def _repr_html_(self) -> str:
        rows = [{"head": head, **_means(self, head)} for head in range(self.entropy.shape[1])]
        return notebook_view(f"Statistics of {self.kind} layer {self.layer}", rows, note="Means over queries.")


# Fields of a layer that are tensors, or None.
TENSOR_FIELDS = (*(field.name for field in dataclasses.fields(RowStatistics)), "blocks")


class AttentionStatistics:
    """The layers of a model by place (``layers[3]``), by number or by (kind, number): ``statistics["cross", 3]``.

    After several forward passes they are those of the last one; decoding steps belong to the pass that they continue.
    """

    def __init__(
        self, layers: Iterable[LayerStatistics], *, measures: Measures, metadata: Mapping[str, Any] | None = None
    ) -> None:
        # Inside ``watch`` there are more of them after each call.
        self._source = layers
        self.measures = measures
        self.metadata = dict(metadata or {})

    @property
    def layers(self) -> list[LayerStatistics]:
        """Every layer, in the model's order."""
        return list(self._source)

    def __getitem__(self, key: int | tuple[Kind, int]) -> LayerStatistics:
        by_key = {(layer.kind, layer.layer): layer for layer in self.layers}
        if not by_key:
            raise ValueError(
                "nothing was watched; run the model inside `with attnlab.watch(model) as statistics:` first"
            )
        return by_key[find_layer(list(by_key), key, "statistics")]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerStatistics]:
        return iter(self.layers)

    def __repr__(self) -> str:
        layers = self.layers
        if not layers:
            return "AttentionStatistics(nothing watched)"
        b, h, n_q = layers[0].entropy.shape
        counts = {kind: sum(layer.kind == kind for layer in layers) for kind in ("encoder", "decoder", "cross")}
        kinds = ", ".join(f"{n} {kind}" for kind, n in counts.items() if n)
        sets = f", sets {', '.join(layers[0].sets)}" if layers[0].sets else ""
        return f"AttentionStatistics({kinds}; {b} x {h} heads x {n_q} queries, {self.measures.largest} largest{sets})"

    def _repr_html_(self) -> str:
        rows = [{"kind": layer.kind, "layer": layer.layer, **_means(layer, slice(None))} for layer in self.layers]
        return notebook_view(repr(self), rows, note="Means over heads and queries.")

    def save(self, folder: Path | str) -> Path:
        """Write statistics.safetensors and statistics.json into a folder."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        folder, layers = Path(folder), []
        for i, layer in enumerate(self.layers):
            named = {name: getattr(layer, name) for name in TENSOR_FIELDS}
            named |= {f"sets.{name}": t for name, t in layer.sets.items()}
            tensors |= {f"{i}.{name}": t.contiguous() for name, t in named.items() if t is not None}
            described = {name: getattr(layer, name) for name in ("kind", "layer", "name", "first", "block")}
            layers.append({**described, "missing": dict(layer.missing), "sets": list(layer.sets)})
        index = {"format": FORMAT, "measures": dataclasses.asdict(self.measures), "metadata": self.metadata}
        index["layers"] = layers
        json.dumps(index, allow_nan=False)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / TENSORS, save(tensors))
        write_json(folder / INDEX, index)
        return folder

    @classmethod
    def load(cls, folder: Path | str) -> AttentionStatistics:
        """Read what ``save`` wrote."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = saved_folder(folder, (INDEX, TENSORS), "statistics")
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            if index["format"] != FORMAT:
                raise ValueError(
                    f"{folder} holds statistics of format {index['format']}, which this version cannot read"
                )
            tensors = load_file(folder / TENSORS)
            layers = [_restored(i, entry, tensors) for i, entry in enumerate(index["layers"])]
            return cls(layers, measures=Measures(**index["measures"]), metadata=index["metadata"])
        except (
            SafetensorError,
            UnicodeDecodeError,
            json.JSONDecodeError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            raise ValueError(f"{folder} holds damaged statistics: {error!r}; watch and save them again") from None


def _means(layer: LayerStatistics, heads: int | slice) -> dict[str, float | None]:
    """The statistics that are one number for a query, averaged over the heads named and all queries."""
    measured = {name: getattr(layer, name) for name in ("entropy", "sinks", "recent", "distance", "norm", "removed")}
    return {name: None if t is None else float(t[:, heads].double().nanmean()) for name, t in measured.items()}


def _restored(i: int, entry: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> LayerStatistics:
    fields = {name: tensors.get(f"{i}.{name}") for name in TENSOR_FIELDS}
    for name in ("entropy", "sum_of_squares", "largest", "places", "sinks"):
        if fields[name] is None:
            raise KeyError(f"{i}.{name}")
    sets = {name: tensors[f"{i}.sets.{name}"] for name in entry["sets"]}
    described = {name: entry[name] for name in ("kind", "layer", "name", "first", "block", "missing")}
    return LayerStatistics(**described, **fields, sets=sets)  # type: ignore[arg-type]
