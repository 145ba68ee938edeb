"""Every cache policy once more, in loops over single numbers: the papers' equations and the documented schedule.

One layer, one row, no positions: heads of queries read the key/value head of their group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.caches import KVPolicy

__all__ = ["PlainCache"]

Scores = dict[int, float]


@dataclass
class Row:
    """What one query saw: the weight of each column, and its output."""

    token: int
    head: int
    weights: Scores
    output: Tensor


class PlainCache:
    """The columns that each key/value head keeps."""

    def __init__(self, policy: KVPolicy, q: Tensor, k: Tensor, v: Tensor, projection: Tensor) -> None:
        self.policy, self.q, self.k, self.v, self.projection = policy, q, k, v, projection
        self.groups = len(q) // len(k)
        self.kept: list[list[int]] = [[] for _ in k]
        self.rows: list[Row] = []
        self.tokens = 0

    def read(self, count: int) -> None:
        """Attend to the next tokens, then drop keys where the schedule says so."""
        new = range(self.tokens, self.tokens + count)
        self.tokens += count
        for kept in self.kept:
            kept.extend(new)
        for token in new:
            for head, q in enumerate(self.q):
                g = head // self.groups
                seen = [c for c in self.kept[g] if c <= token]
                exponents = [math.exp(float(q[token] @ self.k[g][c]) / math.sqrt(len(q[token]))) for c in seen]
                weights = {c: e / sum(exponents) for c, e in zip(seen, exponents, strict=True)}
                self.rows.append(Row(token, head, weights, sum(w * self.v[g][c] for c, w in weights.items())))
        if self.policy.schedule == "step" or new.start == 0:
            (budget,) = self.policy.budgets([self.tokens], layer=1, layers=3)
            scores = [PLAIN[self.policy.by](self, g) for g in range(len(self.k))]
            if self.policy.heads == "shared":
                self._share(scores, budget)
            else:
                self.kept = [self._best(g, scores[g], budget)[:budget] for g in range(len(self.k))]
                self.kept = [sorted(kept) for kept in self.kept]

    def sure(self, g: int, budget: int) -> set[int]:
        sinks, recent, _ = self.policy.split(budget)
        kept = self.kept[g]
        return {*kept[:sinks], *(kept[-recent:] if recent else [])}

    def _best(self, g: int, scores: Scores, budget: int) -> list[int]:
        """The columns from the best to the worst; equal scores put the later one first."""
        sure = self.sure(g, budget)
        return sorted(self.kept[g], key=lambda c: (c in sure, scores[c], c), reverse=True)

    def _share(self, scores: list[Scores], budget: int) -> None:
        """AdaKV: the best of every head within its safeguard, then the best of all heads together."""
        safe = max(1, int(self.policy.score.safeguard * budget))
        chosen: list[tuple[bool, float, int, int]] = []
        for g, own in enumerate(scores):
            best, sure = self._best(g, own, budget), self.sure(g, budget)
            chosen += [(c in sure or place < safe, own[c], g, c) for place, c in enumerate(best)]
        chosen.sort(reverse=True)
        kept = chosen[: budget * len(scores)]
        self.kept = [sorted(c for _, _, at, c in kept if at == g) for g in range(len(scores))]

    def of_group(self, g: int) -> list[Row]:
        return [row for row in self.rows if row.head // self.groups == g]


def recency(cache: PlainCache, g: int) -> Scores:
    return dict.fromkeys(cache.kept[g], 0.0)


def mass(cache: PlainCache, g: int) -> Scores:
    return {c: sum(row.weights.get(c, 0) for row in cache.of_group(g)) for c in cache.kept[g]}


def average_mass(cache: PlainCache, g: int) -> Scores:
    queries = {c: sum(c in row.weights for row in cache.of_group(g)) for c in cache.kept[g]}
    return {c: total / queries[c] for c, total in mass(cache, g).items()}


def tova(cache: PlainCache, g: int) -> Scores:
    last = [row for row in cache.rows if row.token == cache.tokens - 1]
    return {c: sum(row.weights[c] for row in last) / len(last) for c in cache.kept[g]}


def snapkv(cache: PlainCache, g: int, window: int = 2, kernel: int = 3) -> Scores:
    rows = [row for row in cache.of_group(g) if row.token >= cache.tokens - window]
    votes = [sum(row.weights.get(c, 0) for row in rows) / len(rows) for c in cache.kept[g]]
    votes[-window:] = [0.0] * window
    half = kernel // 2
    pooled = [sum(votes[max(0, i - half) : i + half + 1]) / kernel for i in range(len(votes))]
    return dict(zip(cache.kept[g], pooled, strict=True))


def keydiff(cache: PlainCache, g: int) -> Scores:
    keys = {c: cache.k[g][c] / cache.k[g][c].norm() for c in cache.kept[g]}
    anchor = sum(keys.values()) / len(keys)
    return {c: -float(key @ anchor / anchor.norm()) for c, key in keys.items()}


def key_norm(cache: PlainCache, g: int) -> Scores:
    return {c: -float(cache.k[g][c].norm()) for c in cache.kept[g]}


def value_norm(cache: PlainCache, g: int) -> Scores:
    return {c: float(cache.v[g][c].abs().sum()) for c in cache.kept[g]}


def vatp(cache: PlainCache, g: int) -> Scores:
    norms = value_norm(cache, g)
    return {c: total * norms[c] for c, total in mass(cache, g).items()}


def leave_one_out(cache: PlainCache, g: int) -> Scores:
    """By really leaving the key out."""
    scores = dict.fromkeys(cache.kept[g], 0.0)
    for row in cache.of_group(g):
        for c in scores.keys() & row.weights.keys():
            others = {o: w for o, w in row.weights.items() if o != c}
            if others:
                without = sum(w * cache.v[g][o] for o, w in others.items()) / sum(others.values())
                scores[c] += float((row.output - without).square().sum())
    return scores


def value_aware(cache: PlainCache, g: int) -> Scores:
    rows = cache.of_group(g)
    mean = sum(row.output for row in rows) / len(rows)
    return {c: -float((cache.v[g][c] - mean).square().sum() - mean.square().sum()) for c in cache.kept[g]}


def random(cache: PlainCache, g: int) -> Scores:
    draws = torch.Generator().manual_seed(cache.policy.seed * 1009 + 1)
    drawn = torch.rand(cache.tokens, len(cache.k), generator=draws)
    return {c: float(drawn[c, g]) for c in cache.kept[g]}


def expected_attention(cache: PlainCache, g: int, covariance: bool = True) -> Scores:
    sinks, _, _ = cache.policy.split(cache.policy.budgets([cache.tokens], layer=1, layers=3)[0])
    total: Scores = dict.fromkeys(cache.kept[g], 0.0)
    others = cache.kept[g][sinks:]
    for head in range(g * cache.groups, (g + 1) * cache.groups):
        q = cache.q[head][sinks : cache.tokens]
        mean, s = q.mean(0), 1 / math.sqrt(q.shape[-1])
        spread = (q - mean).T @ (q - mean) / len(q) * covariance
        z = {c: math.exp(s * cache.k[g][c] @ mean + s**2 / 2 * cache.k[g][c] @ spread @ cache.k[g][c]) for c in others}
        for c in others:
            total[c] += z[c] / sum(z.values()) / cache.groups * float(cache.v[g][c].norm())
    return total


def criticalkv(cache: PlainCache, g: int) -> Scores:
    (budget,) = cache.policy.budgets([cache.tokens], layer=1, layers=3)
    votes, sure, width = snapkv(cache, g), cache.sure(g, budget), cache.v.shape[-1]
    first = sorted(votes.keys() - sure, key=lambda c: (votes[c], c), reverse=True)[: max(0, budget // 2 - len(sure))]
    scores = {}
    for c, vote in votes.items():
        heads = range(g * cache.groups, (g + 1) * cache.groups)
        norms = [cache.projection[:, h * width : (h + 1) * width] @ cache.v[g][c] for h in heads]
        added = sum(float(norm.abs().sum()) for norm in norms) / cache.groups
        scores[c] = math.inf if c in first else (vote + 1e-4) * added
    return scores


PLAIN: dict[str, Callable[[PlainCache, int], Scores]] = {
    "streaming-llm": recency,
    "h2o": mass,
    "h2o:average=true": average_mass,
    "tova": tova,
    "snapkv:window=2,kernel=3": snapkv,
    "pyramidkv:window=2,kernel=3": snapkv,
    "keydiff": keydiff,
    "key-norm": key_norm,
    "value-norm": value_norm,
    "vatp": vatp,
    "leave-one-out": leave_one_out,
    "value-aware": value_aware,
    "random": random,
    "expected-attention:future=7": expected_attention,
    "expected-attention:future=7,covariance=false": lambda cache, g: expected_attention(cache, g, covariance=False),
    "criticalkv:window=2,kernel=3": criticalkv,
}
