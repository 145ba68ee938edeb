"""Which reading predicts best what changes when a key is hidden?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters import record, swap
from attnlab.attention import AttentionCall, Mechanism, repeat_groups, visible
from attnlab.fields import check_int
from attnlab.mechanisms.softmax import Softmax
from attnlab.reading.correlation import bootstrap_interval, row_correlations
from attnlab.reading.registry import Reading, named_reading, reading_names
from attnlab.shapes import Bool, Float
from attnlab.summaries import notebook_view
from attnlab.trace import LayerTrace

__all__ = [
    "AGAINST",
    "Faithfulness",
    "compared_readings",
    "faithfulness",
    "head_output_change",
    "prediction_change",
]

AGAINST = ("head output", "prediction", "prediction, zeroed")
Prediction = Callable[[Any], Tensor]


@dataclass(frozen=True, eq=False)
class Faithfulness:
    """One row per layer, reading and measure: rank and linear correlation, each with a 95 % bootstrap interval."""

    table: list[dict[str, Any]]

    def rows(self) -> list[dict[str, Any]]:
        """JSON-able rows: kind, layer, against, reading, spearman, spearman_low, spearman_high, ..., inputs."""
        return self.table

    def _repr_html_(self) -> str:
        note = "Correlations with what hiding a key changes; low and high are the ends of 95 % intervals."
        return notebook_view("Faithfulness of readings", self.table, note=note)


@torch.no_grad()
def head_output_change(layer: LayerTrace) -> Float[Tensor, "b h q k"]:
    """How far each head's contribution after W_O moves when one key is hidden from its query.

    Softmax has a closed form: without key j the other weights grow by 1 / (1 - w_ij), so the output moves by
    w_ij / (1 - w_ij) (o_i - v_j). Any other mechanism attends again, once per key. A query left with no key has output
    zero. Without a known W_O the distance is that of the head's output itself.
    """
    w, call = layer.weights(), layer.call
    o = layer.output.to(w.dtype)
    if not isinstance(layer.mechanism, Softmax):
        return _by_hiding(layer, o)
    v = repeat_groups(call.v, call.groups)
    if call.key_visible is not None:
        v = v.masked_fill(~call.key_visible[:, None, :, None], 0)
    # |o_i - v_j|^2 = |o_i|^2 - 2 <o_i, v_j> + |v_j|^2 in the metric of W_O.
    metric = _metric(layer)
    ow, vw = o.double() @ metric, v.double() @ metric
    squares = (ow * o).sum(-1)[..., None] - 2 * ow @ v.double().mT + (vw * v).sum(-1)[:, :, None]
    lengths = squares.clamp(min=0).sqrt()
    rest = 1 - w.double()
    # Where 1 - w would lose digits, the weights of the other keys are summed.
    few = rest < 1e-3
    if bool(few.any()):
        rest = torch.where(few, w.double().sum(-1, keepdim=True) - w.double(), rest)
    alone = rest < 1e-12
    moved = w.double() / rest.masked_fill(alone, 1) * lengths
    return torch.where(alone & (w > 0), (ow * o).sum(-1).sqrt()[..., None], moved).to(w.dtype)


@torch.no_grad()
def prediction_change(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    layer: int | tuple[str, int],
    prediction: Prediction,
    keys: Sequence[int],
    renormalise: bool = True,
) -> Float[Tensor, " k"]:
    """How far the prediction for one input moves when one key is hidden from all queries and heads of one layer.

    The other keys share its weight, as softmax without the key has it; with ``renormalise=False`` its weight is set to
    zero and theirs stay. All keys run as one batch; ``prediction`` maps the model's output to (b, c), compared by
    Euclidean distance.
    """
    many = {name: t.expand(len(keys) + 1, *t.shape[1:]) for name, t in inputs.items()}
    with swap(model, _Without(keys, renormalise=renormalise), layers=layer):
        predicted = prediction(model(**many)).double()
    return torch.linalg.vector_norm(predicted[1:] - predicted[:1], dim=-1)


def compared_readings() -> list[str]:
    """The registered readings that say something about each pair of a query and a key."""
    return [name for name in reading_names() if not named_reading(name).per_query]


def faithfulness(
    model: nn.Module,
    texts: Iterable[Mapping[str, Tensor]],
    *,
    prediction: Prediction | None = None,
    readings: Sequence[str] | None = None,
    keys: int | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> Faithfulness:
    """Correlate each reading with what hiding a key really changes, per layer, with confidence intervals.

    ``texts`` are batches of one input each (input_ids, attention_mask, ...); ``readings`` are names, by default all of
    ``compared_readings()``. "head output" correlates, over the keys of each query and head, the reading's size with
    ``head_output_change``; "prediction" correlates, over the keys of an input, the reading's mean size over heads and
    the queries that see the key with ``prediction_change`` in that layer (``keys`` limits how many are tried), and
    "prediction, zeroed" with its change when the other weights stay. A signed reading ("gradient summed") is summed
    over heads and queries first and its size taken then. A text's number is the mean over its rows; intervals resample
    texts. Softmax attention of any model: an encoder-decoder has rows of three kinds of layers, and no rollout where
    one attends to the other.
    """
    chosen = [_compared(name) for name in (compared_readings() if readings is None else readings)]
    prediction = prediction or default_prediction
    check_int("seed", seed, least=0)
    check_int("resamples", resamples, least=1)
    noise = torch.Generator().manual_seed(seed)
    correlations: dict[tuple[str, int, str, str], list[tuple[float, float]]] = {}
    for inputs in texts:
        if inputs["input_ids"].shape[0] != 1:
            raise ValueError(
                f"pass texts one by one: input_ids must be (1, length), got {tuple(inputs['input_ids'].shape)}"
            )
        layers, maps = _maps_of(model, inputs, prediction, chosen, noise)
        hidden_keys: dict[str, list[int]] = {}
        for number, layer in enumerate(layers):
            if layer.kind not in hidden_keys:
                hidden_keys[layer.kind] = _chosen_keys(layer, keys, noise)
            changes = _Changes.measure(model, inputs, layer, prediction, hidden_keys[layer.kind])
            for one in chosen:
                map_of_layer = maps[one.name][number]
                if map_of_layer is not None:
                    for against, pair in changes.correlate(one, map_of_layer).items():
                        place = (layer.kind, layer.layer, against, one.name)
                        correlations.setdefault(place, []).append(pair)
    if not correlations:
        raise ValueError("faithfulness was given no text")
    return Faithfulness([_row(*place, pairs, resamples, seed) for place, pairs in sorted(correlations.items())])


def _compared(name: str) -> Reading:
    chosen = named_reading(name)
    if chosen.per_query:
        raise ValueError(f"reading {name!r} has one number per query; the readings compared have one for each key")
    return chosen


@dataclass(frozen=True, eq=False)
class _Changes:
    """What hiding keys changes in one layer for one input, by each of the three measures."""

    visible: Bool[Tensor, "b h q k"]
    head_output: Float[Tensor, "b h q k"]
    keys: list[int]
    # {"prediction": (keys,), "prediction, zeroed": (keys,)}
    predictions: dict[str, Tensor]

    @classmethod
    def measure(
        cls,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        layer: LayerTrace,
        prediction: Prediction,
        keys: list[int],
    ) -> _Changes:
        head_output = head_output_change(layer)
        place = (layer.kind, layer.layer)
        predictions = {
            against: prediction_change(
                model, inputs, layer=place, prediction=prediction, keys=keys, renormalise=renormalise
            ).cpu()
            for against, renormalise in zip(AGAINST[1:], (True, False), strict=True)
        }
        return cls(_visible_pairs(layer, head_output), head_output, keys, predictions)

    def correlate(self, reading: Reading, values: Tensor) -> dict[str, tuple[float, float]]:
        """(Spearman, Pearson) of a reading's map with each of the changes."""
        values = values.detach().expand_as(self.head_output)
        size = values.abs()
        pairs = {AGAINST[0]: row_correlations(size, self.head_output, self.visible)}
        summed = values if reading.signed else size
        # Averaged over the queries that see the key: in a causal model early keys are seen by more of them.
        per_key = (summed * self.visible).sum((0, 1, 2)) / self.visible.sum((0, 1, 2)).clamp(min=1)
        score = per_key[self.keys].abs().cpu()
        for against, change in self.predictions.items():
            pairs[against] = row_correlations(score.to(change.dtype), change, torch.ones_like(change, dtype=torch.bool))
        return pairs


