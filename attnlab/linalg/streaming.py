"""Statistics of attention from blocks of rows of W, none of which is kept.

The weights of a query are a row w of W, with w_j on key j. Distances and sinks count visible keys only, so padding does
not change them. On a GPU a kernel computes the same (``streaming_gpu``).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnlab.attention import AttentionCall, Mechanism, grouped, hide_unseen, mask_with_bias, repeat_groups, ungrouped
from attnlab.chunks import chunk_budget
from attnlab.linalg.places import places
from attnlab.linalg.removed_share import RemovedShares
from attnlab.linalg.row_blocks import (
    BLOCK_ELEMENTS,
    RowBlock,
    largest_weights,
    mechanism_rows,
    row_ranges,
    softmax_rows,
)
from attnlab.shapes import Bool, Float, Int
from attnlab.summaries import short_repr

__all__ = [
    "CallStatistics",
    "Measures",
    "Text",
    "attention_statistics",
    "joined",
    "removed_in",
    "removed_of",
    "stream_rows",
]


@dataclass(frozen=True)
class Measures:
    """Which statistics are computed.

    ``largest`` is how many of a query's weights are kept; ``sinks`` and ``recent`` are how many keys count as the first
    ones and as near. ``block`` is the side, in tokens, of the squares of the map; 0 for no map.
    """

    largest: int = 8
    sinks: int = 4
    recent: int = 64
    norm: bool = True
    removed: bool = True
    received: bool = True
    block: int = 0


@dataclass(frozen=True, eq=False)
class Text:
    """What statistics must know of a call's text beside the call.

    ``members`` are sets of keys. ``first`` is the number of the first query, ``first_key`` that of the first key, above
    0 where a sliding window's cache has dropped keys, ``shown_before`` of which were visible. In cross-attention the
    queries are of another text than the keys (``own_keys`` is False).
    """

    members: Bool[Tensor, "#b k m"]
    first: int = 0
    first_key: int = 0
    shown_before: Int[Tensor, " b"] | None = None
    own_keys: bool = True

    __repr__ = short_repr


@dataclass(frozen=True, eq=False, kw_only=True)
class RowStatistics:
    """Statistics for every text b, head h and query q, whose weights are w_j on key j.

    A query that sees nothing has zeros. None stands for what was not asked for, or is not defined: a query of
    cross-attention is at no distance of a key.
    """

    # -sum_j w_j log w_j, in nats; NaN where a mechanism's weight is below zero.
    entropy: Float[Tensor, "b h q"]
    # sum_j w_j^2: 1 where all weight is on one key, 1/n where n keys share it.
    sum_of_squares: Float[Tensor, "b h q"]
    # The largest weights, largest first, and their keys; -1 where fewer keys have weight.
    largest: Float[Tensor, "b h q n"]
    places: Int[Tensor, "b h q n"]
    # The mass on the first keys, and on the last ones (in an encoder: on those as near on either side).
    sinks: Float[Tensor, "b h q"]
    recent: Float[Tensor, "b h q"] | None
    # sum_j w_j |i - j|.
    distance: Float[Tensor, "b h q"] | None
    # sum_j |w_j v_j|, the largest of |w_j v_j| and their keys.
    norm: Float[Tensor, "b h q"] | None
    norm_largest: Float[Tensor, "b h q n"] | None
    norm_places: Int[Tensor, "b h q n"] | None
    # The share of sum_j w_j^2 that effective attention removes.
    removed: Float[Tensor, "b h q"] | None
    # What each key gets from all queries.
    received: Float[Tensor, "b h k"] | None

    __repr__ = short_repr


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class CallStatistics(RowStatistics):
    """Statistics of one attention call."""

    # The mass on each set of keys.
    sets: Float[Tensor, "b h q m"]
    # Sums of the weights in squares of ``Measures.block`` tokens: the first row holds the call's first query, and the
    # first column the first key of the text.
    block_mass: Float[Tensor, "b h i j"] | None


def attention_statistics(
    call: AttentionCall, mech: Mechanism, measures: Measures, text: Text, *, softmax: bool
) -> tuple[CallStatistics, Float[Tensor, "b h q e"]]:
    """(statistics, W @ v in at least float32), by a kernel where it serves; else ``stream_rows``."""
    from attnlab.linalg.streaming_gpu import kernel_serves, stream_by_kernel

    if softmax and kernel_serves(call, measures, text):
        return stream_by_kernel(call, measures, text)
    return stream_rows(call, mech, measures, text, softmax=softmax)


def stream_rows(
    call: AttentionCall, mech: Mechanism, measures: Measures, text: Text, *, softmax: bool
) -> tuple[CallStatistics, Float[Tensor, "b h q e"]]:
    """(statistics, W @ v) in blocks of rows; the output in at least float32.

    ``softmax`` says that ``mech`` is softmax attention, whose rows are made here where padding and causality alone hide
    keys. Other rows are made by the mechanism's ``row_weights``.
    """
    call = hide_unseen(call)
    plain = softmax and call.mask is None and call.bias is None
    if plain and _large(call):
        return _by_heads(call, mech, measures, text)
    gathered = _Gathered(call, measures, text)
    for lo, hi in row_ranges(call, measures.block, text.first):
        n = measures.largest
        gathered.add(softmax_rows(call, lo, hi, n) if plain else mechanism_rows(mech, call, lo, hi, n))
    return gathered.result()


def joined(parts: list[CallStatistics], dim: int) -> CallStatistics:
    """Statistics of several texts (``dim`` 0) or heads (1)."""
    if len(parts) == 1:
        return parts[0]
    fields = {}
    for name in (f.name for f in dataclasses.fields(CallStatistics)):
        tensors = [getattr(part, name) for part in parts]
        fields[name] = None if tensors[0] is None else torch.cat(tensors, dim)
    return CallStatistics(**fields)  # type: ignore[arg-type]


def _large(call: AttentionCall) -> bool:
    b, h, n_q, n_k = call.sizes
    return b * call.k.shape[1] > 1 and b * h * min(n_q, 64) * n_k > chunk_budget(BLOCK_ELEMENTS)


def _by_heads(
    call: AttentionCall, mech: Mechanism, measures: Measures, text: Text
) -> tuple[CallStatistics, Float[Tensor, "b h q e"]]:
    """Each text and each key/value head by itself, so that a block has many rows."""
    texts, outputs, r = [], [], call.groups
    for b in range(call.q.shape[0]):
        own = replace(text, members=text.members[min(b, text.members.shape[0] - 1)][None])
        if text.shown_before is not None:
            own = replace(own, shown_before=text.shown_before[b : b + 1])
        seen = None if call.key_visible is None else call.key_visible[b : b + 1]
        heads = []
        for g in range(call.k.shape[1]):
            q, k, v = call.q[b, None, g * r : (g + 1) * r], call.k[b, None, g, None], call.v[b, None, g, None]
            part = replace(call, q=q, k=k, v=v, key_visible=seen, x=None, memory=None)
            heads.append(stream_rows(part, mech, measures, own, softmax=True))
        texts.append(joined([statistics for statistics, _ in heads], 1))
        outputs.append(torch.cat([output for _, output in heads], 1))
    return joined(texts, 0), torch.cat(outputs, 0)


class _Gathered:
    """Statistics of the blocks so far."""

    def __init__(self, call: AttentionCall, measures: Measures, text: Text) -> None:
        self.call, self.measures, self.text = call, measures, text
        b, h, _, n_k = call.sizes
        self.of_keys, self.of_queries = places(call)
        if text.shown_before is not None:
            self.of_keys, self.of_queries = (t + text.shown_before[:, None] for t in (self.of_keys, self.of_queries))
        kind = torch.promote_types(call.v.dtype, torch.float32)
        self.norms = torch.linalg.vector_norm(call.v, dim=-1, dtype=kind) if measures.norm else None
        self.columns = self._columns(kind)
        self.rows: list[dict[str, Tensor]] = []
        self.received = torch.zeros(b, h, n_k, dtype=kind, device=call.q.device)
        self.blocks: dict[int, Tensor] = {}

    def _columns(self, kind: torch.dtype) -> Float[Tensor, "b g k c"]:
        """Sums over keys are products with these: values, their lengths, and other numbers of each key.

        The last three are 1, the place, which each block counts from its first query, and whether the key is a sink.
        """
        call = self.call
        first = self.of_keys < self.measures.sinks
        if call.key_visible is not None:
            first = first & call.key_visible
        members = self.text.members.expand(call.q.shape[0], -1, -1).to(kind)
        last = torch.stack([torch.ones_like(first), torch.zeros_like(first), first], -1).to(kind)
        shared = torch.cat([members, last], -1)[:, None].expand(-1, call.v.shape[1], -1, -1)
        norms = self.norms[..., None] if self.norms is not None else shared[..., -1:]
        return torch.cat([call.v.to(kind), norms, shared], -1)

    def add(self, block: RowBlock) -> None:
        """Measure a block of rows."""
        w, n, e = block.w, block.w.shape[-1], self.call.v.shape[-1]
        base = self.of_queries[:, block.lo : block.lo + 1]
        self.columns[..., -2] = (self.of_keys - base)[:, None]
        by_group = grouped(w, self.call.groups).flatten(2, 3) @ self.columns[:, :, :n]
        sums = ungrouped(by_group.unflatten(2, (self.call.groups, -1))) * block.factor[..., None]
        row = {"output": sums[..., :e], "sets": sums[..., e + 1 : -3], "sinks": sums[..., -1]}
        row |= {"entropy": block.entropy, "largest": block.largest, "places": block.places}
        row["sum_of_squares"] = (torch.linalg.vector_norm(w, dim=-1) * block.factor).square()
        if self.text.own_keys:
            row["recent"] = self._recent(block)
            row["distance"] = self._distance(block, sums[..., -3], sums[..., -2])
        if self.norms is not None:
            weighted = (w.abs() if block.signed else w) * repeat_groups(self.norms[..., :n], self.call.groups)[
                :, :, None
            ]
            row["norm"] = weighted.sum(-1) * block.factor if block.signed else sums[..., e]
            values, row["norm_places"] = largest_weights(weighted, self.measures.largest)
            row["norm_largest"] = values * block.factor[..., None]
        self.rows.append(row)
        if self.measures.received or self.measures.block:
            self._add_columns(block.lo, (block.factor[:, :, None] @ w)[:, :, 0])

    def _recent(self, block: RowBlock) -> Float[Tensor, "b h c"]:
        """The mass on the keys fewer than ``recent`` places away."""
        n, start = block.w.shape[-1], 0
        if self.call.key_visible is None:
            start = min(max(0, block.lo + self.call.offset - self.measures.recent + 1), n)
        own = self.of_queries[:, block.lo : block.hi, None]
        near = (own - self.of_keys[:, None, start:n]).abs() < self.measures.recent
        return (block.w[..., start:] * near[:, None]).sum(-1) * block.factor

    def _distance(self, block: RowBlock, mass: Tensor, place: Tensor) -> Float[Tensor, "b h c"]:
        """sum_j w_j |i - j|; ``place`` is sum_j w_j (j - the block's first query)."""
        own = self.of_queries[:, block.lo : block.hi]
        if self.call.causal:
            return mass * (own - own[:, :1])[:, None] - place
        far = (own[:, :, None] - self.of_keys[:, None, : block.w.shape[-1]]).abs()
        return (block.w * far[:, None]).sum(-1) * block.factor

    def _add_columns(self, lo: int, columns: Float[Tensor, "b h n"]) -> None:
        n, block, before = columns.shape[-1], self.measures.block, self.text.first_key
        self.received[..., :n] += columns
        if not block:
            return
        row, at = (self.text.first + lo) // block, before // block
        if row not in self.blocks:
            width = -(-(before + self.call.k.shape[2]) // block)
            self.blocks[row] = columns.new_zeros(*columns.shape[:2], width)
        cells = pad(columns, (before % block, -(before + n) % block)).unflatten(-1, (-1, block)).sum(-1)
        self.blocks[row][..., at : at + cells.shape[-1]] += cells

    def result(self) -> tuple[CallStatistics, Float[Tensor, "b h q e"]]:
        """The statistics of all rows, and the output."""
        call, measures = self.call, self.measures
        rows: dict[str, Tensor | None] = dict.fromkeys(("recent", "distance", "norm", "norm_largest", "norm_places"))
        rows |= {name: torch.cat([row[name] for row in self.rows], 2) for name in self.rows[0]}
        output, squares = rows.pop("output"), rows["sum_of_squares"]
        assert output is not None
        assert squares is not None
        return CallStatistics(
            **rows,  # type: ignore[arg-type]
            removed=removed_in(call, output, squares) if measures.removed else None,
            received=self.received if measures.received else None,
            block_mass=torch.stack([self.blocks[i] for i in sorted(self.blocks)], 2) if measures.block else None,
        ), output


def removed_in(
    call: AttentionCall, output: Float[Tensor, "b h q e"], sum_of_squares: Float[Tensor, "b h q"]
) -> Float[Tensor, "b h q"] | None:
    """The share of each row that effective attention removes; None where each query sees keys of its own."""
    if mask_with_bias(call) is not None:
        return None
    shares = removed_of(call)
    shares.start(output, sum_of_squares)
    return shares.result()


def removed_of(call: AttentionCall) -> RemovedShares:
    """``removed_in`` of a call in which padding and causality alone hide keys, begun with its values."""
    return RemovedShares(call.v, call.q.shape[2], key_visible=call.key_visible, causal=call.causal, offset=call.offset)
