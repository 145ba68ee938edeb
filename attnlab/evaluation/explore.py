"""``explore``: a recorded trace, its readings and its heads' statistics as one offline page, or in a notebook."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.adapters.load import LoadedModel, as_loaded
from attnlab.attention import AttentionCall, Mechanism, hide_unseen, repeat_groups
from attnlab.evaluation.compare_warnings import untrained_warnings
from attnlab.guidance import pattern_audit
from attnlab.pages.explorer import Exploration, Item, LayerMaps, Tokens, pack
from attnlab.pages.explorer.payload import AXES
from attnlab.pages.explorer.tokens import TYPE_NAMES, guess_types, guess_words, readable
from attnlab.patterns import SpecialTokens
from attnlab.progress import each
from attnlab.reading.approximation import approximation_error
from attnlab.reading.effective import removed_share
from attnlab.reading.heads import attention_distance, attention_entropy
from attnlab.reading.pattern_classifier import PatternNet, classify, load_classifier
from attnlab.reading.pattern_data import CLASSES
from attnlab.reading.registry import Reading, recorded_reading
from attnlab.registry import mechanism, spec_of
from attnlab.summaries import short_repr
from attnlab.trace import LayerTrace, Trace

__all__ = ["Subject", "explore"]

ERRORS = {
    "scores": ("|W - Ŵ| / |W|", "How far the weights are off"),
    "output": ("|(W - Ŵ) v| / |W v|", "How far the output is off: the value-aware error"),
    "projected": ("after W_O", "The output's error after the head's part of W_O"),
    "effective": ("effective error", "The weights' error on effective attention"),
}
COLUMNS = {
    "entropy": ("entropy", "Of a token's attention, in nats, averaged over tokens"),
    "distance": ("distance", "How far a token looks, in tokens, averaged over its weights"),
    "removed": ("removed", "Share of the squared weights that never reaches the output: |W - W⊥|² / |W|²"),
    "class": ("pattern", "What the map looks like, by the shipped classifier"),
    "follows": ("follows", "The pattern of attention guidance that the head is closest to"),
    "closeness": ("closeness", "How closely: 1 if it is that pattern, 0 if it puts nothing there"),
}
# torch's quantile, which the classifier's pictures need, takes 2^24 numbers at most.
CLASSIFIED = 2048


@dataclass(frozen=True, eq=False)
class Subject:
    """One text through one model. ``tokens`` are strings, or {"source": ..., "target": ...} where there are two texts.

    ``words`` number the word of each token, ``types`` index ``type_names``; both are guessed from the tokens by
    default. With ``input_ids`` the heads are compared with the patterns of attention guidance.
    """

    trace: Trace
    tokens: Sequence[str] | Mapping[str, Sequence[str]] | None = None
    name: str = ""
    words: Mapping[str, Sequence[int]] | None = None
    types: Mapping[str, Sequence[int]] | None = None
    # {"source": (b, k), "target": (b, k)}.
    input_ids: Mapping[str, Tensor] | None = None
    special: SpecialTokens | None = None
    item: int = 0

    __repr__ = short_repr


@torch.no_grad()
def explore(
    what: Trace | Subject | Sequence[Subject] | LoadedModel | nn.Module,
    tokenizer: Any = None,
    text: str | Sequence[str] | None = None,
    *,
    tokens: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    readings: Sequence[str] = ("standard", "effective"),
    mechanisms: Sequence[Mechanism | str] = (),
    layers: Sequence[int] | None = None,
    precise: bool = False,
    title: str | None = None,
    subtitle: str = "",
    type_names: Sequence[str] = TYPE_NAMES,
    about: Mapping[str, Any] | None = None,
) -> Exploration:
    """A page in which people look at attention: ``explore(model, tokenizer, "some text").save("page.html")``.

    What ``load_model`` returns brings its tokenizer: ``explore(loaded, text="some text")``. In place of a model and a
    text it takes what was recorded: ``explore(trace, tokens=tokens)``.

    Several subjects (texts, models) stand side by side. ``readings`` are some of ``reading_names()`` that need no
    gradients, or functions in files ("./my.py:function"): a map is shown, a number per query becomes a column of the
    table of heads. Every one of ``mechanisms`` adds its W^ on the recorded calls, (W - W^) v, and their errors.
    ``layers`` are those whose maps are kept whole. ``precise`` stores half precision instead of 8 bits.
    """
    subjects = _subjects(what, tokenizer, text, tokens)
    chosen = [recorded_reading(name) for name in readings]
    if not any(one.shows_maps for one in chosen):
        raise ValueError("explore shows maps: name a reading that has them, such as standard")
    mechs = {one if isinstance(one, str) else spec_of(one): mechanism(one) for one in mechanisms}
    net = load_classifier()
    _kept(subjects[0])
    for mech in mechs.values():
        # Mechanisms make their parameters at their first call.
        mech(_single(next(iter(subjects[0].trace)), subjects[0].item).call)
    packed = pack(
        [Item(s.name or f"text {i + 1}", _texts(s), _layers(s, chosen, mechs, net)) for i, s in enumerate(subjects)],
        title=title or str(subjects[0].trace.metadata.get("model", "attention")),
        subtitle=subtitle,
        type_names=type_names,
        columns=_columns(chosen, list(mechs)),
        panes=_first_panes(len(subjects), chosen, list(mechs)),
        precise=precise,
        layers=layers,
        heads=sum(layer.call.q.shape[1] for s in subjects for layer in s.trace),
        notes=[f"{note}." for note in untrained_warnings(mechs)],
        about=about,
    )
    return Exploration(packed)


def _first_panes(items: int, readings: Sequence[Reading], specs: Sequence[str]) -> list[tuple[int | None, str]]:
    """(item, map) of the panes that are open at first."""
    if specs:
        return [(0, "standard"), (0, specs[0]), (0, _lost(specs[0]))]
    first = next(one.name for one in readings if one.shows_maps)
    return [(i, "standard") for i in range(min(2, items))] if first == "standard" else [(0, first)]


def _columns(readings: Sequence[Reading], specs: Sequence[str]) -> list[dict[str, str]]:
    """The columns of the table of heads: key in the statistics, title, and a sentence of help."""
    columns = [{"key": key, "title": name, "help": text} for key, (name, text) in COLUMNS.items()]
    columns += [
        {"key": one.name, "title": one.name, "help": one.summary}
        for one in readings
        if one.per_query and one.name not in COLUMNS
    ]
    for spec in specs:
        columns += [
            {"key": f"{key} {spec}", "title": f"{name}, {spec}" if len(specs) > 1 else name, "help": f"{text}: {spec}"}
            for key, (name, text) in ERRORS.items()
        ]
    return columns


def _subjects(what: Any, tokenizer: Any, text: str | Sequence[str] | None, tokens: Any) -> list[Subject]:
    if isinstance(what, (LoadedModel, nn.Module)):
        return _read(what, tokenizer, text, tokens)
    if tokenizer is not None or text is not None:
        raise ValueError(
            f"a tokenizer and a text belong to a model, got {type(what).__name__}; a trace has been recorded already"
        )
    if isinstance(what, Trace):
        return [Subject(what, tokens)]
    subjects = [what] if isinstance(what, Subject) else list(what)
    if tokens is not None or not subjects or not all(isinstance(one, Subject) for one in subjects):
        raise ValueError("explore takes a trace with tokens=, or subjects, each with its trace and tokens")
    return subjects


def _read(what: Any, tokenizer: Any, text: Any, tokens: Any) -> list[Subject]:
    """One subject for each text that a model reads."""
    from attnlab.evaluation.explore_models import subject

    if isinstance(what, LoadedModel):
        # It brings its tokenizer, so that the one other argument is the text.
        others = [one for one in (tokenizer, text) if one is not None]
        what, tokenizer, text = what.model, what.tokenizer, others[0] if len(others) == 1 else None
    usable = bool(text) and isinstance(text, Sequence)
    if not usable or tokenizer is None or isinstance(tokenizer, str) or tokens is not None:
        raise ValueError("explore takes a model with its tokenizer and a text: explore(model, tokenizer, text)")
    loaded = as_loaded(what, tokenizer)
    texts = [text] if isinstance(text, str) else list(text)
    return [subject(loaded, one, name="" if len(texts) == 1 else f"text {i + 1}") for i, one in enumerate(texts)]


def _kept(subject: Subject) -> dict[str, np.ndarray]:
    """The tokens of each text that are no padding."""
    kept: dict[str, np.ndarray] = {}
    for layer in subject.trace:
        queries, keys = AXES[layer.kind]
        b, _, n_q, n_k = layer.call.sizes
        if not 0 <= subject.item < b:
            raise ValueError(f"item {subject.item} is not in a batch of {b}")
        flags = layer.call.key_visible
        unpadded = torch.ones(n_k, dtype=torch.bool) if flags is None else flags[subject.item].cpu()
        kept.setdefault(keys, unpadded.numpy())
        kept.setdefault(queries, np.ones(n_q, dtype=bool))
        for name, length in ((queries, n_q), (keys, n_k)):
            if len(kept[name]) != length:
                raise ValueError(
                    f"{layer.kind} layer {layer.layer} has {n_q} queries over {n_k} keys, but others read "
                    f"{len(kept[name])} {name} tokens; record one forward pass over the whole text, not a cached step"
                )
    if not kept:
        raise ValueError("the trace is empty; run the model inside `with attnlab.record(model) as trace:` first")
    return kept


def _texts(subject: Subject) -> dict[str, Tokens]:
    """The tokens of each text as people read them, without padding."""
    kept = _kept(subject)
    strings = _token_strings(subject, kept)
    texts = {}
    for name, keep in kept.items():
        tokens = [token for token, real in zip(strings[name], keep, strict=True) if real]
        words = [int(w) for w in np.asarray(subject.words[name])[keep]] if subject.words else guess_words(tokens)
        types = [int(t) for t in np.asarray(subject.types[name])[keep]] if subject.types else guess_types(tokens, words)
        texts[name] = Tokens(readable(tokens), words, types)
    return texts


def _token_strings(subject: Subject, kept: Mapping[str, np.ndarray]) -> dict[str, list[str]]:
    """A string for every token of each text; numbers where the subject has none."""
    tokens = subject.tokens
    if tokens is None:
        return {name: [str(i) for i in range(len(keep))] for name, keep in kept.items()}
    if isinstance(tokens, str):
        raise ValueError("tokens must be a list of strings, one per token, got one string; tokenize it first")
    by_text = tokens if isinstance(tokens, Mapping) else {next(iter(kept)): tokens}
    for name, keep in kept.items():
        if name not in by_text or len(by_text[name]) != len(keep):
            came = len(by_text[name]) if name in by_text else "no"
            raise ValueError(f"the model read {len(keep)} {name} tokens, but {came} token strings were given")
    return {name: [str(token) for token in by_text[name]] for name in kept}


def _layers(
    subject: Subject, readings: Sequence[Reading], mechs: Mapping[str, Mechanism], net: PatternNet
) -> Iterator[LayerMaps]:
    """One layer after the other, so that no more than a layer's maps are held."""
    kept = _kept(subject)
    layers = [_single(whole, subject.item) for whole in subject.trace]
    read = {one: one.of_layers(layers) for one in readings}
    for layer in each(layers, lambda one: f"layer {one.layer}"):
        queries, keys = (torch.from_numpy(kept[name]) for name in AXES[layer.kind])
        W = layer.weights()
        maps: dict[str, np.ndarray] = {"standard": _array(W, queries, keys)} if mechs else {}
        statistics = _statistics(layer, W, queries, net)
        for one, values in ((one, next(values)) for one, values in read.items()):
            if values is None:
                continue
            if one.per_query:
                statistics[one.name] = _mean_over_queries(values, queries)
                continue
            maps[one.name] = _array(values, queries, keys)
            if one.name == "effective":
                statistics["removed"] = removed_share(W, values)[0].tolist()
        for spec, mech in mechs.items():
            approximation, errors = _approximated(layer, W, spec, mech, queries, keys)
            maps |= approximation
            statistics |= errors
        statistics |= _audit(subject, layer)
        yield LayerMaps(layer.kind, layer.layer, maps, statistics, frozenset(_lost(spec) for spec in mechs))


