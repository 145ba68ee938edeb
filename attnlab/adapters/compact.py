"""Fewer keys in the place of a recorded layer's or a cache's, fitted to reference queries, with a certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnlab.adapters.held_keys import HeldKeys, is_cache, keys_of_cache
from attnlab.attention import AttentionCall, repeat_groups, visible
from attnlab.caches.compact import Compact
from attnlab.caches.compact_fit import Certificate
from attnlab.caches.contract import Gathered, Moment, Refit, take_keys
from attnlab.caches.kv_policy import KVPolicy, keep_masks
from attnlab.fields import check_int
from attnlab.linalg.caratheodory import caratheodory
from attnlab.mechanisms.softmax import Softmax
from attnlab.shapes import Bool, Float, Int
from attnlab.summaries import notebook_view, short_repr
from attnlab.trace import LayerTrace, Trace, recorded_layers

__all__ = ["CompactedLayer", "Compaction", "compact"]

LAYERS = ("even", "shared")


@dataclass(frozen=True, eq=False)
class CompactedLayer:
    """Keys, values and biases that stand for those of one layer.

    Where heads keep different numbers, ``columns``, the places of the keys among all, begin with -1 for those that keep
    fewer.
    """

    layer: int
    k: Float[Tensor, "b g n d"]
    v: Float[Tensor, "b g n e"]
    bias: Float[Tensor, "b g n"]
    columns: Int[Tensor, "b g n"]
    scale: float | None
    certificate: Certificate | None

    __repr__ = short_repr

    def call(
        self,
        q: Float[Tensor, "b h q d"],
        k: Float[Tensor, "b g m d"] | None = None,
        v: Float[Tensor, "b g m e"] | None = None,
    ) -> AttentionCall:
        """Softmax's call of queries over these keys, and over later ``k`` and ``v`` where they are given."""
        bias, there, keys, values = self.bias, self.columns >= 0, self.k, self.v
        if k is not None and v is not None:
            more = k.shape[2]
            keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            bias, there = pad(bias, (0, more)), pad(there, (0, more), value=True)
        groups, n_q = q.shape[1] // keys.shape[1], q.shape[2]
        bias, mask = (repeat_groups(t, groups).unsqueeze(2).expand(-1, -1, n_q, -1) for t in (bias, there))
        return AttentionCall(q, keys, values, bias=bias, mask=mask, scale=self.scale)


@dataclass(frozen=True, eq=False)
class Compaction:
    """What ``compact`` made of each layer; ``before`` is how many keys a head had."""

    layers: tuple[CompactedLayer, ...]
    before: int

    def __repr__(self) -> str:
        report = self.report()
        shown = ", ".join(f"{name} {_shown(report[name])}" for name in ("error", "worst_error", "mass_error", "bound"))
        return f"Compaction({len(self.layers)} layers, {self.before} -> {report['keys']:.4g} keys a head; {shown})"

    def _repr_html_(self) -> str:
        measures = ("keys", "error", "fitted_error", "mass_error", "bound")
        rows = [
            {"layer": layer.layer}
            | {
                name: _mean(getattr(layer.certificate, name).double())
                for name in measures
                if layer.certificate is not None
            }
            for layer in self.layers
        ]
        return notebook_view(repr(self), rows, note="Means over key/value heads.")

    def report(self) -> dict[str, Any]:
        """Plain JSON: means over layers and heads, the worst head's error, and every layer's certificate."""
        made = [layer.certificate for layer in self.layers if layer.certificate is not None]
        kept = [(layer.columns >= 0).sum(-1).double().mean() for layer in self.layers]
        error = _all(made, "error")
        return {
            "before": self.before,
            "keys": float(torch.stack(kept).mean()),
            "error": _mean(error),
            "worst_error": None if error.isnan().all() else float(error[~error.isnan()].max()),
            "mass_error": _mean(_all(made, "mass_error")),
            "bound": _mean(_all(made, "bound")),
            "layers": [
                {"layer": layer.layer, **({} if layer.certificate is None else layer.certificate.report())}
                for layer in self.layers
            ],
        }


def _all(made: Sequence[Certificate], name: str) -> Tensor:
    return torch.cat([getattr(one, name).double().flatten().cpu() for one in made] or [torch.full((1,), torch.nan)])


def _mean(numbers: Tensor) -> float | None:
    return None if bool(numbers.isnan().all()) else float(numbers.nanmean())


