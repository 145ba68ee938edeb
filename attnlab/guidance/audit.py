"""Which heads of a recorded model already follow which pattern, and how closely."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, pair_mask
from attnlab.fields import expect
from attnlab.guidance.loss import layer_targets
from attnlab.patterns import SpecialTokens, Targets, overlap
from attnlab.shapes import Float, Int, Shaped
from attnlab.trace import LayerTrace, recorded_layers

__all__ = ["pattern_audit"]

# A pattern that fewer of a text's tokens than this can follow says little of a head: First in a narrow window.
FEW = 0.1


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

    closeness is 1 - sum (w - t)^2 / sum (w^2 + t^2) over the rows that can follow the pattern: 1 for the pattern
    itself, 0 for a head that puts nothing there. mass is the mean weight on the pattern's keys in these rows. A row
    counts if it is no padding and sees a key that the pattern names, so the last row of Next does not, nor has Next
    any row in a causal model: both numbers are None there, and rows is 0. ``of`` is the number of rows without
    padding, and ``few`` says that under a tenth of them count. Without ``patterns``: next, prev, first, same, and
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
        # A mask may be inside a bias, as a sliding window's or a padded text's often is.
        call = replace(layer.call, mask=pair_mask(layer.call), bias=None)
        of = _texts_rows(call, attention_mask)
        for name in patterns:
            targets = layer_targets(name, call, input_ids, attention_mask=attention_mask, tokens=tokens)
            for head, (closeness, mass, rows) in enumerate(_scores(W, targets)):
                place = {"kind": layer.kind, "layer": layer.layer, "head": head, "pattern": name}
                counts = {"rows": rows, "of": of, "few": rows < FEW * of}
                table.append({**place, "closeness": closeness, "mass": mass, **counts})
    if not table:
        raise ValueError(f"no self-attention over {input_ids.shape[1]} keys was recorded; pass the ids the model read")
    return table


def _texts_rows(call: AttentionCall, attention_mask: Tensor | None) -> int:
    """How many queries are no padding."""
    flags = call.key_visible if attention_mask is None else attention_mask
    return call.q.shape[0] * call.q.shape[2] if flags is None else int(flags[:, call.offset :].bool().sum())


def _scores(W: Float[Tensor, "b h q k"], targets: Targets) -> list[tuple[float | None, float | None, int]]:
    """(closeness, mass, rows) of each head over the rows that can follow the pattern."""
    rows = targets.followed.expand(W.shape[:3])
    size = (W.square().sum(-1) + targets.squares) * rows
    closeness = (2 * overlap(W, targets) * rows).sum((0, 2)) / size.sum((0, 2))
    mass = (_mass(W, targets) * rows).sum((0, 2)) / rows.sum((0, 2))
    per_head = zip(*(column.tolist() for column in (closeness, mass, rows.sum((0, 2)))), strict=True)
    return [(c, m, n) if n else (None, None, 0) for c, m, n in per_head]


def _mass(W: Tensor, targets: Targets) -> Tensor:
    """The weight on the keys that the pattern names."""
    if targets.positions.shape[-1] == 0 and targets.columns is not None:
        return (W @ targets.columns[:, None, :, None].to(W)).squeeze(-1)
    at = W.gather(3, targets.positions[:, None].expand(-1, W.shape[1], -1, -1))
    return (at * (targets.values > 0)).sum(-1)