def _approximated(
    layer: LayerTrace, W: Tensor, spec: str, mech: Mechanism, queries: Tensor, keys: Tensor
) -> tuple[dict[str, np.ndarray], dict[str, list[float | None]]]:
    """(W^ and (W - W^) v, the errors of each head) of a mechanism in a layer's place."""
    approx, call = mech.weights(layer.call), hide_unseen(layer.call)
    lost = (W - approx) @ repeat_groups(call.v, call.groups)
    maps = {spec: _array(approx, queries, keys), _lost(spec): _array(lost, queries)}
    errors = approximation_error(layer, mech).layers[0]
    by_name = {name: getattr(errors, name) for name in ERRORS}
    return maps, {
        f"{name} {spec}": [None] * W.shape[1] if values is None else values.tolist() for name, values in by_name.items()
    }


def _array(t: Tensor, queries: Tensor, keys: Tensor | None = None) -> np.ndarray:
    """The first item of a batch without padded queries, and without padded keys where they are named."""
    t = t[0].detach().float().cpu()[:, queries]
    return (t if keys is None else t[:, :, keys]).numpy()


def _mean_over_queries(t: Tensor, queries: Tensor) -> list[float]:
    return t[0].cpu()[:, queries].mean(-1).tolist()


def _statistics(layer: LayerTrace, W: Tensor, queries: Tensor, net: PatternNet) -> dict[str, Any]:
    """Numbers about each head that every page has."""
    statistics: dict[str, Any] = {
        "entropy": _mean_over_queries(attention_entropy(layer), queries),
        "distance": _mean_over_queries(attention_distance(layer), queries),
    }
    n_q, n_k = W.shape[2:]
    if n_q == n_k <= CLASSIFIED and int(queries.sum()) > 1 and bool(W.isfinite().all()):
        kinds = classify(W.float().cpu(), key_visible=queries[None], net=net)[0]
        statistics["class"] = [CLASSES[int(kind)] for kind in kinds]
    return statistics


