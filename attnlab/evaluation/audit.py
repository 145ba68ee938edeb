"""``attnlab audit``: what every head of a model does on a text, and what has changed since an earlier audit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from attnlab.adapters import LoadedModel, record
from attnlab.adapters.load import max_length
from attnlab.adapters.protocol import adapter_of
from attnlab.data import TextFile
from attnlab.evaluation.audit_changes import FORMAT, changes_since, check_baseline, refuse_other_subject
from attnlab.evaluation.audit_statistics import FINDINGS, STATISTICS, findings_of, head_statistics
from attnlab.evaluation.intervals import mean_interval
from attnlab.evaluation.quality import cut_windows, model_inputs
from attnlab.fields import check_int, expect
from attnlab.measure import parameter_count
from attnlab.pages.notebook import Result
from attnlab.progress import Progress
from attnlab.provenance import provenance
from attnlab.trace import Trace

__all__ = ["audit", "check_windows"]

# Fewer windows have intervals so wide that hardly a change is beyond them.
LEAST_WINDOWS = 6


@torch.no_grad()
def audit(
    loaded: LoadedModel,
    text: str | TextFile,
    *,
    baseline: Mapping[str, Any] | None = None,
    windows: int = 8,
    length: int | None = None,
    model_name: str = "",
    text_name: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Every head's statistics with 95 % intervals over windows of the text, and its findings, as JSON.

    With ``baseline``, an audit of a model of the same shape, ``changes`` lists what differs from it beyond the interval
    of the difference, corrected for the number of comparisons, and beyond what other texts change. ``windows`` of
    ``length`` tokens (256, or the model's positions where they are fewer) from the beginning of the text are read.
    """
    _check_arguments(loaded, text, length=length, names=(model_name, text_name), progress=progress)
    check_windows(windows)
    if baseline is not None:
        check_baseline(baseline)
    progress = progress or Progress("auditing")
    rows = _windows(loaded, text, windows, length)
    progress.expect(len(rows))
    values: dict[tuple[str, int], list[dict[str, list[Any]]]] = {}
    shape: dict[str, Any] = {}
    for row in rows:
        batch = {"input_ids": row[None], "attention_mask": torch.ones_like(row[None])}
        with record(loaded.model) as trace:
            loaded.model(**model_inputs(loaded, batch))
        shape = shape or _shape(loaded, trace, length=len(row))
        if baseline is not None:
            refuse_other_subject(shape, baseline["shape"])
        for layer in trace:
            values.setdefault((layer.kind, layer.layer), []).append(head_statistics(layer, row[None]))
        progress.step()
    progress.close()
    heads = [_head(kind, layer, head, shape, windows_of) for (kind, layer), windows_of in values.items()
             for head in range(len(windows_of[0]["share"]))]  # fmt: skip
    result = {
        "name": "audit",
        "format": FORMAT,
        "model": {"name": model_name, "parameters": parameter_count(loaded.model)},
        "shape": shape,
        "text": {"name": text_name, "windows": len(rows), "sha256": _sha256(rows.tolist())},
        "statistics": {name: statistic.meaning for name, statistic in STATISTICS.items()},
        "thresholds": {name: finding.threshold for name, finding in FINDINGS.items()},
        **provenance(),
        "heads": heads,
    }
    since = {"baseline": None, "changes": []} if baseline is None else changes_since(result, baseline)
    return Result(result | since)


def check_windows(windows: int) -> None:
    """Raise if so few windows say too little of a head."""
    check_int("windows", windows, least=LEAST_WINDOWS)


def _check_arguments(loaded: Any, text: Any, *, length: Any, names: tuple[Any, Any], progress: Any) -> None:
    expect("loaded", loaded, LoadedModel, "what load_model returns")
    adapter_of(loaded.model)
    expect("text", text, (str, TextFile), "a string or a TextFile")
    for name in names:
        expect("a name", name, str, "a string")
    if length is not None:
        check_int("length", length, least=1)
    if progress is not None:
        expect("progress", progress, Progress, "a Progress")


def _windows(loaded: LoadedModel, text: str | TextFile, windows: int, length: int | None) -> Tensor:
    """(windows, length): the ids of the first windows of the text that are full."""
    size = min(256, max_length(loaded.model) or 256) if length is None else length
    cut = cut_windows(loaded, text, length=size, most_tokens=windows * size)
    full = cut.input_ids[cut.attention_mask.bool().all(-1)][:windows]
    if cut.input_ids.shape[1] < size or len(full) < LEAST_WINDOWS:
        raise ValueError(
            f"the text has {cut.tokens} tokens, and an audit needs {LEAST_WINDOWS} windows of {size}; give a longer "
            "text or a smaller length"
        )
    return full


def _shape(loaded: LoadedModel, trace: Trace, *, length: int) -> dict[str, Any]:
    """What two audits must have in common to be compared."""
    layers = [[x.kind, x.layer, x.call.q.shape[1], x.call.k.shape[1], x.call.q.shape[3]] for x in trace]
    return {
        "class": type(loaded.model).__name__,
        "task": loaded.task,
        "layers": layers,
        "length": length,
        "tokenizer": _sha256(sorted(loaded.tokenizer.get_vocab().items())),
    }


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _head(
    kind: str, layer: int, head: int, shape: Mapping[str, Any], windows: Sequence[Mapping[str, list[Any]]]
) -> dict[str, Any]:
    """One head: its statistics over the windows, and its findings."""
    heads, groups = next((h, g) for k, number, h, g, _ in shape["layers"] if (k, number) == (kind, layer))
    statistics = {name: _summary(name, [window[name][head] for window in windows]) for name in STATISTICS}
    means = {name: None if one is None else one["mean"] for name, one in statistics.items()}
    others = [window["nearest_head"][head] for window in windows]
    return {
        "kind": kind,
        "layer": layer,
        "head": head,
        "key_value_head": head * groups // heads,
        # The head that is nearest in most windows.
        "nearest_head": max(others, key=others.count),
        "findings": [{"name": name, "statistic": FINDINGS[name].statistic} for name in findings_of(means)],
        "statistics": statistics,
    }


def _summary(name: str, values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean and 95 % interval over windows, and mean and standard deviation of the log-odds; None where one is None."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    mean, low, high, _ = mean_interval(known)
    assert low is not None
    assert high is not None
    # No statistic is negative, and those that are shares are at most 1.
    low, high = max(0.0, low), min(high, max(1.0, *known))
    odds = [STATISTICS[name].log_odds(value) for value in known]
    numbers = {"mean": mean, "low": low, "high": high, "odds_mean": fmean(odds), "odds_sd": stdev(odds)}
    # Digits beyond these are rounding of one machine.
    return {key: float(f"{value:.7g}") for key, value in numbers.items()}
