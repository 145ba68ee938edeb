"""``python -m papers abc-decoding``: Figures 1 and 2 and Table 6, what a decoded token costs after many others.

A sequence-to-sequence model reads N tokens and writes N, greedily, 16 rows at once. A step's time is measured with its
cache filled to several lengths. On a GPU the step is one captured graph, so that its time is not that of its launches.
The time of a whole sequence is the sum of its steps' times, by the trapezoidal rule between the lengths measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.devices import best_device
from attnlab.measure import captured, median_seconds
from attnlab.models import Cache, Transformer, named_config
from attnlab.models.transformer import EncoderOutput
from attnlab.progress import each
from papers.abc.tables import Rows, spread
from papers.common.row_store import Part

__all__ = ["KEYS", "MODELS", "NAME", "NOTES", "AbcDecodingConfig", "exponent", "run_decoding"]

NAME = "abc-decoding"
KEYS = {
    "steps": ["model", "length"],
    "figure_1": ["model", "length"],
    "figure_2": ["model", "length"],
    "exponents": ["model", "quantity"],
}
NOTES = {
    "figure_1": "Tokens a second of all rows over a whole sequence: N tokens read, N written. The sequence is not "
    "decoded as a whole: its time is the sum of its steps' times, which are measured at these lengths and interpolated "
    "linearly between them.",
    "figure_2": "Megabytes that the caches of self- and cross-attention hold after N tokens, all rows.",
    "exponents": "The slope of log(time of a sequence) and of log(memory) against log N, over the upper half of the "
    "lengths.",
}
# Cross and causal memories as in the paper's Section 6; RFA has two features for each direction.
MODELS = {
    "softmax": ("softmax", "softmax"),
    "ELU": ("kernel:elu", "kernel:elu"),
    "RFA": ("rfa:features=128", "rfa:features=64"),
    "T2R": ("t2r:features=32", "t2r:features=4"),
    "ABC_MLP": ("abc-mlp:slots=32", "abc-mlp:slots=8"),
}


@dataclass(frozen=True)
class AbcDecodingConfig:
    """The paper's translation model (6 layers, width 512, 8 heads), batch 16."""

    model: str = "translation-wmt14"
    layers: int | None = None
    batch: int = 16
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    repeats: int = 7
    # Steps timed together, so that the clock's error is small beside their time.
    together: int = 10
    models: tuple[str, ...] = tuple(MODELS)

    def __post_init__(self) -> None:
        if len(self.lengths) < 4 or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"exponents need at least four rising lengths, got {self.lengths}")


# The paper's sizes are ours.
CONFIGS = dict.fromkeys(("small", "paper"), AbcDecodingConfig())


def run_decoding(config: AbcDecodingConfig, *, part: Part) -> None:
    """Every model at every length, all of them taking turns; then the figures and exponents."""
    device = best_device()
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    jobs, held = {}, {}
    for name in each(config.models):
        cross, causal = MODELS[name]
        torch.manual_seed(0)
        wanted = replace(named_config(config.model), cross_attention=cross, causal_attention=causal, dropout=0.0)
        if config.layers is not None:
            wanted = replace(wanted, layers=config.layers)
        model = Transformer(wanted).to(device, kind).eval()
        for length in config.lengths:
            jobs[f"{name} {length}"], held[name, length] = _steps(model, config, length)
    seconds = median_seconds(jobs, repeats=config.repeats, warmup=1, device=device)
    for (name, length), size in held.items():
        milliseconds = 1000 * seconds[f"{name} {length}"] / config.together
        part.row("steps", model=name, length=length, milliseconds=milliseconds, megabytes=size / 1e6)
    for name in config.models:
        _figures(name, config, part)


