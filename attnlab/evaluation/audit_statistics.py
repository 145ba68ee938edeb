"""What the audit measures of every head on one window of text, and what it calls a finding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism, normalise, visible
from attnlab.guidance import pattern_audit
from attnlab.reading.heads import attention_entropy
from attnlab.shapes import Float, Int
from attnlab.trace import LayerTrace

__all__ = ["FINDINGS", "STATISTICS", "Finding", "Statistic", "findings_of", "head_statistics"]

# The first tokens of a window, and the neighbours on either side that a local head looks at.
SINKS, LOCAL = 4, 8
PATTERNS = ("prev", "next", "first", "same")
# Shares below this, or above one less this, are told apart less and less: a head at 0.9999 is one at 1.
SMALLEST = 1e-3


@dataclass(frozen=True)
class Statistic:
    """One number between 0 and 1 for each head and window.

    ``floor``: differences of the log-odds up to this are put down to the text. They are about 1.5 times the largest
    that any head of SmolLM2 shows between two texts, of novels, essays and film reviews (docs/audit.md). Values above
    ``top`` count as alike.
    """

    meaning: str
    floor: float
    top: float = 1.0

    def log_odds(self, value: float) -> float:
        """log(p / (1 - p)), where both are larger by a thousandth so that 0 and 1 stay finite.

        >>> shares = Statistic("", 1.0)
        >>> shares.log_odds(0.5), round(shares.log_odds(0.0), 2), round(shares.log_odds(1.0), 2)
        (0.0, -6.91, 6.91)
        """
        share = min(self.top, max(0.0, value))
        return math.log((share + SMALLEST) / (1 - share + SMALLEST))


STATISTICS = {
    "share": Statistic("length of the head's output after W_O, over that of all heads of its layer together", 2.5),
    "entropy": Statistic("entropy of its attention over that of even attention: 0 is one key, 1 all keys alike", 2.0),
    "sinks": Statistic(f"weight on the first {SINKS} tokens, of tokens that see {2 * SINKS} keys or more", 3.0),
    "local": Statistic(f"weight on tokens at most {LOCAL} away, of tokens that see {2 * LOCAL + 2} keys or more", 2.5),
    "prev": Statistic("closeness to attending to the previous token", 2.0),
    "next": Statistic("closeness to attending to the next token", 2.0),
    "first": Statistic("closeness to attending to the first token", 4.0),
    "same": Statistic("closeness to attending to the tokens that are the same as it", 2.0),
    "nearest": Statistic(
        "distance to the head of its layer that is most like it, in W and in output after W_O", 1.5, top=0.9
    ),
}


@dataclass(frozen=True)
class Finding:
    """A statistic's mean beyond a threshold, at or below it or at or above it."""

    statistic: str
    threshold: float
    above: bool
    meaning: str


FINDINGS = {
    "dead": Finding("share", 0.01, False, "without it the layer's output would move by 1 % or less"),
    "sinks only": Finding("sinks", 0.95, True, "nearly all its weight is on the first tokens"),
    "duplicate": Finding("nearest", 0.1, False, "its weights and its output are those of another head of its layer"),
    "collapsed": Finding("entropy", 0.05, False, "nearly every token attends to one key alone"),
    "uniform": Finding("entropy", 0.95, True, "nearly every token attends to all keys alike"),
    "previous token": Finding("prev", 0.5, True, "it attends to the previous token"),
    "next token": Finding("next", 0.5, True, "it attends to the next token"),
    "first token": Finding("first", 0.5, True, "it attends to the first token"),
    "same token": Finding("same", 0.5, True, "it attends to tokens that are the same"),
    "local": Finding("local", 0.8, True, "most of its weight is on neighbours"),
}


def findings_of(means: Mapping[str, float | None]) -> list[str]:
    """The findings of a head whose statistics have these means; None is a statistic that it does not have.

    >>> findings_of({"share": 0.3, "sinks": 0.99, "prev": None})
    ['sinks only']
    """
    names = []
    for name, finding in FINDINGS.items():
        mean = means.get(finding.statistic)
        if mean is not None and (mean >= finding.threshold if finding.above else mean <= finding.threshold):
            names.append(name)
    return names


