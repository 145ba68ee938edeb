"""Which reading says what hiding a key changes; short inputs; other distributions; and what the reading costs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters import record
from attnlab.attention import repeat_groups
from attnlab.measure import median_seconds
from attnlab.reading.alternative import alternative_attention
from attnlab.reading.correlation import bootstrap_interval
from attnlab.reading.effective import effective_attention
from attnlab.reading.effective_layers import read_effective
from attnlab.reading.faithfulness import AGAINST, compared_readings, faithfulness
from attnlab.trace import LayerTrace
from papers.effective.padded_effective import padded_effective_attention
from papers.effective.tables import read_maps

__all__ = ["PAIRS", "alternative_row", "faithfulness_tables", "short_input_rows", "timing_rows"]

# The second is what the paper leaves open; the third asks what effective attention adds to the norms.
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
    mine = [row for row in rows if (row["against"], row["reading"]) == (against, reading)]
    for measure in MEASURES:
        for row in mine:
            _append(values, (row["layer"], against, reading), measure, row[measure])
        known = [row[measure] for row in mine if row[measure] is not None]
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
    """The largest |W_perp - W| where texts are cut to n tokens; it cannot be other than zero for n <= d.

    ``difference`` counts every singular value of V but those below 1e-10 of the largest. A square V of a trained model
    is now and then singular to float32, and then ``difference_float32``, with the threshold of that precision, is not
    zero; ``singular_share`` is the share of heads where it is so.
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
    found = alternative_attention(layer)
    same = torch.linalg.vector_norm((found.weights - w).double() @ v.double())
    residual = (same / torch.linalg.vector_norm(w.double() @ v.double())).item()
    some = found.exists
    distance = found.distance[some].mean().item() if bool(some.any()) else 0.0
    return {"text": text, "residual": residual, "distance": distance, "exists_share": some.float().mean().item()}


@torch.no_grad()
def timing_rows(
    model: nn.Module, batch: Mapping[str, Tensor], *, what: str, repeats: int = 7, svd_repeats: int = 1
) -> Iterator[dict[str, Any]]:
    """Seconds of an evaluation batch: as it is, with every effective map and residual, by the full SVD (Table 3)."""
    inputs = {name: t for name, t in batch.items() if name != "labels"}
    device = inputs["input_ids"].device

    def ours() -> float:
        found.clear()
        read(**inputs)
        return float(torch.stack([e.residual for e in found]).max())

    def svd() -> None:
        with record(model) as trace:
            model(**inputs)
        for layer in trace:
            w, v = layer.weights(), repeat_groups(layer.call.v, layer.call.groups)
            padded_effective_attention(w, v, key_visible=layer.call.key_visible)

    def standard() -> None:
        model(**inputs, output_attentions=True)

    shape = "x".join(str(n) for n in inputs["input_ids"].shape)
    before = model.config._attn_implementation  # type: ignore[union-attr]
    model.set_attn_implementation("eager")  # type: ignore[operator]
    # An evaluation enters the context once, and attends to many batches in it; the eager one needs its own model.
    read = copy.deepcopy(model)
    try:
        with read_effective(read) as found:
            # The SVD last and seldom: on a GPU it takes seconds.
            for way, job, times in (
                ("standard", standard, repeats),
                ("ours", ours, repeats),
                ("full-svd", svd, svd_repeats),
            ):
                # Each beside the evaluation it is compared with, so that a noisy moment falls on both.
                jobs = {"standard": standard, way: job}
                seconds = median_seconds(jobs, repeats=times, warmup=1 if way == "full-svd" else 3, device=device)
                ratio = seconds[way] / seconds["standard"]
                yield {"model": what, "way": way, "batch": shape, "seconds": seconds[way], "ratio": ratio}
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
