"""``attnlab compare``: mechanisms in place of a model's own attention, judged by quality, error and cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnlab.adapters import LoadedModel, record, swap
from attnlab.attention import AttentionCall, Mechanism
from attnlab.data import TextFile
from attnlab.errors import problem_of
from attnlab.evaluation.compare_warnings import own_attention_warnings, untrained_warnings
from attnlab.evaluation.quality import (
    Predictions,
    Windows,
    batch_count,
    batches,
    cut_windows,
    default_tokens,
    model_inputs,
    predict,
    quality_summary,
    refuse_short_text,
)
from attnlab.evaluation.recommend import CANDIDATES, RecommendConfig, choosing_and_held_out, recommend
from attnlab.evaluation.sweep import sweep_r
from attnlab.guidance import pattern_audit
from attnlab.measure import median_seconds, parameter_count, peak_bytes
from attnlab.mechanisms.softmax import Softmax
from attnlab.pages.notebook import Result
from attnlab.patterns import special_tokens
from attnlab.progress import Progress
from attnlab.provenance import provenance
from attnlab.reading.approximation import ApproximationError, approximation_error, reading_error
from attnlab.reading.registry import recorded_reading
from attnlab.registry import mechanism, spec_of
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

# The tokens whose attention is recorded, and the queries that errors are measured on: of all heads together, so that a
# model of many heads takes no longer, and the fewest of each head.
TRACED, QUERIES, LEAST_QUERIES = 1024, 40_000, 16
# Parameters times tokens of a forward pass that is recorded, or repeated for the clock: a second or two on two cores.
WORK = 7e10
# The steps in which a mechanism may search for the keys of all queries together (``Mechanism.search_steps``).
SEARCH = 1_500_000_000
# What exact attention in other words has no number for.
COSTS = ("time_ratio", "attention_time_ratio", "memory_ratio")
# The conformance law from which a mechanism is exempt that looks at later tokens.
FUTURE_LAW = "causal_outputs_ignore_the_future"


@dataclass(frozen=True)
class CompareConfig:
    """What is compared, on how much text, and how often the clock is read."""

    mechanisms: tuple[str, ...] = DEFAULT_MECHANISMS
    # Tokens a window holds; None: 256, or the model's positions where they are fewer.
    length: int | None = None
    # Tokens of the text that are read; None: 8,192, or fewer for a large model (quality.default_tokens).
    tokens: int | None = None
    batch: int = 8
    seed: int = 0
    repeats: int = 3
    # Windows whose heads are compared one by one, of 1,024 tokens in all at most.
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
        for name in ("tokens", "batch", "repeats", "traced", "length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in self.readings:
            recorded_reading(name)


@torch.no_grad()
def compare(
    loaded: LoadedModel,
    text: str | TextFile,
    *,
    config: CompareConfig,
    model_name: str,
    text_name: str,
    progress: Progress | None = None,
    on_result: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """The comparison as JSON: one row per mechanism, each beside exact softmax attention in the same model and run.

    ``on_result`` is called with what there is each time that a mechanism is finished; ``complete`` is false until all
    is there.
    """
    progress, keep = progress or Progress("comparing"), on_result or (lambda result: None)
    mechanisms = {spec: mechanism(spec) for spec in config.mechanisms}
    recommend_config = _recommend_config(config, loaded)
    tokens = config.tokens or default_tokens(loaded)
    windows = cut_windows(loaded, text, length=config.length, most_tokens=tokens, seed=config.seed)
    refuse_short_text(windows, asked=tokens)
    progress.expect((1 + len(mechanisms)) * (batch_count(loaded, windows, config.batch) + 1) + 1)
    progress.stage("recording the model's own attention")
    bench = _Bench(loaded, windows, config, progress)
    result = _nothing_measured(bench, model_name, text_name, tokens)
    result["warnings"] += own_attention_warnings(loaded, windows, batch=config.batch)
    for spec, mech in mechanisms.items():
        progress.stage(spec)
        row, by_head, notes = bench.measure(spec, mech)
        result["rows"].append(row)
        if row["refused"] is None:
            result["layers"][spec] = by_head
            result["warnings"] += notes + _future_warnings(bench.trace, spec, mech) + untrained_warnings({spec: mech})
        progress.finished(f"{spec} ({len(result['rows'])} of {len(mechanisms)})")
        keep(result)
    progress.stage("patterns of the heads")
    result["patterns"] = _audit(loaded, bench)
    progress.step()
    if config.sweep:
        result["sweeps"], result["sweep_notes"] = sweep_r(loaded, windows, bench.trace, batch=config.batch)
        keep(result)
    if recommend_config is not None:
        choosing, held_out = choosing_and_held_out(windows)
        result["recommendation"] = recommend(
            loaded,
            choosing,
            bench.trace,
            config=recommend_config,
            held_out=held_out,
            progress=progress,
            on_result=lambda plans: keep(result | {"recommendation": plans}),
        )
    result["complete"] = True
    keep(result)
    progress.close()
    return Result(result)


def _nothing_measured(bench: _Bench, model_name: str, text_name: str, tokens: int) -> dict[str, Any]:
    """The result before the first mechanism: what is compared, on what."""
    windows, config = bench.windows, bench.config
    return {
        "name": "compare",
        "complete": False,
        "model": _describe(bench.loaded, bench.trace, model_name),
        "text": _describe_text(config, windows, text_name, tokens),
        "config": asdict(config) | {"tokens": tokens, "length": windows.input_ids.shape[1]},
        "seed": config.seed,
        **provenance(),
        # A property of the model's own attention, which no mechanism changes.
        "ranking_differs": bench.exact_error.summary()["ranking_differs"],
        "errors_over": bench.errors_over,
        "rows": [],
        "layers": {},
        "warnings": [],
        "patterns": [],
    }


class _Bench:
    """One model and text, on which mechanisms are measured one after another beside exact attention."""

    def __init__(self, loaded: LoadedModel, windows: Windows, config: CompareConfig, progress: Progress) -> None:
        self.loaded, self.windows, self.config, self.progress = loaded, windows, config, progress
        length = windows.input_ids.shape[1]
        affordable = int(WORK / max(1, parameter_count(loaded.model)))
        traced = max(1, min(config.traced, TRACED // length, affordable // length))
        self.heads_windows = windows.part(slice(traced), length=TRACED)
        self.trace = _traced(loaded, self.heads_windows)
        # Times are ratios: a few windows give them as well as a batch, and sooner; a long pass has less noise.
        self.sample = next(
            batches(windows, size=max(1, min(config.batch, 2, 512 // length, affordable // 2 // length)))
        )
        self.repeats = max(1, min(config.repeats, 4 * affordable // self.sample["input_ids"].numel()))
        # One layer's attention at the text's full length, for its cost.
        first = next(iter(self.trace))
        with swap(loaded.model, Softmax()), record(loaded.model, layers=[(first.kind, first.layer)]) as whole:
            loaded.model(**model_inputs(loaded, self.sample))
        self.call = next(iter(whole)).call
        layers, (count, heads, n_q, _) = len(self.trace), first.call.sizes
        self.queries = min(n_q, max(LEAST_QUERIES, QUERIES // (layers * heads * count)))
        self.exact_error = approximation_error(self.trace, Softmax(), queries=self.queries)
        progress.step()
        self.exact = self._predictions(Softmax())

    @property
    def errors_over(self) -> dict[str, int]:
        """What the errors are measured on: windows, their tokens, and the queries of each."""
        rows, _, n_q, _ = next(iter(self.trace)).call.sizes
        return {"windows": rows, "tokens": n_q, "queries": self.queries}

    def error(self, mech: Mechanism) -> tuple[ApproximationError, list[str]]:
        """The mechanism's error, and a sentence where it is measured on fewer queries than that of the others."""
        call = next(iter(self.trace)).call
        rows, heads, _, _ = call.sizes
        in_a_row = len(self.trace) * heads
        affordable = SEARCH // max(1, mech.search_steps(call))
        if affordable >= rows * in_a_row * self.queries:
            return approximation_error(self.trace, mech, queries=self.queries), []
        first = [replace(layer, call=_first(layer.call), output=layer.output[:1]) for layer in self.trace]
        queries = min(self.queries, max(LEAST_QUERIES, affordable // in_a_row))
        note = f"its keys take long to find, so that its errors are over {queries} queries of the first window alone"
        return approximation_error(first, mech, queries=queries), [f"{spec_of(mech)}: {note}"]

    def measure(self, spec: str, mech: Mechanism) -> tuple[dict[str, Any], list[list[float]], list[str]]:
        """(the mechanism's row, each layer's output error per head, warnings); a refusal is a row with its reason."""
        exact = all(mech.is_exact(call) for call in (self.call, *(layer.call for layer in self.trace)))
        own = isinstance(mech, Softmax)
        try:
            error, notes = (self.exact_error, []) if own else self.error(mech)
            predictions = self.exact if own else self._predictions(mech)
            of_readings = {name: reading_error(self.trace, mech, name) for name in self.config.readings}
            # Exact attention is compared with itself: its cost says nothing of an approximation.
            cost = dict.fromkeys(COSTS, 1.0 if own else None) if exact else self._cost(mech)
        except ValueError as refusal:
            return {"mechanism": spec, "refused": problem_of(refusal)}, [], []
        self.progress.step()
        row = {"mechanism": spec, "refused": None, "exact": exact, **_errors(error)}
        row |= {"quality": self._quality(predictions), "reading_errors": of_readings} | cost
        return row, [layer.output.tolist() for layer in error.layers], notes

    def _predictions(self, mech: Mechanism) -> Predictions | None:
        with swap(self.loaded.model, mech):
            return predict(self.loaded, self.windows, batch=self.config.batch, on_batch=self.progress.step)

    def _quality(self, predictions: Predictions | None) -> dict[str, Any] | None:
        if predictions is None or self.exact is None:
            return None
        above, low, high = predictions.loss_above(self.exact)
        paired = {"loss_above": above, "loss_above_low": low, "loss_above_high": high}
        exact = quality_summary(self.exact)
        of_exact = {"exact": exact["value"], "exact_low": exact["low"], "exact_high": exact["high"]}
        return quality_summary(predictions) | of_exact | paired

    def _cost(self, mech: Mechanism) -> dict[str, float | None]:
        """The mechanism against softmax, taking turns: the model's forward pass, and one layer's attention alone."""
        device = self.sample["input_ids"].device

        def forward(mech: Mechanism) -> None:
            with torch.no_grad(), swap(self.loaded.model, mech):
                self.loaded.model(**model_inputs(self.loaded, self.sample))

        def attend(mech: Mechanism, call: AttentionCall = self.call) -> Tensor:
            with torch.no_grad():
                return mech(call)

        def ratio(job: Callable[[Mechanism], Any]) -> float:
            jobs = {"softmax": partial(job, Softmax()), "mechanism": partial(job, mech)}
            # The text has just been read by the mechanism, so the model needs no warming up.
            seconds = median_seconds(jobs, repeats=self.repeats, warmup=int(job is attend), device=device)
            return seconds["mechanism"] / seconds["softmax"]

        # On a CPU every allocation is counted, which is slow where a search for keys makes many: one window is enough.
        peaks = [peak_bytes(partial(attend, each, _first(self.call)), device=device) for each in (mech, Softmax())]
        return dict(zip(COSTS, (ratio(forward), ratio(attend), peaks[0] / peaks[1]), strict=True))


def _future_warnings(trace: Trace, spec: str, mech: Mechanism) -> list[str]:
    """A sentence if the mechanism's output depends on later tokens although the model's attention is causal."""
    reason = mech.exempt.get(FUTURE_LAW)
    if reason is None or not any(layer.call.causal for layer in trace):
        return []
    return [
        f"{spec}: its outputs depend on later tokens, which a causal model must not see ({reason}); the quality here "
        "says nothing of generation"
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


def _traced(loaded: LoadedModel, windows: Windows) -> Trace:
    (batch,) = batches(windows, size=len(windows.input_ids))
    with swap(loaded.model, Softmax()), record(loaded.model) as trace:
        loaded.model(**model_inputs(loaded, batch))
    return trace


def _audit(loaded: LoadedModel, bench: _Bench) -> list[dict[str, Any]]:
    """How closely each head follows each pattern of attention guidance, on the windows that were traced."""
    ids, mask = bench.heads_windows.input_ids, bench.heads_windows.attention_mask
    return pattern_audit(bench.trace, ids, attention_mask=mask, tokens=special_tokens(loaded.tokenizer))


def _first(call: AttentionCall) -> AttentionCall:
    """The call of its first row alone."""
    parts = ("q", "k", "v", "x", "key_visible", "mask", "bias", "memory")
    return replace(call, **{name: t[:1] for name in parts if (t := getattr(call, name)) is not None})


def _errors(error: ApproximationError) -> dict[str, Any]:
    means = error.summary()
    return {
        "output_error": means["output"],
        "score_error": means["scores"],
        "after_projection": means["layer_projected"],
        "effective_error": means["effective"],
    }


def _describe_text(config: CompareConfig, windows: Windows, name: str, asked: int) -> dict[str, Any]:
    """How much of the text was read, and why not more."""
    described = {"name": name, "tokens": windows.tokens, "windows": len(windows.input_ids)}
    if windows.tokens < asked:
        return described | {"why": f"the whole text; up to {asked:,} tokens would have been read"}
    if config.tokens is None:
        return described | {"why": f"the first {asked:,}, for a model of this size; --tokens reads more"}
    return described | {"why": "as many as were asked for"}


def _describe(loaded: LoadedModel, trace: Trace, name: str) -> dict[str, Any]:
    layers = list(trace)
    return {
        "name": name,
        "class": type(loaded.model).__name__,
        "task": loaded.task,
        "parameters": parameter_count(loaded.model),
        "layers": len(layers),
        "heads": layers[0].call.q.shape[1],
        "head_width": layers[0].call.q.shape[3],
    }
