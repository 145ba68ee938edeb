"""What ``record`` returns: q, k, v, x and the output of every attention layer; W is computed when asked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall, Mechanism
from attnlab.provenance import saved_folder, write_atomic, write_json
from attnlab.registry import spec_of, stored_mechanism
from attnlab.shapes import Float
from attnlab.summaries import notebook_view, short_repr, short_value

__all__ = ["Kind", "LayerTrace", "Trace", "find_layer", "recorded_layers"]

Kind = Literal["encoder", "decoder", "cross"]

TENSORS, INDEX = "trace.safetensors", "trace.json"
CALL_TENSORS = ("q", "k", "v", "x", "key_visible", "mask", "bias", "memory")


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """One attention layer as it ran: its call, mechanism and output, and the weight of W_O as (m, h*e)."""

    call: AttentionCall
    mechanism: Mechanism
    output: Float[Tensor, "b h q e"]
    projection: Tensor | None
    kind: Kind
    layer: int
    name: str

    __repr__ = short_repr

    def _repr_html_(self) -> str:
        tensors = {name: getattr(self.call, name) for name in CALL_TENSORS}
        tensors |= {"output": self.output, "projection": self.projection}
        rows = [{"tensor": name, "what": short_value(t)} for name, t in tensors.items() if t is not None]
        title = f"{self.kind} layer {self.layer}: {self.name}"
        return notebook_view(title, rows, about=short_value(self.mechanism), note="weights() computes W.")

    def weights(self) -> Float[Tensor, "b h q k"]:
        """The dense W of this layer; differentiable when the model ran with gradients."""
        return self.mechanism.weights(self.call)

    @property
    def values(self) -> Float[Tensor, "b g k e"]:
        """v, one per key/value head."""
        return self.call.v

    @property
    def x(self) -> Float[Tensor, "b n m"] | None:
        """What the keys were made from: the layer's input, or the encoder's output in cross-attention."""
        return self.call.x


class Trace:
    """The layers of a model, by number or by (kind, number): ``trace[3]``, ``trace[-1]``, ``trace["cross", 3]``.

    A plain number means self-attention, so it is refused where a model has both an encoder and a decoder.
    """

    def __init__(self, *, keep: str = "last", metadata: Mapping[str, Any] | None = None) -> None:
        if keep not in ("last", "all"):
            raise ValueError(f"keep must be 'last' or 'all', got {keep!r}")
        self.keep = keep
        self.metadata = dict(metadata or {})
        self._layers: dict[tuple[Kind, int], list[LayerTrace]] = {}

    def add(self, layer: LayerTrace) -> None:
        """Note one call of a layer; with ``keep="last"`` it takes the place of the layer's previous one."""
        calls = self._layers.setdefault((layer.kind, layer.layer), [])
        if self.keep == "last":
            calls.clear()
        calls.append(layer)

    def history(self, key: int | tuple[Kind, int]) -> list[LayerTrace]:
        """Every kept call of one layer, oldest first: one per forward pass with ``keep="all"``."""
        return list(self._layers[self._find(key)])

    def __getitem__(self, key: int | tuple[Kind, int]) -> LayerTrace:
        return self._layers[self._find(key)][-1]

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[LayerTrace]:
        return iter([calls[-1] for calls in self._layers.values()])

    def __repr__(self) -> str:
        counts = {kind: sum(k == kind for k, _ in self._layers) for kind in ("encoder", "decoder", "cross")}
        return f"Trace({', '.join(f'{n} {kind}' for kind, n in counts.items() if n) or 'nothing recorded'})"

    def _repr_html_(self) -> str:
        rows = []
        for layer in self:
            b, h, n_q, n_k = layer.call.sizes
            place = {"kind": layer.kind, "layer": layer.layer, "mechanism": short_value(layer.mechanism)}
            rows.append({**place, "inputs": b, "heads": h, "queries": n_q, "keys": n_k, "name": layer.name})
        return notebook_view(repr(self), rows)

    def _find(self, key: int | tuple[Kind, int]) -> tuple[Kind, int]:
        if not self._layers:
            raise ValueError("the trace is empty; run the model inside `with attnlab.record(model) as trace:` first")
        return find_layer(list(self._layers), key, "trace")

    def save(self, folder: Path | str) -> Path:
        """Write trace.safetensors and trace.json; a mechanism is stored as its spec string and its parameters."""
        from safetensors.torch import save

        folder = Path(folder)
        store = _Store()
        layers = [_describe(call, store) for calls in self._layers.values() for call in calls]
        index = {"format": 1, "keep": self.keep, "metadata": self.metadata, "layers": layers}
        json.dumps(index, allow_nan=False)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / TENSORS, save(store.tensors))
        write_json(folder / INDEX, index)
        return folder

    @classmethod
    def load(cls, folder: Path | str, *, device: str | torch.device = "cpu") -> Trace:
        """Read what ``save`` wrote."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = saved_folder(folder, (INDEX, TENSORS), "trace")
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            tensors = load_file(folder / TENSORS, device=str(device))
            trace = cls(keep=index["keep"], metadata=index["metadata"])
            layers = [_restore(entry, tensors) for entry in index["layers"]]
        except (SafetensorError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} holds a damaged trace: {error}; record and save it again") from None
        for layer in layers:
            trace.add(layer)
        return trace


def find_layer(present: Sequence[tuple[Kind, int]], key: int | tuple[Kind, int], name: str) -> tuple[Kind, int]:
    """The layer of those ``present`` that a key of the object called ``name`` means."""
    if isinstance(key, int):
        kinds = sorted({kind for kind, _ in present} - {"cross"}) or ["cross"]
        if len(kinds) > 1:
            raise ValueError(
                f"layer {key} is ambiguous in this {name}; write {name}[{kinds[0]!r}, {key}] or {kinds[1]!r}"
            )
        key = (kinds[0], key)
    kind, number = key
    numbers = sorted(n for k, n in present if k == kind)
    if number < 0 and numbers:
        number += numbers[-1] + 1
    if number not in numbers:
        recorded = {k: sorted(n for kk, n in present if kk == k) for k, _ in present}
        raise ValueError(f"no layer ({kind!r}, {number}) in this {name}; it has {recorded}")
    return kind, number


def recorded_layers(recorded: Any) -> list[LayerTrace]:
    """The layers of a trace, of one layer or of several; anything else, a model above all, is a ValueError."""
    layers = [recorded] if isinstance(recorded, LayerTrace) else None
    if layers is None and isinstance(recorded, Iterable) and not isinstance(recorded, (str, nn.Module, Tensor)):
        layers = list(recorded)
    if layers is None or not all(isinstance(layer, LayerTrace) for layer in layers):
        raise ValueError(
            f"a recorded trace or a layer of it was expected, got {type(recorded).__name__}; record a forward pass "
            "first: `with attnlab.record(model) as trace: model(**inputs)`"
        )
    return layers


class _Store:
    """Tensors by name; one that several layers share (a mask, the encoder's output) is stored once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[tuple[Any, ...], str] = {}

    def put(self, t: Tensor | None) -> str | None:
        if t is None:
            return None
        same = (t.data_ptr(), tuple(t.shape), t.stride(), t.dtype, t.device)
        if same not in self._known:
            name = self._known[same] = f"t{len(self.tensors)}"
            # A copy of its own memory: safetensors refuses tensors that overlap.
            self.tensors[name] = t.detach().cpu().clone(memory_format=torch.contiguous_format)
        return self._known[same]


def _describe(layer: LayerTrace, store: _Store) -> dict[str, Any]:
    call = layer.call
    described: dict[str, Any] = {
        "kind": layer.kind,
        "layer": layer.layer,
        "name": layer.name,
        "mechanism": spec_of(layer.mechanism),
        "parameters": {},
        "call": {name: store.put(getattr(call, name)) for name in CALL_TENSORS},
        "causal": call.causal,
        "offset": call.offset,
        "scale": call.scale,
        "output": store.put(layer.output),
        "projection": store.put(layer.projection),
    }
    if isinstance(layer.mechanism, nn.Module):
        described["parameters"] = {name: store.put(t) for name, t in layer.mechanism.state_dict().items()}
    return described


def _load_parameters(mech: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Give a mechanism its parameters, those that it makes at its first call included: their shapes are unknown."""
    awaited = {name for name, parameter in _declared(mech) if parameter is None}
    for name in awaited & stored.keys():
        owner, _, own_name = name.rpartition(".")
        setattr(mech.get_submodule(owner), own_name, nn.Parameter(torch.empty_like(stored[name])))
    try:
        mech.load_state_dict(stored)
    except RuntimeError as error:
        raise ValueError(f"the parameters of a saved trace do not fit {mech!r}: {error}") from None


def _declared(mech: nn.Module) -> list[tuple[str, nn.Parameter | None]]:
    """Every parameter by name; None for those not made yet, which ``named_parameters`` leaves out."""
    return [
        (f"{owner}.{name}" if owner else name, parameter)
        for owner, module in mech.named_modules()
        for name, parameter in module._parameters.items()
    ]


def _restore(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LayerTrace:
    def get(name: str | None) -> Any:
        return None if name is None else tensors[name]

    mech = stored_mechanism(entry["mechanism"])
    if isinstance(mech, nn.Module):
        _load_parameters(mech, {name: tensors[stored] for name, stored in entry["parameters"].items()})
    numbers = {name: entry[name] for name in ("causal", "offset", "scale")}
    call = AttentionCall(**{name: get(stored) for name, stored in entry["call"].items()}, **numbers)
    shown = {f.name: entry[f.name] for f in dataclasses.fields(LayerTrace) if f.name in ("kind", "layer", "name")}
    return LayerTrace(
        call=call, mechanism=mech, output=get(entry["output"]), projection=get(entry["projection"]), **shown
    )
