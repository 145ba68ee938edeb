"""``attnlab explore --long``: a model reads a long text, and statistics of all heads become a page; W is never made."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.adapters import LoadedModel, record
from attnlab.adapters.load import max_length
from attnlab.adapters.model_files import check_ids, check_reads_text, unknown_tokens
from attnlab.adapters.protocol import adapter_of
from attnlab.adapters.watch import watch
from attnlab.adapters.watched import AttentionStatistics, LayerStatistics
from attnlab.data import TextFile
from attnlab.data.beginnings import first_tokens
from attnlab.evaluation.explore_models import readable_tokens
from attnlab.linalg.streaming import Measures
from attnlab.pages.explorer import Packed
from attnlab.pages.long import LAST_PLACE, HeadLanes, LayerSquares, LongText, Region, pack_long
from attnlab.progress import each
from attnlab.provenance import provenance
from attnlab.trace import LayerTrace, Trace

__all__ = ["LongConfig", "Zoom", "explore_long", "parse_heads", "parse_zoom"]

# As many tokens as are read where the user names no number, and the model and the text have more.
USUAL_TOKENS = 32_768
CHOSEN_HEADS = 16
# The side of a region of exact weights, and how many of its rows are computed at a time.
LONGEST_REGION, MOST_REGIONS, ROWS_AT_ONCE = 512, 16, 32
LANES = ("entropy", "sinks", "recent", "distance", "norm", "removed", "received")
HEAD = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})")
ZOOM = re.compile(HEAD.pattern + r":([0-9]{1,6})-([0-9]{1,6})(?:@([0-9]{1,6})-([0-9]{1,6}))?")


@dataclass(frozen=True)
class Zoom:
    """A region whose weights are asked for: tokens ``queries`` (first, last) looking at tokens ``keys``."""

    layer: int
    head: int
    queries: tuple[int, int]
    keys: tuple[int, int]

    def __str__(self) -> str:
        (a, b), (c, d) = self.queries, self.keys
        return f"{self.layer}.{self.head}:{a}-{b}" + (f"@{c}-{d}" if self.keys != self.queries else "")


@dataclass(frozen=True)
class LongConfig:
    """How many tokens are read, the heads with lanes (None: those that differ most), and regions of exact weights."""

    tokens: int | None = None
    heads: tuple[tuple[int, int], ...] | None = None
    zooms: tuple[Zoom, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens is not None and not 1 <= self.tokens <= LAST_PLACE:
            raise ValueError(f"a page shows from 1 to {LAST_PLACE:,} tokens, not {self.tokens:,}")
        if self.heads is not None and not 1 <= len(self.heads) <= CHOSEN_HEADS:
            raise ValueError(f"lanes are shown of 1 to {CHOSEN_HEADS} heads, not of {len(self.heads)}")
        if len(self.zooms) > MOST_REGIONS:
            raise ValueError(f"a page shows at most {MOST_REGIONS} regions, not {len(self.zooms)}")


def parse_heads(text: str) -> tuple[tuple[int, int], ...]:
    """Heads by layer and number.

    >>> parse_heads("3.2,7.1")
    ((3, 2), (7, 1))
    """
    parts = [HEAD.fullmatch(part.strip()) for part in text.split(",")]
    if not all(parts):
        raise ValueError(f"heads must be LAYER.HEAD, as in 3.2,7.1, got {text!r}")
    return tuple(dict.fromkeys((int(part[1]), int(part[2])) for part in parts if part))


def parse_zoom(text: str) -> Zoom:
    """A region: a head, the tokens that look and, after @, those looked at, if they are others.

    >>> str(parse_zoom("3.2:100-163@0-9"))
    '3.2:100-163@0-9'
    """
    ends = ZOOM.fullmatch(text.strip())
    if ends is None:
        raise ValueError(f"a region must be LAYER.HEAD:FROM-TO or LAYER.HEAD:FROM-TO@FROM-TO, got {text!r}")
    layer, head, *numbers = (int(part) for part in ends.groups() if part is not None)
    queries = (numbers[0], numbers[1])
    keys = (numbers[2], numbers[3]) if len(numbers) == 4 else queries
    for first, last in (queries, keys):
        if last < first:
            raise ValueError(f"the region {text.strip()} ends before it begins")
        if last - first >= LONGEST_REGION:
            raise ValueError(f"the region {text.strip()} is {last - first + 1} tokens long; {LONGEST_REGION} at most")
    return Zoom(layer, head, queries, keys)


@torch.no_grad()
def explore_long(loaded: LoadedModel, file: Path | str, *, name: str, config: LongConfig) -> Packed:
    """The text's first tokens through the model, once; what the page ``pages.long.long_page`` shows."""
    model = loaded.model
    _check_model(loaded)
    ids, tokens, before, notes = _read(loaded, file, config.tokens)
    _check_heads(model, config, ids)
    with _showing_layers(model):
        statistics, trace = _run(model, ids, sorted({zoom.layer for zoom in config.zooms}))
    heads = differing_heads(statistics.layers) if config.heads is None else list(config.heads)
    versions = provenance()
    return pack_long(
        LongText(
            title=name,
            subtitle=f"reads {len(tokens):,} tokens of {Path(file).name}",
            tokens=tokens,
            before=before,
            block=statistics.layers[0].block,
            layers=[LayerSquares(layer.layer, _squares(layer)) for layer in statistics],
            chosen=[_lanes(statistics, *head) for head in heads],
            choice=_choice(config, len(heads)),
            statistics=_titles(statistics.measures),
            regions=[_region(trace[zoom.layer], zoom) for zoom in config.zooms],
            notes=[*notes, *_missing(statistics)],
            about={
                "model": name,
                **{key: versions["versions"].get(key, "?") for key in ("attnlab", "torch", "transformers")},
                "device": versions["device"],
            },
        )
    )


