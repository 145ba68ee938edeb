"""``python -m papers value-aware-lm``: a pretrained causal LM whose attention keeps r keys of every query.

The paper asks this of models that it trained; a reader asks it of the model at hand. Every window of the text is scored
under every mechanism, so that mechanisms are compared window by window. Between 1 and d + 1 keys the value-aware ones
are searched for, which is slow: they are scored on shorter windows, as many as the time allows, with their peers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.adapters import LoadedModel, load_model, record, swap
from attnlab.data import TextFile
from attnlab.devices import to_device
from attnlab.evaluation.quality import Windows, cut_windows, predict
from attnlab.progress import note
from attnlab.provenance import file_sha256
from attnlab.reading import approximation_error
from papers.common.row_store import Part
from papers.value_aware.config import RealLmConfig

__all__ = ["EXACT", "Kept", "measure", "mechanisms_of", "searched_mechanisms"]

EXACT = "softmax"


@dataclass(frozen=True)
class Kept:
    """A mechanism that keeps r keys of a query (LSH: of a round), or makes as many features."""

    spec: str
    family: str
    r: int | None = None

    @property
    def labels(self) -> dict[str, Any]:
        """The columns that name it."""
        return {"family": self.family, "r": self.r, "spec": self.spec}


def mechanisms_of(config: RealLmConfig, d: int) -> list[Kept]:
    """What needs no search, with d the width of a head. ``window+sinks``: the first keys and the last, r together."""
    every = sorted({*config.r, d + 1})
    kept = [Kept(EXACT, EXACT), *(Kept(f"top-r:r={r}", "top-r", r) for r in every)]
    kept += [Kept(f"value-aware:r={r}", "value-aware", r) for r in (1, d + 1)]
    kept += [Kept(f"window:r={r}", "window", r) for r in every]
    sinks = config.sinks
    kept += [Kept(f"window:r={r - sinks},sinks={sinks}", "window+sinks", r) for r in every if r > sinks]
    kept += [Kept(f"orf:features=256,variant={how}", f"orf, {how}", 256) for how in ("as-written", "corrected")]
    return kept + [Kept(f"top-r:r={r},by=alpha-norm", "alpha-norm", r) for r in every]


def searched_mechanisms(config: RealLmConfig, d: int) -> list[Kept]:
    """Value-aware keys that are searched for, and what they are compared with, on the same windows."""
    few = [r for r in sorted({*config.r, d + 1}) if r <= d + 1]
    kept = [Kept(EXACT, EXACT), *(Kept(f"top-r:r={r}", "top-r", r) for r in few)]
    kept += [Kept(f"top-r:r={r},by=alpha-norm", "alpha-norm", r) for r in few]
    return kept + [Kept(f"value-aware:r={r}", "value-aware", r) for r in (1, d + 1, *config.searched)]


def measure(config: RealLmConfig, model: str, text: Path, part: Part, *, device: str, seconds: float) -> None:
    """Score the windows until ``seconds`` have passed; rows that ``part`` has are not made again."""
    start = time.monotonic()
    loaded = load_model(model)
    if loaded.task != "causal":
        raise ValueError(f"{model} is no causal language model; name one that predicts the next token")
    to_device(device, loaded.model)
    windows = _whole_windows(loaded, text, config)
    settings = loaded.model.config
    d = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    _check_subject(part, {"model": model.rpartition("/")[2], "text": text.name, "text_sha256": file_sha256(text)})
    part.fact("head_width", d)
    note(f"model and windows after {time.monotonic() - start:.0f} s")
    until = start + seconds
    _score(loaded, windows, mechanisms_of(config, d), part, batch=config.batch, until=until)
    lsh = [Kept(f"lsh:r={r},rounds={rounds}", f"lsh, {rounds} rounds", r) for r, rounds in config.lsh]
    some = windows.part(slice(0, config.lsh_windows))
    _score(loaded, some, [Kept(EXACT, EXACT), *lsh], part, batch=config.batch, until=until)
    short = windows.part(slice(0, config.search_windows), length=config.search_length)
    # One window beside the others: every mechanism, judged by its error on the calls that exact attention made.
    _output_errors(loaded, short, [*mechanisms_of(config, d)[1:], *lsh], part, layers=config.error_layers, until=until)
    searched = searched_mechanisms(config, d)
    _score(loaded, short, searched, part, batch=config.search_batch, until=until)
    _output_errors(loaded, short, searched[-len(config.searched) :], part, layers=config.error_layers, until=until)


def _check_subject(part: Part, subject: dict[str, str]) -> None:
    """Note what is measured; a folder that has rows of another model or text is refused."""
    before = part.content["facts"].get("subject", subject)
    if before != subject:
        raise ValueError(
            f"{part.path.parent} holds rows of {before['model']} on {before['text']}, not of {subject['model']} on "
            f"{subject['text']}; name an empty folder"
        )
    part.fact("subject", subject)


def _whole_windows(loaded: LoadedModel, text: Path, config: RealLmConfig) -> Windows:
    wanted = config.windows * config.length
    windows = cut_windows(loaded, TextFile(text), length=config.length, most_tokens=wanted)
    if len(windows.input_ids) < config.windows or not bool(windows.attention_mask[: config.windows].all()):
        raise ValueError(
            f"{text} has {windows.tokens:,} tokens, and {config.windows} windows of {config.length} need {wanted:,}; "
            "name a longer text or fewer windows"
        )
    return windows.part(slice(0, config.windows))


@torch.no_grad()
def _score(
    loaded: LoadedModel, windows: Windows, kept: Iterable[Kept], part: Part, *, batch: int, until: float
) -> None:
    """The loss of every window under every mechanism, batch after batch, so that all have the same windows."""
    chosen, length = list(kept), windows.input_ids.shape[1]
    for first in range(0, len(windows.input_ids), batch):
        some = windows.part(slice(first, first + batch))
        for one in chosen:
            if part.has("windows", length=length, spec=one.spec, window=first):
                continue
            if time.monotonic() > until:
                note(f"out of time at {one.spec}, window {first} of {length} tokens")
                return
            start = time.monotonic()
            with swap(loaded.model, one.spec):
                predictions = predict(loaded, some, batch=batch)
            assert predictions is not None
            counts = _by_window(predictions.count, len(some.input_ids))
            losses = [loss / n for loss, n in zip(_by_window(predictions.loss, len(counts)), counts, strict=True)]
            row = {"length": length, **one.labels, "window": first, "losses": losses, "predicted": int(counts[0])}
            part.add_tables({"windows": [row]})
            note(f"{one.spec}: windows {first} to {first + len(losses) - 1}, {time.monotonic() - start:.1f} s")


def _by_window(pieces: Sequence[float], windows: int) -> list[float]:
    """Sums over the pieces of each window; whole windows have equally many."""
    size = len(pieces) // windows
    return [sum(pieces[i * size : (i + 1) * size]) for i in range(windows)]


@torch.no_grad()
def _output_errors(
    loaded: LoadedModel, windows: Windows, kept: Iterable[Kept], part: Part, *, layers: int, until: float
) -> None:
    """Errors on W, on W v and after W_O, on the first window's calls in ``layers`` layers spread over the model."""
    with record(loaded.model) as trace:
        loaded.model(input_ids=windows.input_ids[:1])
    every = list(trace)
    chosen = every[:: max(1, len(every) // layers)][:layers]
    for one in kept:
        if part.has("output_error", spec=one.spec) or time.monotonic() > until:
            continue
        summary = approximation_error(chosen, one.spec).summary()
        errors = {name: summary[name] for name in ("scores", "output", "layer_projected", "effective")}
        part.add_tables({"output_error": [{**one.labels, "length": windows.input_ids.shape[1], **errors}]})
        note(f"{one.spec}: output error {errors['output']:.3g}")