def _audit(subject: Subject, layer: LayerTrace) -> dict[str, Any]:
    """The pattern of attention guidance that each head is closest to, and how close."""
    ids = (subject.input_ids or {}).get(AXES[layer.kind][1])
    if ids is None or layer.kind == "cross":
        return {}
    one = ids[subject.item : subject.item + 1]
    best: dict[int, tuple[float, str]] = {}
    mask = layer.call.key_visible
    for row in pattern_audit([layer], one, attention_mask=mask, tokens=subject.special):
        # What hardly any token can follow is no description of a head.
        if row["closeness"] is not None and not row["few"]:
            best[row["head"]] = max(best.get(row["head"], (-1.0, "")), (row["closeness"], row["pattern"]))
    heads = range(layer.call.q.shape[1])
    return {
        "follows": [best[h][1] if h in best else None for h in heads],
        "closeness": [best[h][0] if h in best else None for h in heads],
    }


def _single(layer: LayerTrace, item: int) -> LayerTrace:
    """The layer with one input of its batch, in float32 at least."""
    call = layer.call
    parts: dict[str, Any] = {}
    for field in dataclasses.fields(AttentionCall):
        value = getattr(call, field.name)
        if isinstance(value, Tensor):
            value = value[item : item + 1] if value.shape[0] > 1 else value
            parts[field.name] = value.float() if value.is_floating_point() and value.itemsize < 4 else value
    projection = layer.projection
    if projection is not None and projection.itemsize < 4:
        projection = projection.float()
    output = layer.output[item : item + 1].to(parts["q"].dtype)
    return dataclasses.replace(layer, call=dataclasses.replace(call, **parts), output=output, projection=projection)


def _lost(spec: str) -> str:
    return f"(W - Ŵ) v, {spec}"