def differing_heads(layers: Sequence[LayerStatistics], count: int = CHOSEN_HEADS) -> list[tuple[int, int]]:
    """Heads that differ most: each is the one farthest from all before it, by the means and spreads of statistics.

    The first is the one farthest from the mean of all heads. Returned in the model's order.
    """
    names = [(layer.layer, head) for layer in layers for head in range(layer.entropy.shape[1])]
    columns = []
    for lane in LANES[:-1]:
        parts = [getattr(layer, lane) for layer in layers]
        if all(part is not None for part in parts):
            values = [part[0].double().nan_to_num() for part in parts]
            columns += [torch.cat([v.mean(1) for v in values]), torch.cat([v.std(1, correction=0) for v in values])]
    profiles = torch.stack(columns, 1)
    profiles = (profiles - profiles.mean(0)) / profiles.std(0, correction=0).clamp(min=1e-9)
    chosen = [int(profiles.norm(dim=1).argmax())]
    distances = torch.cdist(profiles, profiles)
    while len(chosen) < min(count, len(names)):
        nearest = distances[:, chosen].min(1).values
        nearest[chosen] = -1
        chosen.append(int(nearest.argmax()))
    return [names[i] for i in sorted(chosen)]


def _check_model(loaded: LoadedModel) -> None:
    kinds = {site.kind for site in adapter_of(loaded.model).sites()}
    if len(kinds) > 1 or loaded.task == "seq2seq":
        raise ValueError(
            f"--long shows one text, and {type(loaded.model).__name__} reads one and writes another; leave out --long"
        )


def _read(loaded: LoadedModel, file: Path | str, most: int | None) -> tuple[Tensor, list[str], list[str], list[str]]:
    """(ids, tokens as people read them, the space before each, what to say about it)."""
    model, tokenizer, _ = loaded
    limit = max_length(model)
    if most is not None and limit is not None and most > limit:
        raise ValueError(f"--tokens {most} is more than the {limit} that {type(model).__name__} reads; lower it")
    tokenised: list[tuple[Any, str]] = []

    def encode(part: str) -> list[int]:
        tokenised.append((tokenizer(part, return_tensors="pt"), part))
        ids: list[int] = tokenised[-1][0]["input_ids"][0].tolist()
        return ids

    count = min(limit or USUAL_TOKENS, USUAL_TOKENS) if most is None else most
    ids = first_tokens(TextFile(file), count, encode)
    if not ids:
        raise ValueError(f"the tokenizer makes no token of {file}")
    encoded, part = tokenised[-1]
    tokens, before = _pieces(tokenizer, encoded, part)
    notes = []
    if most is None and len(tokens) > len(ids):
        notes.append(f"Only the first {len(ids):,} tokens of {Path(file).name} are read; --tokens sets how many.")
    batch = torch.tensor([ids], device=next(model.parameters()).device)
    check_reads_text(model)
    check_ids(model, batch)
    if (doubt := unknown_tokens(tokenizer, batch)) is not None:
        notes.append(f"Beware: {doubt}")
    return batch, tokens[: len(ids)], before[: len(ids)], notes


def _pieces(tokenizer: Any, encoded: Any, text: str) -> tuple[list[str], list[str]]:
    """Each token as its piece of the text, where the tokenizer knows it, and the space before it."""
    tokens, words = readable_tokens(tokenizer, encoded, text)
    if not getattr(tokenizer, "is_fast", False):
        return tokens, ["", *(" " if a != b else "" for a, b in itertools.pairwise(words))]
    before, written = [], 0
    for i, (start, end) in enumerate(tokenizer(text, return_offsets_mapping=True)["offset_mapping"]):
        piece = text[start:end]
        if not piece.strip():
            # A special token is no piece of the text, and one of spaces is drawn as a sign.
            tokens[i] = "↵" if "\n" in piece else "␣" if piece else tokens[i]
            before.append("")
            continue
        tokens[i] = piece.strip()
        space = text[written : end - len(piece.lstrip())]
        before.append("\n" if "\n" in space else " " if space[:1].isspace() else "")
        written = end - len(piece) + len(piece.rstrip())
    return tokens, before


