"""``attnlab compare``: mechanisms in place of a model's own attention, judged by quality, error and cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from attnlab.adapters import LoadedModel, record, swap
from attnlab.attention import AttentionCall, Mechanism
from attnlab.errors import problem_of
from attnlab.evaluation.quality import Windows, batches, cut_windows, model_inputs, quality, refuse_short_text
from attnlab.evaluation.recommend import CANDIDATES, RecommendConfig, choosing_and_held_out, recommend
from attnlab.evaluation.sweep import sweep_r
from attnlab.guidance import pattern_audit
from attnlab.measure import median_seconds, peak_bytes
from attnlab.mechanisms.softmax import Softmax
from attnlab.patterns import special_tokens
from attnlab.provenance import provenance
from attnlab.reading.approximation import ApproximationError, approximation_error, reading_error
from attnlab.reading.registry import recorded_reading
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

# The conformance law from which a mechanism is exempt that looks at later tokens.
FUTURE_LAW = "causal_outputs_ignore_the_future"


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
    # Readings of which the error of every mechanism's map is also measured.
    readings: tuple[str, ...] = ()
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
        for name in self.readings:
            recorded_reading(name)


@torch.no_grad()
def compare(
    loaded: LoadedModel, text: str, *, config: CompareConfig, model_name: str, text_name: str
) -> dict[str, Any]:
    """The comparison as JSON: one row per mechanism, each beside exact softmax attention in the same model and run."""
    mechanisms = {spec: mechanism(spec) for spec in config.mechanisms}
    recommend_config = _recommend_config(config, loaded)
    windows = cut_windows(loaded, text, length=config.length, most_tokens=config.tokens, seed=config.seed)
    refuse_short_text(windows, asked=config.tokens)
    trace = _traced(loaded, windows, config.traced)
    rows, layers = _mechanism_rows(loaded, windows, trace, mechanisms, config)
    warnings = _future_warnings(
        trace, {row["mechanism"]: mechanisms[row["mechanism"]] for row in rows if not row["refused"]}
    )
    result = {
        "name": "compare",
        "model": _describe(loaded, trace, model_name),
        "text": {"name": text_name, "tokens": windows.tokens, "windows": len(windows.input_ids)},
        "config": asdict(config) | {"length": windows.input_ids.shape[1]},
        "seed": config.seed,
        **provenance(),
        # A property of the model's own attention, which no mechanism changes.
        "ranking_differs": approximation_error(trace, Softmax()).summary()["ranking_differs"],
        "rows": rows,
        "layers": layers,
        "warnings": warnings,
        "patterns": _audit(loaded, windows, trace, config.traced),
    }
    if config.sweep:
        result["sweeps"], result["sweep_notes"] = sweep_r(loaded, windows, trace, batch=config.batch)
    if recommend_config is not None:
        choosing, held_out = choosing_and_held_out(windows)
        result["recommendation"] = recommend(loaded, choosing, trace, config=recommend_config, held_out=held_out)
    return result


def _mechanism_rows(
    loaded: LoadedModel, windows: Windows, trace: Trace, mechanisms: dict[str, Mechanism], config: CompareConfig
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(a row per mechanism, {mechanism: each layer's output error per head}); a refusal is a row with its reason."""
    exact = _quality_with(loaded, windows, Softmax(), config.batch)
    # Times are ratios: two windows give them as well as a batch, and sooner.
    sample = next(batches(windows, size=min(config.batch, 2)))
    rows: list[dict[str, Any]] = []
    layers = {}
    for spec, mech in tqdm(mechanisms.items(), desc="comparing", unit="mechanism", disable=None):
        try:
            error = approximation_error(trace, mech)
            measured = exact if isinstance(mech, Softmax) else _quality_with(loaded, windows, mech, config.batch)
            of_readings = {name: reading_error(trace, mech, name) for name in config.readings}
        except ValueError as refusal:
            rows.append({"mechanism": spec, "refused": problem_of(refusal)})
            continue
        row = {"mechanism": spec, "refused": None, **_errors(measured, exact, error)}
        rows.append(row | {"reading_errors": of_readings} | _cost(loaded, trace, sample, mech, config))
        layers[spec] = [layer.output.tolist() for layer in error.layers]
    return rows, layers


def _future_warnings(trace: Trace, mechanisms: dict[str, Mechanism]) -> list[str]:
    """A sentence for each mechanism whose output depends on later tokens although the model's attention is causal."""
    if not any(layer.call.causal for layer in trace):
        return []
    return [
        f"{spec}: its outputs depend on later tokens, which a causal model must not see ({reason}); the quality here "
        "says nothing of generation"
        for spec, mech in mechanisms.items()
        if (reason := mech.exempt.get(FUTURE_LAW)) is not None
    ]


def _recommend_config(config: CompareConfig, loaded: LoadedModel) -> RecommendConfig | None:
    """The mechanisms that are compared are the candidates; where none was named, those that are made for saving."""
    if config.recommend is None:
        return None
    if loaded.task not in ("mlm", "causal"):
        raise ValueError(
            f"a recommendation keeps a model's quality, and a plain text cannot measure that of "
            f"{type(loaded.model).__name__} ({loaded.task}); use a masked or a causal language model"
        )
    named = CANDIDATES if config.mechanisms == DEFAULT_MECHANISMS else config.mechanisms
    return RecommendConfig(mechanisms=named, by=config.recommend, batch=config.batch, repeats=config.repeats)


def _quality_with(loaded: LoadedModel, windows: Windows, mech: Mechanism, size: int) -> dict[str, Any] | None:
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

    # On a CPU every allocation is counted, which is slow where a search for keys makes many: one window is enough.
    peaks = [peak_bytes(partial(attend, each, _first(call)), device=device) for each in (mech, Softmax())]
    return {"time_ratio": ratio(forward), "attention_time_ratio": ratio(attend), "memory_ratio": peaks[0] / peaks[1]}


def _first(call: AttentionCall) -> AttentionCall:
    """The call of its first row alone."""
    parts = ("q", "k", "v", "x", "key_visible", "mask", "bias", "memory")
    return replace(call, **{name: t[:1] for name in parts if (t := getattr(call, name)) is not None})


def _errors(quality: dict[str, Any] | None, exact: dict[str, Any] | None, error: ApproximationError) -> dict[str, Any]:
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