@torch.no_grad()
def head_statistics(layer: LayerTrace, input_ids: Int[Tensor, "1 k"]) -> dict[str, list[Any]]:
    """Every statistic, and "nearest_head", of each head of a layer that read one window without padding.

    None where a head has no such number: patterns of cross-attention, next tokens in a causal layer.
    """
    weights = layer.weights().float()
    # Readings ask for the weights again, which take as long as all else here.
    layer = replace(layer, mechanism=_Known(weights))
    W, added = normalise(weights.abs())[0], _added(layer)
    size = torch.linalg.vector_norm(added, dim=(1, 2)).double()
    if not bool(size.isfinite().all() and W.sum().isfinite()):
        raise ValueError(f"{layer.kind} layer {layer.layer}: its attention is NaN or infinite on this text")
    seen = visible(layer.call)
    count = torch.full_like(W[..., 0], W.shape[-1]) if seen is None else seen.expand(layer.call.sizes)[0].sum(-1)
    distance, other = _nearest(W, added)
    own = layer.kind != "cross" and layer.call.k.shape[2] == input_ids.shape[1]
    statistics: dict[str, list[Any]] = {
        "share": (size / torch.linalg.vector_norm(size).clamp(min=1e-300)).tolist(),
        "entropy": _mean(attention_entropy(layer)[0] / count.clamp(min=2).log(), count > 1),
        "sinks": _mean(W[..., :SINKS].sum(-1), count >= 2 * SINKS),
        "local": _mean((W * _neighbours(layer)).sum(-1), (count >= 2 * LOCAL + 2) & own),
        **{name: [None] * len(W) for name in PATTERNS},
        "nearest": distance,
        "nearest_head": other,
    }
    for row in pattern_audit([layer], input_ids, patterns=PATTERNS) if own else ():
        statistics[row["pattern"]][row["head"]] = None if row["few"] else row["closeness"]
    return statistics


class _Known(Mechanism):
    """Weights that have been computed."""

    def __init__(self, weights: Tensor) -> None:
        self.known = weights

    def weights(self, call: AttentionCall) -> Float[Tensor, "b h q k"]:
        return self.known


def _neighbours(layer: LayerTrace) -> Tensor:
    _, _, n_q, n_k = layer.call.sizes
    device = layer.call.q.device
    places = torch.arange(n_q, device=device)[:, None] + layer.call.offset
    return (places - torch.arange(n_k, device=device)).abs() <= LOCAL


def _added(layer: LayerTrace) -> Float[Tensor, "h q m"]:
    """What each head adds to the layer's output: o W_O^h, or o itself where W_O is not known."""
    o = layer.output[0].float()
    if layer.projection is None:
        return o
    return o @ layer.projection.detach().float().unflatten(1, (o.shape[0], -1)).permute(1, 2, 0)


def _nearest(W: Tensor, added: Tensor) -> tuple[list[float | None], list[int | None]]:
    """(distance to the nearest other head, that head): the larger of the distances in W and in what is added."""
    heads = len(W)
    if heads < 2:
        return [None] * heads, [None] * heads
    distance = torch.stack([_distances(t.flatten(1)) for t in (W, added)]).amax(0)
    least = distance.fill_diagonal_(torch.inf).min(-1)
    return least.values.tolist(), least.indices.tolist()


def _distances(rows: Float[Tensor, "h n"]) -> Float[Tensor, "h h"]:
    """|a - b| / sqrt(|a|^2 + |b|^2): 0 for equal rows, 1 for rows with nothing in common, and for two of zeros."""
    products = (rows @ rows.mT).double()
    squares = products.diagonal()
    below = squares[:, None] + squares
    apart = (below - 2 * products).clamp(min=0)
    return torch.where(below > 0, apart / below.clamp(min=1e-300), 1.0).sqrt()


def _mean(values: Float[Tensor, "h q"], counted: Tensor) -> list[float | None]:
    """The mean over the queries that count; None where there is none."""
    sums, counts = torch.where(counted, values, 0.0).double().sum(-1), counted.sum(-1)
    return [s / n if n else None for s, n in zip(sums.tolist(), counts.tolist(), strict=True)]