def default_prediction(output: Any) -> Tensor:
    """A classifier's probabilities, a causal model's next token, or the mean over positions of an encoder's output."""
    logits = getattr(output, "logits", None)
    if logits is None:
        return output.last_hidden_state.mean(1)
    if logits.dim() == 2:
        return torch.softmax(logits, -1)
    if hasattr(output, "past_key_values"):
        return torch.softmax(logits[:, -1], -1)
    return torch.softmax(logits, -1).mean(1)


class _Without(Mechanism):
    """Softmax in which batch item i + 1 does not see the key ``keys[i]``, or gives it zero weight afterwards."""

    def __init__(self, keys: Sequence[int], *, renormalise: bool) -> None:
        self.keys, self.renormalise = keys, renormalise

    def reference(self, call: AttentionCall) -> Tensor:
        if self.renormalise:
            return Softmax().reference(self._without_keys(call))
        return Softmax().reference(call).masked_fill(self._hidden(call)[:, None, None], 0)

    def forward(self, call: AttentionCall) -> Tensor:
        return Softmax().forward(self._without_keys(call)) if self.renormalise else super().forward(call)

    def _hidden(self, call: AttentionCall) -> Tensor:
        hidden = torch.zeros(len(self.keys) + 1, call.k.shape[2], dtype=torch.bool)
        hidden[torch.arange(len(self.keys)) + 1, torch.tensor(list(self.keys))] = True
        return hidden.to(call.k.device)

    def _without_keys(self, call: AttentionCall) -> AttentionCall:
        shown = ~self._hidden(call)
        return replace(call, key_visible=shown if call.key_visible is None else call.key_visible & shown)


