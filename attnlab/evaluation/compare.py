"""``attnlab compare``: mechanisms in place of a model's own attention, judged by quality, error and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from attnlab.adapters import LoadedModel, record, swap
from attnlab.attention import AttentionCall, Mechanism
from attnlab.evaluation.quality import model_inputs, quality
from attnlab.evaluation.recommend import CANDIDATES, RecommendConfig, halves, recommend
from attnlab.evaluation.sweep import sweep_r
from attnlab.evaluation.windows import Windows, batches, cut_windows
from attnlab.guidance import pattern_audit
from attnlab.measure import median_seconds, peak_bytes
from attnlab.mechanisms.softmax import Softmax
from attnlab.pages.audit import audit_lines
from attnlab.patterns import special_tokens
from attnlab.provenance import provenance
from attnlab.reading.approximation import ApproximationError, approximation_error
from attnlab.registry import mechanism
from attnlab.trace import Trace

__all__ = ["DEFAULT_MECHANISMS", "CompareConfig", "compare"]

DEFAULT_MECHANISMS = (
    "softmax",
    "value-aware:r=d+1",
    "top-r:r=16",
    "top-r:r=4",
    "top-r:r=1",
    "value-aware:r=1",
    "window:r=16",
    "kernel:elu",
)
# Columns of the table in a terminal, and the fields of a row that they show.
ERRORS = {
    "output error": "output_error",
    "score error": "score_error",
    "after W_O": "after_projection",
    "effective": "effective_error",
}


@dataclass(frozen=True)
class CompareConfig:
    """What is compared, on how much text, and how often the clock is read."""

    mechanisms: tuple[str, ...] = DEFAULT_MECHANISMS
    # Tokens a window holds; None: 256, or the model's positions where they are fewer.
    length: int | None = None
    # Tokens of the text that are read.
    tokens: int = 8192
    batch: int = 8
    seed: int = 0
    repeats: int = 3
    # Windows whose heads are compared one by one.
    traced: int = 4
    # Whether quality and error are also measured against the number of keys, r.
    sweep: bool = False
    # Whether plans are recommended, and of what: "layers" or "heads".
    recommend: str | None = None

    def __post_init__(self) -> None:
        if not self.mechanisms:
            raise ValueError("name at least one mechanism to compare")
        for name in ("tokens", "batch", "repeats", "traced"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.length is not None and self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}")


@torch.no_grad()
def compare(
    loaded: LoadedModel, text: str, *, config: CompareConfig, model_name: str, text_name: str
) -> dict[str, Any]:
    """The comparison as JSON: one row per mechanism, each beside exact softmax attention in the same model and run."""
    mechanisms = {spec: mechanism(spec) for spec in config.mechanisms}
    if config.recommend and loaded.task not in ("mlm", "causal"):
        raise ValueError(
            f"a recommendation keeps a model's quality, and a plain text cannot measure that of "
            f"{type(loaded.model).__name__} ({loaded.task}); use a masked or a causal language model"
        )
    chosen = _recommend_config(config)
    windows = cut_windows(loaded, text, length=config.length, most_tokens=config.tokens, seed=config.seed)
    exact = _with(loaded, windows, Softmax(), config.batch)
    trace = _traced(loaded, windows, config.traced)
    # Times are ratios: two windows give them as well as a batch, and sooner.
    sample = next(batches(windows, size=min(config.batch, 2)))

    rows, layers = [], {}
    for spec, mech in tqdm(mechanisms.items(), desc="comparing", unit="mechanism", disable=None):
        try:
            error = approximation_error(trace, mech)
            found = exact if isinstance(mech, Softmax) else _with(loaded, windows, mech, config.batch)
        except ValueError as refusal:
            rows.append({"mechanism": spec, "refused": str(refusal)})
            continue
        rows.append(
            {
                "mechanism": spec,
                "refused": None,
                **_row(found, exact, error),
                **_cost(loaded, trace, sample, mech, config),
            }
        )
        layers[spec] = [layer.output.tolist() for layer in error.layers]
    result = {
        "name": "compare",
        "model": _describe(loaded, trace, model_name),
        "text": {"name": text_name, "tokens": windows.tokens, "windows": len(windows.input_ids)},
        "config": asdict(config) | {"length": windows.input_ids.shape[1]},
        "seed": config.seed,
        **provenance(),
        # A property of the model's own attention, whatever takes its place.
        "ranking_differs": approximation_error(trace, Softmax()).summary()["ranking_differs"],
        "rows": rows,
        "layers": layers,
        "patterns": _audit(loaded, windows, trace, config.traced),
    }
    if config.sweep:
        result["sweeps"], result["sweep_notes"] = sweep_r(loaded, windows, trace, batch=config.batch)
    if chosen is not None:
        seen, held_out = halves(windows)
        result["recommendation"] = recommend(loaded, seen, trace, config=chosen, held_out=held_out)
    return result


def _recommend_config(config: CompareConfig) -> RecommendConfig | None:
    """The mechanisms that are compared are the candidates; where none was named, those that are made for saving."""
    if config.recommend is None:
        return None
    named = CANDIDATES if config.mechanisms == DEFAULT_MECHANISMS else config.mechanisms
    return RecommendConfig(mechanisms=named, by=config.recommend, batch=config.batch, repeats=config.repeats)


def _with(loaded: LoadedModel, windows: Windows, mech: Mechanism, size: int) -> dict[str, Any] | None:
    with swap(loaded.model, mech):
        return quality(loaded, windows, batch=size)


def _traced(loaded: LoadedModel, windows: Windows, count: int) -> Trace:
    batch = next(batches(windows, size=count))
    with swap(loaded.model, Softmax()), record(loaded.model) as trace:
        loaded.model(**model_inputs(loaded, batch))
    return trace


def _audit(loaded: LoadedModel, windows: Windows, trace: Trace, count: int) -> list[dict[str, Any]]:
    """How closely each head follows each pattern of attention guidance, on the windows that were traced."""
    batch = next(batches(windows, size=count))
    mask = batch["attention_mask"]
    return pattern_audit(trace, batch["input_ids"], attention_mask=mask, tokens=special_tokens(loaded.tokenizer))


def _cost(
    loaded: LoadedModel, trace: Trace, batch: dict[str, Tensor], mech: Mechanism, config: CompareConfig
) -> dict[str, float]:
    """The mechanism against softmax, taking turns: the model's forward pass, and one layer's attention by itself."""
    call, device = next(iter(trace)).call, batch["input_ids"].device

    def forward(mech: Mechanism) -> None:
        with torch.no_grad(), swap(loaded.model, mech):
            loaded.model(**model_inputs(loaded, batch))

    def attend(mech: Mechanism, call: AttentionCall = call) -> Tensor:
        with torch.no_grad():
            return mech(call)

    def ratio(job: Callable[[Mechanism], Any]) -> float:
        jobs = {"softmax": partial(job, Softmax()), "mechanism": partial(job, mech)}
        seconds = median_seconds(jobs, repeats=config.repeats, device=device)
        return seconds["mechanism"] / seconds["softmax"]

    # On a CPU every allocation is noted, of which a search for keys makes a great many: one window has enough.
    peaks = [peak_bytes(partial(attend, each, _first(call)), device=device) for each in (mech, Softmax())]
    return {"time_ratio": ratio(forward), "attention_time_ratio": ratio(attend), "memory_ratio": peaks[0] / peaks[1]}


def _first(call: AttentionCall) -> AttentionCall:
    """The call of its first row alone."""
    parts = ("q", "k", "v", "x", "key_visible", "mask", "bias", "memory")
    return replace(call, **{name: t[:1] for name in parts if (t := getattr(call, name)) is not None})


def _row(quality: dict[str, Any] | None, exact: dict[str, Any] | None, error: ApproximationError) -> dict[str, Any]:
    means = error.summary()
    return {
        "quality": None if quality is None or exact is None else quality | {"exact": exact["value"]},
        "output_error": means["output"],
        "score_error": means["scores"],
        "after_projection": means["layer_projected"],
        "effective_error": means["effective"],
    }


def _describe(loaded: LoadedModel, trace: Trace, name: str) -> dict[str, Any]:
    layers = list(trace)
    return {
        "name": name,
        "class": type(loaded.model).__name__,
        "task": loaded.task,
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "layers": len(layers),
        "heads": layers[0].call.q.shape[1],
        "head_width": layers[0].call.q.shape[3],
    }


def table_lines(result: dict[str, Any]) -> Sequence[str]:
    """The comparison as aligned text for a terminal."""
    measured = next((r["quality"] for r in result["rows"] if r.get("quality")), None)
    label = {"mlm_error": "MLM error", "perplexity": "perplexity"}[measured["name"]] if measured else "quality"
    header = ("mechanism", label, *ERRORS, "time", "memory")
    body: list[tuple[str, ...]] = [header]
    for row in result["rows"]:
        if row["refused"]:
            body.append((row["mechanism"], "refused: " + row["refused"].splitlines()[0]))
            continue
        body.append(
            (
                row["mechanism"],
                "-" if row["quality"] is None else _shown(row["quality"], "value"),
                *("-" if row[name] is None else f"{row[name]:.4f}" for name in ERRORS.values()),
                f"{row['time_ratio']:.2f} x",
                f"{row['memory_ratio']:.2f} x",
            )
        )
    whole = [row for row in body if not row[1].startswith("refused")]
    widths = [max(len(row[i]) for row in whole) for i in range(len(header))]
    widths[0] = max(len(row[0]) for row in body)
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        if not row[1].startswith("refused")
        else f"{row[0].ljust(widths[0])}  {row[1]}"
        for row in body
    ]
    differs = f"the nearest value is not that of largest weight for {result['ranking_differs']:.0%} of the queries"
    return [*lines, *_exact_line(measured, label), differs, *audit_lines(result.get("patterns", []))]


def _shown(quality: dict[str, Any], which: str) -> str:
    return f"{quality[which]:.1%}" if quality["name"] == "mlm_error" else f"{quality[which]:.4g}"


def _exact_line(measured: dict[str, Any] | None, label: str) -> list[str]:
    """The model's own quality, with a warning where it fails on this text even so."""
    if measured is None:
        return []
    line = f"with exact attention the {label} on this text is {_shown(measured, 'exact')}"
    if measured["exact"] <= {"perplexity": 500, "mlm_error": 0.65}[measured["name"]]:
        return [line]
    return [
        f"{line}: the model was made for other text, and differences say little here; name one it knows with --text"
    ]