def _shown(number: float | None) -> str:
    return "not measured" if number is None else f"{number:.3g}"


@torch.no_grad()
def compact(
    source: Any,
    *,
    keys: int | float,
    queries: str | Trace | LayerTrace = "prompt",
    layers: str = "even",
    ridge: float = 0.01,
) -> Compaction:
    """``keys`` keys a head (below 1: a share) that reproduce a recorded trace's or a cache's outputs for some queries.

    By attention matching, as the cache policy "compact" does. ``queries`` are the prompt's own ("prompt"), or those of
    another trace, such as of a continuation or a second reading, which are to see every key; a transformers cache
    holds no queries and needs them. For a single query and keys of at least the width of the values and one, the
    outputs are exact with values as they were (Caratheodory). ``layers="shared"`` lets all heads share their budgets.

    >>> layer = AttentionCall(torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 3))
    >>> compact(LayerTrace(layer, Softmax(), Softmax()(layer), None, "decoder", 0, "a"), keys=5).layers[0].k.shape
    torch.Size([1, 2, 5, 4])
    """
    if layers not in LAYERS:
        raise ValueError(f"layers must be one of {', '.join(LAYERS)}, got {layers!r}")
    if not (isinstance(keys, float) and 0 < keys < 1):
        check_int("keys, unless it is a share between 0 and 1,", keys, least=1)
    policy = KVPolicy(keys, by=f"compact:queries=prompt,ridge={ridge}", layers=layers)
    asked = _reference_calls(source, queries)
    moments = [_moment(policy, call, real) for call, real in asked.values()]
    score = policy.score
    assert isinstance(score, Compact)
    keep = _keep(policy, moments, [score.score(moment) for moment in moments])
    made = [_compacted(n, score, moment, each) for n, moment, each in zip(asked, moments, keep, strict=True)]
    return Compaction(tuple(made), max(moment.call.k.shape[2] for moment in moments))


def _keep(policy: KVPolicy, moments: Sequence[Moment], scores: Sequence[Tensor]) -> Sequence[Tensor]:
    """The keys to keep of each layer; layers may hold different numbers where each has its own budget."""
    if not policy.shares_layers:
        return [keep_masks(policy, [moment], [score])[0] for moment, score in zip(moments, scores, strict=True)]
    counts = {moment.call.k.shape[2] for moment in moments}
    if len(counts) > 1:
        raise ValueError(f"layers=shared needs layers that hold as many keys, got {sorted(counts)}; use layers=even")
    return keep_masks(policy, moments, scores)


# Reference queries over a layer's keys, and which of them are tokens, None: all.
_Asked = tuple[AttentionCall, Tensor | None]


def _reference_calls(source: Any, queries: Any) -> dict[int, _Asked]:
    """For each layer the reference queries' call over its keys."""
    if isinstance(queries, str) and queries != "prompt":
        raise ValueError(
            f"queries must be 'prompt' or a recorded trace, got {queries!r}; 'repeat' and 'sampled' need the model: "
            f"use al.evicting(model, 'compact:queries={queries},budget=...')"
        )
    asked = (
        None
        if isinstance(queries, str)
        else {layer.layer: _of_tokens(layer.call) for layer in recorded_layers(queries)}
    )
    own = None if is_cache(source) else _softmax_calls(recorded_layers(source))
    if asked is None:
        if own is None:
            raise ValueError("a cache holds no queries; give queries=, a trace recorded while its keys were read")
        return {n: (_checked(call), _real(call)) for n, call in own.items()}
    held = keys_of_cache(source) if own is None else {n: HeldKeys(call.k, call.v) for n, call in own.items()}
    missing = sorted(held.keys() - asked.keys())
    if missing:
        raise ValueError(f"queries= has no layer {missing[0]}, whose keys are to be compacted")
    return {n: _asked(asked[n], keys, None if own is None else own[n]) for n, keys in held.items()}


def _real(call: AttentionCall) -> Bool[Tensor, "b q"] | None:
    """Which queries are tokens of the text and not padding, where a causal call says so; None: all."""
    if call.key_visible is None or not call.causal:
        return None
    return call.key_visible[:, call.offset : call.offset + call.q.shape[2]]


def _softmax_calls(recorded: Sequence[LayerTrace]) -> dict[int, AttentionCall]:
    """The call of each layer; a ValueError where one does not attend by softmax."""
    for layer in recorded:
        if not isinstance(layer.mechanism, Softmax):
            raise ValueError(f"{layer.name} attends by {layer.mechanism!r}; only keys of softmax can be compacted")
    return {layer.layer: _of_tokens(layer.call) for layer in recorded}


