"""``explore``: a recorded trace, its readings and its heads' statistics as one offline page, or in a notebook."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall, Mechanism, hide_unseen, repeat_groups
from attnlab.guidance import pattern_audit
from attnlab.pages.explorer import Exploration, Item, LayerMaps, Tokens, pack
from attnlab.pages.explorer.payload import AXES
from attnlab.pages.explorer.tokens import TYPE_NAMES, guess_types, guess_words, readable
from attnlab.patterns import SpecialTokens
from attnlab.reading.approximation import approximation_error
from attnlab.reading.effective import effective_attention
from attnlab.reading.heads import attention_distance, attention_entropy
from attnlab.reading.norm_based import norm_based
from attnlab.reading.pattern_classifier import PatternNet, classify, load_classifier
from attnlab.reading.pattern_data import CLASSES
from attnlab.reading.rollout import rollout
from attnlab.registry import mechanism, spec_of
from attnlab.trace import LayerTrace, Trace

__all__ = ["READINGS", "Subject", "explore"]

READINGS = ("standard", "effective", "norm-based", "rollout")
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

    ``words`` number the word of each token, ``types`` index ``type_names``; both are guessed from the tokens where they
    are not given. With ``input_ids`` the heads are compared with the patterns of attention guidance.
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


@torch.no_grad()
def explore(
    what: Trace | Subject | Sequence[Subject],
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
    """A page in which people look at a trace: ``explore(trace, tokens=tokens).save("page.html")``.

    Several subjects (texts, models) stand side by side. ``readings`` are some of standard, effective, norm-based and
    rollout; every one of ``mechanisms`` adds its W^ on the recorded calls, (W - W^) v, and their errors. ``layers`` are
    those whose maps are kept whole. ``precise`` stores half precision instead of 8 bits.
    """
    subjects = _subjects(what, tokens)
    unknown = [name for name in readings if name not in READINGS]
    if unknown or not readings:
        raise ValueError(f"readings must be among {', '.join(READINGS)}, got {', '.join(unknown) or 'none'}")
    mechs = {one if isinstance(one, str) else spec_of(one): mechanism(one) for one in mechanisms}
    net = load_classifier()
    items = [
        Item(s.name or f"text {i + 1}", _texts(s), _layers(s, readings, mechs, net)) for i, s in enumerate(subjects)
    ]
    panes: list[tuple[int | None, str]] = [(i, "standard") for i in range(min(2, len(items)))]
    if mechs:
        first = next(iter(mechs))
        panes = [(0, "standard"), (0, first), (0, _lost(first))]
    columns = [{"key": key, "title": name, "help": text} for key, (name, text) in COLUMNS.items()]
    for spec in mechs:
        columns += [
            {"key": f"{key} {spec}", "title": f"{name}, {spec}" if len(mechs) > 1 else name, "help": f"{text}: {spec}"}
            for key, (name, text) in ERRORS.items()
        ]
    packed = pack(
        items,
        title=title or str(subjects[0].trace.metadata.get("model", "attention")),
        subtitle=subtitle,
        type_names=type_names,
        columns=columns,
        panes=panes if readings[0] == "standard" or mechs else [(0, readings[0])],
        precise=precise,
        layers=layers,
        heads=sum(layer.call.q.shape[1] for s in subjects for layer in s.trace),
        notes=[
            f"{spec} has parameters of its own, which no training has touched here: it shows how it starts."
            for spec, mech in mechs.items()
            if isinstance(mech, nn.Module)
        ],
        about=about,
    )
    return Exploration(packed)


def _subjects(what: Trace | Subject | Sequence[Subject], tokens: Any) -> list[Subject]:
    if isinstance(what, Trace):
        return [Subject(what, tokens)]
    subjects = [what] if isinstance(what, Subject) else list(what)
    if tokens is not None or not all(isinstance(one, Subject) for one in subjects):
        raise ValueError("explore takes a trace with tokens=, or subjects, each with its trace and tokens")
    return subjects


def _kept(subject: Subject) -> dict[str, np.ndarray]:
    """The tokens of each text that are no padding."""
    kept: dict[str, np.ndarray] = {}
    for layer in subject.trace:
        queries, keys = AXES[layer.kind]
        b, _, n_q, n_k = layer.call.sizes
        if not 0 <= subject.item < b:
            raise ValueError(f"item {subject.item} is not in a batch of {b}")
        seen = layer.call.key_visible
        found = torch.ones(n_k, dtype=torch.bool) if seen is None else seen[subject.item].cpu()
        kept.setdefault(keys, found.numpy())
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
    kept = _kept(subject)
    given = subject.tokens
    if given is None:
        given = {name: [str(i) for i in range(len(keep))] for name, keep in kept.items()}
    if not isinstance(given, Mapping):
        if isinstance(given, str):
            raise ValueError("tokens must be a list of strings, one per token, got one string; tokenize it first")
        given = {next(iter(kept)): given}
    texts = {}
    for name, keep in kept.items():
        if name not in given or len(given[name]) != len(keep):
            came = len(given[name]) if name in given else "no"
            raise ValueError(f"the model read {len(keep)} {name} tokens, but {came} token strings were given")
        told = [str(token) for token, real in zip(given[name], keep, strict=True) if real]
        words = [int(w) for w in np.asarray(subject.words[name])[keep]] if subject.words else guess_words(told)
        types = [int(t) for t in np.asarray(subject.types[name])[keep]] if subject.types else guess_types(told, words)
        texts[name] = Tokens(readable(told), words, types)
    return texts


def _layers(
    subject: Subject, readings: Sequence[str], mechs: Mapping[str, Mechanism], net: PatternNet
) -> Iterator[LayerMaps]:
    """One layer after the other, so that no more than a layer's maps are held."""
    kept = _kept(subject)
    rolled: dict[str, Tensor] = {}
    for whole in subject.trace:
        layer = _single(whole, subject.item)
        queries, keys = (torch.from_numpy(kept[name]) for name in AXES[layer.kind])

        def array(w: Tensor, queries: Tensor = queries, keys: Tensor | None = keys) -> np.ndarray:
            w = w[0].detach().float().cpu()[:, queries]
            return (w if keys is None else w[:, :, keys]).numpy()

        W = layer.weights()
        maps: dict[str, np.ndarray] = {}
        statistics = _statistics(layer, W, queries, net)
        if "standard" in readings or mechs:
            maps["standard"] = array(W)
        if "effective" in readings:
            found = effective_attention(layer)
            maps["effective"] = array(found.weights)
            statistics["removed"] = found.removed[0].tolist()
        if "norm-based" in readings:
            maps["norm-based"] = array(norm_based(layer))
        if "rollout" in readings and layer.kind != "cross" and W.shape[2] == W.shape[3]:
            step = rollout([W])[0]
            rolled[layer.kind] = step @ rolled[layer.kind] if layer.kind in rolled else step
            maps["rollout"] = array(rolled[layer.kind])
        for spec, mech in mechs.items():
            approx = mech.weights(layer.call)
            call = hide_unseen(layer.call)
            maps[spec] = array(approx)
            maps[_lost(spec)] = array((W - approx) @ repeat_groups(call.v, call.groups), keys=None)
            errors = approximation_error(layer, mech).layers[0]
            for name in ERRORS:
                told = getattr(errors, name)
                statistics[f"{name} {spec}"] = [None] * W.shape[1] if told is None else told.tolist()
        statistics |= _audit(subject, layer)
        yield LayerMaps(layer.kind, layer.layer, maps, statistics, frozenset(_lost(spec) for spec in mechs))


def _statistics(layer: LayerTrace, W: Tensor, queries: Tensor, net: PatternNet) -> dict[str, Any]:
    def mean(t: Tensor) -> list[float]:
        return t[0].cpu()[:, queries].mean(-1).tolist()

    found: dict[str, Any] = {"entropy": mean(attention_entropy(layer)), "distance": mean(attention_distance(layer))}
    n_q, n_k = W.shape[2:]
    if n_q == n_k <= CLASSIFIED and int(queries.sum()) > 1 and bool(W.isfinite().all()):
        kinds = classify(W.float().cpu(), key_visible=queries[None], net=net)[0]
        found["class"] = [CLASSES[int(kind)] for kind in kinds]
    return found


def _audit(subject: Subject, layer: LayerTrace) -> dict[str, Any]:
    ids = (subject.input_ids or {}).get(AXES[layer.kind][1])
    if ids is None or layer.kind == "cross":
        return {}
    one = ids[subject.item : subject.item + 1]
    best: dict[int, tuple[float, str]] = {}
    mask = layer.call.key_visible
    for row in pattern_audit([layer], one, attention_mask=mask, tokens=subject.special):
        if row["closeness"] is not None:
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