def _figures(name: str, config: AbcDecodingConfig, part: Part) -> None:
    rows = sorted((r for r in part.content["tables"]["steps"] if r["model"] == name), key=lambda r: r["length"])
    lengths = [row["length"] for row in rows]
    totals = whole_times(lengths, [row["milliseconds"] / 1000 for row in rows])
    for row, total in zip(rows, totals, strict=True):
        speed = config.batch * row["length"] / total
        part.row("figure_1", model=name, length=row["length"], tokens_per_second=speed, seconds=total)
        part.row("figure_2", model=name, length=row["length"], memory=row["megabytes"])
    half = len(rows) // 2
    for quantity, values in (("time", totals), ("memory", [row["megabytes"] for row in rows])):
        part.row("exponents", model=name, quantity=quantity, exponent=exponent(lengths[half:], values[half:]))


def whole_times(lengths: Sequence[int], steps: Sequence[float]) -> list[float]:
    """The time of N steps for each N, where a step at the N-th token takes ``steps``; before the first, as at it.

    >>> whole_times([2, 4], [1.0, 3.0])
    [2.0, 6.0]
    """
    totals = [lengths[0] * steps[0]]
    for i in range(1, len(lengths)):
        totals.append(totals[-1] + (lengths[i] - lengths[i - 1]) * (steps[i] + steps[i - 1]) / 2)
    return totals


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """The slope of a line through log(value) against log(length).

    >>> round(exponent([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    x, y = [math.log(n) for n in lengths], [math.log(v) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    # The slope of a constant is rounding error.
    return round(slope, 9)


def derived(tables: dict[str, Rows]) -> dict[str, Rows]:
    """The figures with a column for each model, and ABC_MLP's speed over that of the others."""
    speeds = spread(tables.get("figure_1", []), ["length"], "model", "tokens_per_second")
    ratios = [
        {
            "length": row["length"],
            **{f"over {name}": row["ABC_MLP"] / row[name] for name in MODELS if name != "ABC_MLP" and name in row},
        }
        for row in speeds
        if "ABC_MLP" in row
    ]
    held = spread(tables.get("figure_2", []), ["length"], "model", "memory")
    exponents = spread(tables.get("exponents", []), ["model"], "quantity", "exponent")
    return {"speed_by_length": speeds, "abc_over": ratios, "memory_by_length": held, "table_6": exponents}


@torch.no_grad()
def _steps(model: Transformer, config: AbcDecodingConfig, length: int) -> tuple[Callable[[], None], int]:
    """(``config.together`` steps at this length, bytes in the caches)."""
    device, kind = next(model.parameters()).device, next(model.parameters()).dtype
    # Only the size of the source matters for time, so it need not come out of an encoder.
    source = EncoderOutput(torch.randn(config.batch, length, model.config.width, device=device, dtype=kind), None)
    cache = model.make_cache(config.batch, length + 1)
    token = torch.zeros(config.batch, 1, dtype=torch.long, device=device)
    # The first step writes the source's keys and values into the cache; then the past is set to the wanted length.
    model.decode(token, source, cache=cache)
    _lengthen(cache, length)
    # From now on the source is read from the cache.
    source = EncoderOutput(source.hidden[:, :1].clone(), None)
    memories = (cache, *cache.layers, *cache.cross, *(m.state for m in cache.cross if m.state is not None))
    past = [dict(vars(memory)) for memory in memories]

    @torch.no_grad()
    def step() -> Tensor:
        # Every step is at the same position after the same past. A captured step reads the tensors that it was captured
        # with, so they must stay alive.
        for memory, held in zip(memories, past, strict=True):
            vars(memory).update(held)
        head: Any = model.head
        return head(model.decode(token, source, cache=cache).hidden[:, -1]).argmax(-1)

    run = captured(step) if device.type == "cuda" else step

    def several() -> None:
        for _ in range(config.together):
            run()

    return several, _held(cache)


def _lengthen(cache: Cache, length: int) -> None:
    cache.length = length
    for layer in cache.layers:
        if hasattr(layer, "length"):
            layer.length = length


def _held(cache: Cache) -> int:
    def size(thing: Any) -> int:
        if isinstance(thing, Tensor):
            return thing.numel() * thing.element_size()
        return sum(size(value) for value in vars(thing).values()) if hasattr(thing, "__dict__") else 0

    return sum(size(layer) for layer in (*cache.layers, *cache.cross))