def _maps_of(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    prediction: Prediction,
    readings: Sequence[Reading],
    noise: torch.Generator,
) -> tuple[list[LayerTrace], dict[str, list[Tensor | None]]]:
    """The layers of one forward pass, and the map of each by each reading; None where a reading has none."""
    with torch.enable_grad(), record(model) as trace:
        # Readings with gradients explain the prediction that the model made.
        target = prediction(model(**inputs)).amax()
    layers = list(trace)
    with torch.no_grad():
        maps = {one.name: list(one.of_layers(layers, target=target, generator=noise)) for one in readings}
    return layers, maps


def _by_hiding(layer: LayerTrace, o: Tensor) -> Tensor:
    call, metric = layer.call, _metric(layer)
    seen = visible(call)
    distances = []
    for j in range(call.sizes[3]):
        shown = torch.ones(call.sizes[0], call.sizes[3], dtype=torch.bool, device=o.device)
        shown[:, j] = False
        shown = shown if call.key_visible is None else shown & call.key_visible
        moved = (layer.mechanism(replace(call, key_visible=shown)).to(o.dtype) - o).double()
        distances.append((moved @ metric * moved).sum(-1).clamp(min=0).sqrt())
    change = torch.stack(distances, -1).to(o.dtype)
    return change if seen is None else change.masked_fill(~seen, 0)


def _metric(layer: LayerTrace) -> Tensor:
    """W_O^h^T W_O^h per head, so that <x, x> in it is |W_O^h x|^2; the identity where W_O is unknown."""
    h, e = layer.output.shape[1], layer.output.shape[3]
    if layer.projection is None:
        return torch.eye(e, dtype=torch.float64, device=layer.output.device).expand(h, e, e)
    parts = layer.projection.detach().unflatten(1, (h, e)).transpose(0, 1).double()
    return parts.mT @ parts


def _visible_pairs(layer: LayerTrace, like: Tensor) -> Tensor:
    seen = visible(layer.call)
    every = torch.ones_like(like, dtype=torch.bool)
    return every if seen is None else every & seen


def _chosen_keys(layer: LayerTrace, keys: int | None, noise: torch.Generator) -> list[int]:
    """The visible keys, or ``keys`` of them drawn at random."""
    n = layer.call.sizes[3]
    shown = layer.call.key_visible
    usable = list(range(n)) if shown is None else shown[0].nonzero()[:, 0].tolist()
    if keys is None or keys >= len(usable):
        return usable
    return sorted(usable[i] for i in torch.randperm(len(usable), generator=noise)[:keys].tolist())


def _row(
    kind: str, layer: int, against: str, reading: str, values: list[tuple[float, float]], resamples: int, seed: int
) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": kind, "layer": layer, "against": against, "reading": reading}
    for name, column in zip(("spearman", "pearson"), zip(*values, strict=True), strict=True):
        mean, low, high = bootstrap_interval(column, resamples=resamples, seed=seed)
        row |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return row | {"inputs": len(values)}