def _of_tokens(call: AttentionCall) -> AttentionCall:
    """The call without the free places that a static cache has behind its tokens."""
    end = call.offset + call.q.shape[2]
    if not call.causal or call.mask is not None or call.bias is not None or end >= call.k.shape[2]:
        return call
    shown = None if call.key_visible is None else call.key_visible[:, :end]
    return replace(call, k=call.k[:, :, :end], v=call.v[:, :, :end], key_visible=shown, x=None)


def _checked(call: AttentionCall) -> AttentionCall:
    if call.bias is not None:
        raise ValueError("a position bias changes with later queries, so no key can stand for others under it")
    if call.mask is not None:
        raise ValueError("a mask hides some keys from some queries, so no key can stand for others under it")
    return call


def _asked(call: AttentionCall, held: HeldKeys, own: AttentionCall | None) -> _Asked:
    """Other queries over every key that is there and not padding."""
    (b, h, n_q, _), k, v, there = _checked(call).q.shape, held.k, held.v, held.there
    if k.shape[0] != b:
        raise ValueError(f"the keys are those of {k.shape[0]} rows, and the queries those of {b}")
    # The first keys that a cache's queries saw were the cache's own.
    known = call if own is None else _checked(own)
    shown = None if there is not None or known.k.shape[2] < k.shape[2] else known.key_visible
    seen = None if shown is None else shown[:, : k.shape[2]]
    mask = None if there is None else repeat_groups(there, h // there.shape[1]).unsqueeze(2).expand(-1, -1, n_q, -1)
    kind = torch.promote_types(k.dtype, torch.float32)
    made = AttentionCall(call.q.to(kind), k.to(kind), v.to(kind), key_visible=seen, mask=mask, scale=call.scale)
    return made, _real(call)


def _moment(policy: KVPolicy, call: AttentionCall, real: Bool[Tensor, "b q"] | None) -> Moment:
    b, _, n_q, n_k = call.sizes
    kind = torch.promote_types(call.q.dtype, torch.float32)
    held = torch.ones(call.k.shape[:3], dtype=torch.bool, device=call.k.device)
    seen = visible(call)
    if seen is not None:
        held = seen.expand(b, call.q.shape[1], -1, n_k).any(2).unflatten(1, (call.k.shape[1], -1)).any(2)
    k, v = (t.to(kind).masked_fill(~held.unsqueeze(-1), 0) for t in (call.k, call.v))
    counts = held.sum(-1).amax(-1).tolist()
    budgets = policy.budgets(counts)
    return Moment(
        call=replace(call, q=call.q.to(kind), k=k, v=v, x=None, memory=None),
        held=held,
        real=real,
        read_before=(max(0, n_k - n_q),) * b,
        column=max(0, n_k - n_q),
        budgets=budgets,
        sinks=tuple(policy.split(budget)[0] for budget in budgets),
        recent=(0,) * b,
        gathered=Gathered(),
        once=True,
    )


def _compacted(number: int, score: Compact, moment: Moment, keep: Bool[Tensor, "b g k"]) -> CompactedLayer:
    call = moment.call
    if call.q.shape[1:3] == (call.k.shape[1], 1) and int(keep.sum(-1).min()) > call.v.shape[-1]:
        keep, refit = _exact(moment)
    else:
        refit = score.refit(moment, keep)
    most = int(keep.sum(-1).max())
    at = keep.to(torch.int8).argsort(dim=-1, stable=True)[..., keep.shape[-1] - most :]
    columns = at.masked_fill(~keep.gather(-1, at), -1)
    k, v, bias = (take_keys(t, at) for t in (refit.k, refit.v, refit.bias))
    return CompactedLayer(number, k, v, bias, columns, call.scale, refit.certificate)


def _exact(moment: Moment) -> tuple[Bool[Tensor, "b g k"], Refit]:
    """One query a head: its output as a convex combination of e + 1 values, which needs no other values."""
    call = moment.call
    W = Softmax().weights(call).double()
    w = caratheodory(W.flatten(0, 1), call.v.double().flatten(0, 1)).view_as(W)
    keep = w.squeeze(2) > 0
    bias = torch.where(keep, (w / W).squeeze(2), 1).log().to(call.k.dtype)
    return keep, Refit(call.k, call.v, bias)
