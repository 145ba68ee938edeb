"""How far a mechanism is from the attention a model ran with: judged on W, and on what reaches the output."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.attention import (
    AttentionCall,
    Mechanism,
    grouped,
    hide_unseen,
    mask_with_bias,
    query_chunks,
    repeat_groups,
    visible,
)
from attnlab.fields import expect
from attnlab.mechanisms.value_aware import value_aware_distance
from attnlab.reading.registry import recorded_reading
from attnlab.registry import mechanism, spec_of
from attnlab.shapes import Bool, Float
from attnlab.summaries import notebook_view, short_repr
from attnlab.trace import LayerTrace, recorded_layers

__all__ = ["MEASURES", "ApproximationError", "LayerError", "approximation_error", "reading_error"]

MEASURES = ("scores", "output", "projected", "effective", "ranking_differs")

# Queries whose Gram matrices are held at once; a chunk of W is bounded by its elements too.
QUERIES, ELEMENTS = 128, 1 << 22
# Runs of neighbouring queries that a sample of them is made of.
RUNS = 8


@dataclass(frozen=True, eq=False)
class LayerError:
    """One layer's errors, one number per head, and ``layer_projected``: that of the whole layer after W_O."""

    kind: str
    layer: int
    name: str
    scores: Float[Tensor, " h"]
    output: Float[Tensor, " h"]
    projected: Float[Tensor, " h"] | None
    effective: Float[Tensor, " h"]
    ranking_differs: Float[Tensor, " h"]
    layer_projected: float | None
    queries: int

    __repr__ = short_repr

    def _repr_html_(self) -> str:
        rows = [
            {"head": head} | {name: _number(getattr(self, name), head) for name in MEASURES}
            for head in range(len(self.scores))
        ]
        return notebook_view(f"Approximation error, {self.kind} layer {self.layer}", rows)