def _check_heads(model: Any, config: LongConfig, ids: Tensor) -> None:
    """Refuse heads and tokens that are not there before the model reads all: two tokens tell how many heads it has."""
    length = ids.shape[1]
    statistics, _ = _run(model, ids[:, :2], [])
    counts = {layer.layer: layer.entropy.shape[1] for layer in statistics}
    for layer, head in [*(config.heads or ()), *((zoom.layer, zoom.head) for zoom in config.zooms)]:
        if layer not in counts:
            raise ValueError(f"there is no layer {layer}: the model has {min(counts)} to {max(counts)}")
        if head >= counts[layer]:
            raise ValueError(f"there is no head {layer}.{head}: layer {layer} has the heads 0 to {counts[layer] - 1}")
    for zoom in config.zooms:
        if max(zoom.queries[1], zoom.keys[1]) >= length:
            raise ValueError(f"the region {zoom} ends beyond the text, whose tokens are 0 to {length - 1}")


def _run(model: Any, ids: Tensor, recorded: list[int]) -> tuple[AttentionStatistics, Trace]:
    """The statistics of all layers, and the calls of the ``recorded`` ones."""
    # Neither all logits nor a cache are of use, and both are large.
    wanted = {"logits_to_keep": 1, "use_cache": False}
    known = inspect.signature(model.forward).parameters
    inputs = {key: value for key, value in wanted.items() if key in known}
    recording = record(model, layers=recorded) if recorded else nullcontext(Trace())
    with watch(model) as statistics, recording as trace:
        model(ids, **inputs)
    return statistics, trace


@contextmanager
def _showing_layers(model: Any) -> Iterator[None]:
    """Inside, each layer that is computed is a step of what is shown."""
    sites = adapter_of(model).sites()
    steps = each(sites, lambda site: f"layer {site.layer}")

    def next_step(*_: Any) -> None:
        next(steps, None)

    hooks = [site.module.register_forward_pre_hook(next_step) for site in sites]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        # The step of the last layer.
        next(steps, None)


def _squares(layer: LayerStatistics) -> np.ndarray:
    assert layer.blocks is not None, "watch makes squares unless told not to"
    return np.asarray(layer.blocks[0])


def _lanes(statistics: AttentionStatistics, layer: int, head: int) -> HeadLanes:
    of = statistics[layer]
    present = {lane: getattr(of, lane) for lane in LANES}
    lanes = {lane: np.asarray(values[0, head]) for lane, values in present.items() if values is not None}
    return HeadLanes(layer, head, lanes, np.asarray(of.largest[0, head]), np.asarray(of.places[0, head]))


def _region(layer: LayerTrace, zoom: Zoom) -> Region:
    """Exact weights, a few rows at a time: those of all heads and keys are made on the way."""
    first, end = zoom.queries[0], zoom.queries[1] + 1
    parts = []
    for lo in range(first, end, ROWS_AT_ONCE):
        rows = layer.mechanism.row_weights(layer.call, lo, min(end, lo + ROWS_AT_ONCE))
        parts.append(rows[0, zoom.head, :, zoom.keys[0] : zoom.keys[1] + 1].float().cpu())
    weights = torch.cat(parts)
    if not weights.isfinite().all():
        raise ValueError(f"the weights in the region {zoom} are not all finite numbers; choose another")
    return Region(zoom.layer, zoom.head, first, zoom.keys[0], np.asarray(weights))


def _choice(config: LongConfig, count: int) -> str:
    if config.heads is not None:
        return "Chosen with --heads."
    return (
        f"The {count} that differ most: each is the head farthest from those before it, by the mean and the spread of "
        "every statistic over the text, each statistic scaled alike. --heads chooses others."
    )


def _titles(measures: Measures) -> dict[str, tuple[str, str]]:
    first, last = measures.sinks, measures.recent
    return {
        "entropy": ("entropy", "in nats: 0 where one token has all the weight"),
        "sinks": (f"first {first}", f"the weight on the first {first} tokens of the text, where sinks are"),
        "recent": (f"within {last}", f"the weight on tokens fewer than {last} places away, its own included"),
        "distance": ("distance", "how many tokens away it looks, on average"),
        "norm": ("norm", "the sum of weight times the length of the value vector"),
        "removed": ("removed", "the share of the squared weights that effective attention removes"),
        "received": ("received", "the weight that the token gets from all others, on a logarithmic scale"),
    }


def _missing(statistics: AttentionStatistics) -> list[str]:
    """One line for each statistic that some layers do not have, and why."""
    reasons: dict[tuple[str, str], list[int]] = {}
    for layer in statistics:
        for lane, why in layer.missing.items():
            reasons.setdefault((lane, why), []).append(layer.layer)
    return [
        f"No {lane} in layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}: {why}."
        for (lane, why), layers in reasons.items()
    ]
