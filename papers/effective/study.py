"""Which reading predicts what hiding a key changes; short inputs; and other distributions with the same output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.attention import repeat_groups
from attnlab.reading.alternative import alternative_attention
from attnlab.reading.correlation import bootstrap_interval
from attnlab.reading.effective import effective_attention
from attnlab.reading.faithfulness import AGAINST, compared_readings, faithfulness
from attnlab.trace import LayerTrace
from papers.effective.tables import read_maps

__all__ = ["PAIRS", "alternative_row", "faithfulness_tables", "short_input_rows"]

# Readings that are compared. The paper leaves the second pair open; the third asks what effective attention adds to
# the norms.
PAIRS = (
    ("effective", "standard"),
    ("effective", "norm"),
    ("effective norm", "norm"),
    ("norm", "standard"),
    ("effective", "random"),
)
MEASURES = ("spearman", "pearson")
# {(layer, against, reading): {measure: a value per text}}
Correlations = dict[tuple[int | str, str, str], dict[str, list[float]]]


def faithfulness_tables(
    model: nn.Module,
    texts: Iterable[Mapping[str, Tensor]],
    *,
    task: str,
    prediction: Callable[[Any], Tensor] | None,
    keys: int | None,
    seed: int,
) -> dict[str, list[dict[str, Any]]]:
    """Correlations per layer and reading, and the paired differences between readings, with 95 % intervals over texts.

    The rows of layer "all" average a text's layers first.
    """
    values: Correlations = {}
    for number, text in enumerate(texts):
        rows = faithfulness(model, [text], prediction=prediction, keys=keys, resamples=1, seed=seed + number).rows()
        for against in AGAINST:
            for reading in compared_readings():
                _add_text(values, against, reading, rows)
    table = [
        {"task": task, "layer": layer, "against": against, "reading": reading}
        | _interval(columns, MEASURES, seed)
        | {"inputs": len(columns["spearman"])}
        for (layer, against, reading), columns in values.items()
    ]
    return {"faithfulness": table, "faithfulness_differences": _differences(values, task, seed)}


def _add_text(values: Correlations, against: str, reading: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add the correlations of one text, layer by layer and averaged over its layers."""
    layers = [row for row in rows if (row["against"], row["reading"]) == (against, reading)]
    for measure in MEASURES:
        for row in layers:
            _append(values, (row["layer"], against, reading), measure, row[measure])
        known = [row[measure] for row in layers if row[measure] is not None]
        _append(values, ("all", against, reading), measure, sum(known) / len(known) if known else None)


def _differences(values: Correlations, task: str, seed: int) -> list[dict[str, Any]]:
    """Differences between two readings on the same texts."""
    rows = []
    for first, second in PAIRS:
        for layer, against in dict.fromkeys((layer, against) for layer, against, _ in values):
            a, b = values[layer, against, first], values[layer, against, second]
            paired = {m: [x - y for x, y in zip(a[m], b[m], strict=True)] for m in MEASURES}
            rows.append(
                {"task": task, "layer": layer, "against": against, "first": first, "second": second}
                | _interval(paired, MEASURES, seed)
            )
    return rows


def _append(values: Correlations, key: tuple[int | str, str, str], measure: str, value: float | None) -> None:
    column = values.setdefault(key, {}).setdefault(measure, [])
    column.append(float("nan") if value is None else value)


def _interval(columns: Mapping[str, Sequence[float]], measures: Sequence[str], seed: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for measure in measures:
        mean, low, high = bootstrap_interval(columns[measure], seed=seed)
        row |= {measure: mean, f"{measure}_low": low, f"{measure}_high": high}
    return row


def short_input_rows(
    model: nn.Module, batch: Mapping[str, Tensor], *, lengths: Sequence[int], separator: int
) -> list[dict[str, Any]]:
    """The largest |W_perp - W| where texts are cut to n tokens; in exact arithmetic it is zero for n <= d.

    ``difference`` has the rank of V with a threshold of 1e-10. A square V of a trained model is sometimes singular to
    the threshold of float32. Then ``difference_float32``, with that threshold, is not zero; ``singular_share`` is the
    share of such heads.
    """
    rows = []
    enough = batch["attention_mask"].sum(-1) >= max(lengths)
    if not bool(enough.any()):
        return []
    for length in lengths:
        cut = {name: t[enough, :length].clone() for name, t in batch.items() if name != "labels"}
        cut["input_ids"][:, -1] = separator
        maps, facts, layers = read_maps(model, cut)
        exact = [effective_attention(layer, rtol=1e-10).weights for layer in layers]
        rows.append(
            {
                "length": length,
                "difference": _largest(exact, maps["standard"]),
                "difference_float32": _largest(maps["effective"], maps["standard"]),
                "singular_share": 1 - facts["trivial"].mean().item(),
            }
        )
    return rows


def _largest(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


def alternative_row(layers: Sequence[LayerTrace], *, text: str) -> dict[str, Any]:
    """Another distribution over the keys with the same output, for every query of one layer (Appendix A)."""
    layer = layers[-1]
    w, v = layer.weights(), repeat_groups(layer.call.v, layer.call.groups)
    other = alternative_attention(layer)
    difference = torch.linalg.vector_norm((other.weights - w).double() @ v.double())
    residual = (difference / torch.linalg.vector_norm(w.double() @ v.double())).item()
    exists = other.exists
    distance = other.distance[exists].mean().item() if bool(exists.any()) else 0.0
    return {"text": text, "residual": residual, "distance": distance, "exists_share": exists.float().mean().item()}