@dataclass(frozen=True, eq=False)
class ApproximationError:
    """The errors of ``mechanism`` on every layer; relative Frobenius norms, 0 where it is exact."""

    mechanism: str
    layers: tuple[LayerError, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One JSON-able row per layer and head."""
        return [
            {"mechanism": self.mechanism, "kind": layer.kind, "layer": layer.layer, "head": head}
            | {name: _number(getattr(layer, name), head) for name in MEASURES}
            for layer in self.layers
            for head in range(len(layer.scores))
        ]

    def summary(self) -> dict[str, Any]:
        """Means over layers and heads, and the mean over layers of the error after W_O of all heads together."""
        rows = self.rows()
        means: dict[str, Any] = {"mechanism": self.mechanism}
        for name in MEASURES:
            known = [row[name] for row in rows if row[name] is not None]
            means[name] = sum(known) / len(known) if known else None
        whole = [layer.layer_projected for layer in self.layers if layer.layer_projected is not None]
        return means | {"layer_projected": sum(whole) / len(whole) if whole else None}

    def _repr_html_(self) -> str:
        rows = [
            {"kind": layer.kind, "layer": layer.layer}
            | {name: None if (t := getattr(layer, name)) is None else float(t.nanmean()) for name in MEASURES}
            | {"layer_projected": layer.layer_projected}
            for layer in self.layers
        ]
        return notebook_view(f"Approximation error of {self.mechanism}", rows, note="Means over heads; 0 is exact.")

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in self.summary().items() if isinstance(value, float))
        return f"{self.mechanism}: {shown}"


@torch.no_grad()
def approximation_error(
    trace: LayerTrace | Iterable[LayerTrace],
    mech: Mechanism | str,
    *,
    against: Mechanism | None = None,
    queries: int | None = None,
) -> ApproximationError:
    """Relative errors of ``mech`` per layer and head, against the mechanism the trace was recorded with.

    ``scores`` |W - W^| / |W|; ``output`` |(W - W^) v| / |W v|, the value-aware objective (OVA, section 3);
    ``projected`` the same after the head's columns of W_O; ``effective`` is ``scores`` on the effective attention
    W v (v^T v)^+ v^T, whose norm needs outputs and Gram matrices only. ``ranking_differs``: the share of queries whose
    nearest value (Eq. 3) is not the value of largest weight. Queries at padded positions are not counted. ``against``
    takes the place of the trace's own mechanism. ``queries``: that many of each text at most, in runs spread over it.
    """
    if queries is not None and queries < 1:
        raise ValueError(f"queries must be at least 1, got {queries}")
    layers, approximation = recorded_layers(trace), mechanism(mech)
    if against is not None:
        expect("against", against, Mechanism, "a mechanism, or None for the one that was recorded")
    name = mech if isinstance(mech, str) else _spec(approximation)
    errors = tuple(_layer_error(layer, approximation, against or layer.mechanism, queries) for layer in layers)
    return ApproximationError(name, errors)


@torch.no_grad()
def reading_error(trace: Iterable[LayerTrace], mech: Mechanism | str, reading: str) -> float | None:
    """|R - R^| / |R| of a reading's maps R, with ``mech`` in each layer's place for R^; the mean over layers and heads.

    Queries at padded positions are not counted. None where the reading can be made of none of the layers.
    """
    layers, chosen, approximation = recorded_layers(trace), recorded_reading(reading), mechanism(mech)
    replaced = [replace(x, mechanism=approximation, output=approximation(x.call)) for x in layers]
    errors = []
    for layer, exact, approx in zip(layers, chosen.of_layers(layers), chosen.of_layers(replaced), strict=True):
        if exact is None or approx is None:
            continue
        real = torch.stack([_counted(layer, call) for call in _rows(layer.call)])[:, None]
        real = real if exact.dim() == 3 else real[..., None]
        off, whole = ((t * real).double().transpose(0, 1).flatten(1).norm(dim=1) for t in (exact - approx, exact))
        errors.append(off / whole.masked_fill(whole == 0, 1))
    return float(torch.cat(errors).mean()) if errors else None


def _layer_error(layer: LayerTrace, mech: Mechanism, exact: Mechanism, queries: int | None) -> LayerError:
    heads = layer.call.q.shape[1]
    sums = _Sums(heads, layer.call.q.device)
    for call in _rows(layer.call):
        counted = _counted(layer, call)
        whole = mech.whole_queries or exact.whole_queries
        weights = (exact.weights(call), mech.weights(call)) if whole else None
        for lo, part in _query_parts(call, queries):
            hi = lo + part.q.shape[2]
            W, approx = (w[:, :, lo:hi] for w in weights) if weights else (exact.weights(part), mech.weights(part))
            _add_part(sums, part, W.double(), approx.double(), counted[lo:hi], layer.projection)
    has_projection = layer.projection is not None
    return LayerError(
        kind=layer.kind,
        layer=layer.layer,
        name=layer.name,
        scores=sums.relative("scores"),
        output=sums.relative("output"),
        projected=sums.relative("projected") if has_projection else None,
        effective=sums.relative("effective"),
        ranking_differs=sums.top["ranking"] / sums.below["ranking"].clamp_min(1),
        layer_projected=float(sums.relative("layer")[0]) if has_projection else None,
        queries=int(sums.below["ranking"].max()),
    )


def _add_part(
    sums: _Sums, part: AttentionCall, W: Tensor, approx: Tensor, counted: Bool[Tensor, " c"], projection: Tensor | None
) -> None:
    part = hide_unseen(part)
    v = repeat_groups(part.v, part.groups).double()
    keep = counted[None, None, :, None]
    W, off = W * keep, (W - approx) * keep
    sums.add("scores", off, W)
    o, o_off = W @ v, off @ v
    sums.add("output", o_off, o)
    if projection is not None:
        # (m, h*e) as one (e, m) matrix per head.
        heads = projection.double().unflatten(1, (W.shape[1], -1)).permute(1, 2, 0)
        projected, projected_off = o @ heads, o_off @ heads
        sums.add("projected", projected_off, projected)
        sums.add("layer", projected_off.sum(1, keepdim=True), projected.sum(1, keepdim=True))
    root = torch.linalg.cholesky(_grams(part))
    sums.add("effective", _through(root, o_off, part.groups), _through(root, o, part.groups))
    seen = visible(part)
    far = value_aware_distance(o, part.v.double())
    far = far if seen is None else far.masked_fill(~seen, torch.inf)
    live = (W.sum(-1) != 0) & counted
    differs = (far.argmin(-1) != W.argmax(-1)) & live
    sums.top["ranking"] = sums.top["ranking"] + differs.sum((0, 2))
    sums.below["ranking"] = sums.below["ranking"] + live.sum((0, 2))


def _through(root: Tensor, o: Tensor, groups: int) -> Tensor:
    """Rows whose squared norms are o (v^T v)^-1 o^T, the squared norm of the effective attention with output o."""
    rows = grouped(o, groups)
    if root.shape[2] == 1:
        # One Gram matrix for all queries.
        return torch.linalg.solve_triangular(root[:, :, 0], rows.flatten(2, 3).mT, upper=False).mT
    root = root.view(*root.shape[:2], -1, o.shape[2], *root.shape[-2:])
    return torch.linalg.solve_triangular(root, rows.unsqueeze(-1), upper=False).squeeze(-1)


def _grams(part: AttentionCall) -> Float[Tensor, "b g n e e"]:
    """v^T v over the keys each query may see, with a ridge far below what float64 resolves of outputs in its range."""
    v, seen = part.v.double(), visible(part)
    e = v.shape[-1]
    mask = mask_with_bias(part)
    if seen is None or (mask is None and not part.causal):
        gram = (v.mT @ v).unsqueeze(2)
    elif mask is None:
        gram = _prefix_grams(v, part.q.shape[2], part.offset)
    else:
        outer = (v.unsqueeze(-1) * v.unsqueeze(-2)).flatten(-2)
        rows = grouped(seen.expand(part.sizes), part.groups).flatten(2, 3).double()
        gram = (rows @ outer).unflatten(-1, (e, e))
    # Relative to all of v, so that a query that sees one key is no worse conditioned than the others.
    ridge = 1e-12 * v.square().sum((2, 3)).clamp_min(torch.finfo(v.dtype).tiny)
    return gram + ridge[:, :, None, None, None] * torch.eye(e, dtype=v.dtype, device=v.device)


def _prefix_grams(v: Tensor, queries: int, offset: int) -> Tensor:
    last = torch.arange(queries, device=v.device) + offset
    first = max(0, min(offset, v.shape[2]))
    upto = min(v.shape[2], max(0, offset + queries))
    base = v[:, :, :first].mT @ v[:, :, :first]
    added = v[:, :, first:upto]
    steps = (added.unsqueeze(-1) * added.unsqueeze(-2)).cumsum(2)
    steps = torch.cat([torch.zeros_like(base).unsqueeze(2), steps], 2) + base.unsqueeze(2)
    return steps[:, :, (last + 1 - first).clamp(0, steps.shape[2] - 1)]


class _Sums:
    """Sums of squares per head: of the errors (``top``) and of what they are relative to (``below``)."""

    def __init__(self, heads: int, device: torch.device) -> None:
        zero = functools.partial(torch.zeros, dtype=torch.float64, device=device)
        names = {"scores": heads, "output": heads, "projected": heads, "effective": heads, "ranking": heads, "layer": 1}
        self.top = {name: zero(n) for name, n in names.items()}
        self.below = {name: zero(n) for name, n in names.items()}

    def add(self, name: str, off: Tensor, whole: Tensor) -> None:
        heads = self.top[name].shape[0]
        self.top[name] = self.top[name] + off.square().reshape(off.shape[0], heads, -1).sum((0, 2))
        self.below[name] = self.below[name] + whole.square().reshape(off.shape[0], heads, -1).sum((0, 2))

    def relative(self, name: str) -> Tensor:
        below = self.below[name]
        return (self.top[name] / below.masked_fill(below == 0, 1)).sqrt().cpu()


def _rows(call: AttentionCall) -> Iterator[AttentionCall]:
    """The call, one batch row at a time."""
    for i in range(call.q.shape[0]):
        one: dict[str, Any] = {
            name: None if t is None else (t[i : i + 1] if t.shape[0] > 1 else t)
            for name in ("x", "key_visible", "mask", "bias", "memory")
            for t in (getattr(call, name),)
        }
        # Flags that hide nothing would copy keys and values in each of the many small calls.
        if one["key_visible"] is not None and bool(one["key_visible"].all()):
            one["key_visible"] = None
        yield replace(call, q=call.q[i : i + 1], k=call.k[i : i + 1], v=call.v[i : i + 1], **one)


def _query_parts(call: AttentionCall, queries: int | None) -> list[tuple[int, AttentionCall]]:
    """(the first query, the call of a run of queries); with ``queries`` only so many of them, in RUNS runs."""
    _, h, n_q, n_k = call.sizes
    sampled = queries is not None and queries < n_q
    run = max(1, queries // RUNS) if sampled and queries is not None else QUERIES
    parts = query_chunks(call, min(ELEMENTS, run * h * max(1, n_k)))
    starts = [0, *itertools.accumulate(part.q.shape[2] for part in parts)][:-1]
    placed = list(zip(starts, parts, strict=True))
    if not sampled or queries is None:
        return placed
    kept = max(1, min(RUNS, queries))
    # The last run is one of them: in a causal call it sees the most.
    chosen = {len(placed) - 1 - i * len(placed) // kept for i in range(kept)}
    return [placed[i] for i in sorted(chosen)]


def _counted(layer: LayerTrace, call: AttentionCall) -> Bool[Tensor, " q"]:
    """Queries that are no padding: in self-attention those whose own key is visible."""
    _, _, n_q, n_k = call.sizes
    if layer.kind != "cross" and n_q == n_k and call.key_visible is not None:
        return call.key_visible[0]
    return torch.ones(n_q, dtype=torch.bool, device=call.q.device)


def _number(values: Tensor | None, head: int) -> float | None:
    return None if values is None else float(values[head])


def _spec(mech: Mechanism) -> str:
    try:
        return spec_of(mech)
    except ValueError:
        return repr(mech)
