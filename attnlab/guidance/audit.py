"""Which heads of a recorded model already follow which pattern, and how closely."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from attnlab.fields import expect
from attnlab.guidance.loss import layer_targets
from attnlab.patterns import SpecialTokens, Targets, overlap
from attnlab.shapes import Float, Int, Shaped
from attnlab.trace import LayerTrace, recorded_layers

__all__ = ["pattern_audit"]


@torch.no_grad()
def pattern_audit(
    trace: Iterable[LayerTrace],
    input_ids: Int[Tensor, "b k"],
    *,
    patterns: Sequence[str] | None = None,
    attention_mask: Shaped[Tensor, "b k"] | None = None,
    tokens: SpecialTokens | None = None,
) -> list[dict[str, Any]]:
    """A table, one row for each self-attention head and pattern: kind, layer, head, pattern, closeness, mass, rows.

    closeness is 1 - sum (w - t)^2 / sum (w^2 + t^2) over the rows with a target: 1 for the pattern itself, 0 for a head
    that puts nothing there. mass is the mean weight on the target's positions, boundary rows left out, since all their
    weight is there. Both are None where no row has a target. Without ``patterns``: next, prev, first, same, and
    period and delim where their ``tokens`` are known.
    """
    expect("input_ids", input_ids, Tensor, "the ids that the model read, a tensor (batch, tokens)")
    if attention_mask is not None:
        expect("attention_mask", attention_mask, Tensor, "a tensor (batch, tokens), or None")
    if tokens is not None:
        expect("tokens", tokens, SpecialTokens, "SpecialTokens, as special_tokens(tokenizer) gives")
    if patterns is None:
        known = tokens or SpecialTokens()
        patterns = [
            "next",
            "prev",
            "first",
            "same",
            *["period"] * bool(known.period),
            *["delim"] * bool(known.delimiters),
        ]
    table = []
    for layer in recorded_layers(trace):
        if layer.kind == "cross" or layer.call.k.shape[2] != input_ids.shape[1]:
            continue
        W = layer.weights().float()
        for name in patterns:
            targets = layer_targets(name, layer.call, input_ids, attention_mask=attention_mask, tokens=tokens)
            for head, (closeness, mass, rows) in enumerate(_scores(W, targets)):
                place = {"kind": layer.kind, "layer": layer.layer, "head": head}
                table.append({**place, "pattern": name, "closeness": closeness, "mass": mass, "rows": rows})
    if not table:
        raise ValueError(f"no self-attention over {input_ids.shape[1]} keys was recorded; pass the ids the model read")
    return table


def _scores(W: Float[Tensor, "b h q k"], targets: Targets) -> list[tuple[float | None, float | None, int]]:
    rows = targets.rows.expand(W.shape[:3])
    size = (W.square().sum(-1) + targets.squares) * rows
    closeness = (2 * overlap(W, targets) * rows).sum((0, 2)) / size.sum((0, 2))
    inside, counted = _mass(W, targets)
    counted = counted.expand(W.shape[:3])
    mass = (inside * counted).sum((0, 2)) / counted.sum((0, 2))
    columns = (closeness, mass, rows.sum((0, 2)), counted.sum((0, 2)))
    per_head = zip(*(column.tolist() for column in columns), strict=True)
    return [(c if n else None, m if of_mass else None, n) for c, m, n, of_mass in per_head]


def _mass(W: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """(weight on the target's positions, the rows it is read in)."""
    if targets.positions.shape[-1] == 0 and targets.columns is not None:
        return (W @ targets.columns[:, None, :, None].to(W)).squeeze(-1), targets.uniform
    at = W.gather(3, targets.positions[:, None].expand(-1, W.shape[1], -1, -1))
    on = targets.values > 0
    return (at * on).sum(-1), on.any(-1)
