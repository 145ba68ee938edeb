"""Softmax attention with statistics of its weights in the same pass, and a second pass for what needs them normalised.

The first (``row_statistics``) is flash attention (Dao, 2023) that beside the output keeps sums over a row's weights and
its largest ones. The second (``column_statistics``) makes the weights again from the logarithms of the rows' sums, key
tile by key tile. The mass of squares is added by many programs at once, in no fixed order, so its last digits vary.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnlab.attention import AttentionCall
from attnlab.kernels.launching import launch
from attnlab.kernels.statistics_largest import Scored, largest_in_bins
from attnlab.kernels.statistics_tiles import (
    COLUMN_TILE,
    FEWEST_COLUMNS,
    FLAGS,
    OWN_COLUMNS,
    SMALL_COLUMN_TILE,
    WIDEST,
    Tile,
    bins_of,
    column_options,
    flags_of,
    padded_width,
    prepare_options,
    recent_options,
    row_options,
    row_tile,
    tile_for,
)
from attnlab.kernels.statistics_triton import prepared, rows
from attnlab.kernels.statistics_weights_triton import columns, recents
from attnlab.shapes import Bool, Float, Int

__all__ = [
    "MOST_LARGEST",
    "SIDE",
    "ColumnStatistics",
    "RowStatistics",
    "column_statistics",
    "row_statistics",
    "serves",
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The longest list of largest weights that a row keeps in registers.
MOST_LARGEST = 8
# Sides of the map's squares are multiples of this, and tiles divide it.
SIDE = 64
# No tile has more rows.
MOST_ROWS = 128


# The strides of masks and biases that kernels take.
PAIR_STRIDES = ("mb", "mh", "mq", "bb", "bh", "bq")
PASS_STRIDES = ("qb", "qh", "qn", "kb", "kh", "kn", *PAIR_STRIDES)
ROW_STRIDES = ("qb", "qh", "qn", "kb", "kh", "vb", "vh", "ob", "oh", "on", *PAIR_STRIDES)
# What the first pass writes for each row.
BY_ROW = ("Lse", "Entropy", "Squares", "Sinks", "Recent", "Distance", "Norm")


class RowStatistics(NamedTuple):
    """The output, log2 of each row's sum (infinity where it sees nothing), and the statistics of rows."""

    output: Float[Tensor, "b h q e"]
    lse: Float[Tensor, "b h q"]
    entropy: Float[Tensor, "b h q"]
    # None where they are not asked for.
    sum_of_squares: Float[Tensor, "b h q"] | None
    sinks: Float[Tensor, "b h q"]
    recent: Float[Tensor, "b h q"]
    distance: Float[Tensor, "b h q"]
    norm: Float[Tensor, "b h q"]
    sets: Float[Tensor, "b h q m"]
    largest: Float[Tensor, "b h q n"]
    places: Int[Tensor, "b h q n"]
    # None where they are not asked for.
    norm_largest: Float[Tensor, "b h q n"] | None
    norm_places: Int[Tensor, "b h q n"] | None


class ColumnStatistics(NamedTuple):
    """What keys receive, and the mass in squares."""

    received: Float[Tensor, "b h k"]
    block_mass: Float[Tensor, "b h i j"]


def serves(call: AttentionCall) -> bool:
    """Whether the kernels are made for these tensors."""
    _, _, n_q, n_k = call.sizes
    return call.q.dtype in DTYPES and max(call.q.shape[-1], call.v.shape[-1]) <= WIDEST and n_q > 0 and n_k > 0


def row_statistics(
    call: AttentionCall,
    *,
    largest: int,
    sinks: int,
    recent: int,
    places: tuple[Int[Tensor, "b k"], Int[Tensor, "b q"]] | None,
    near: bool,
    norm_largest: bool,
    squares: bool,
    members: Bool[Tensor, "#b k m"],
    wide_output: bool,
) -> RowStatistics:
    """The first pass; the bias of ``call`` hides nothing that its mask does not.

    ``places`` are those of keys and queries where some keys are padding; without ``near`` recent keys and distances are
    left out. ``members`` are sets of keys. ``wide_output``: the output in float32.
    """
    q, k, v = _rows_contiguous(call.q, call.k, call.v)
    (b, h, n_q, d), (n_k, e), m = q.shape, v.shape[2:], members.shape[-1]
    n, tile = triton.next_power_of_2(largest), row_tile(call, v, norm_largest)
    bins = bins_of(tile)
    n_bins = bins.count(n_k)
    bin_mask = triton.next_power_of_2(n_bins) - 1
    key_places, query_places = (q, q) if places is None else (t.int().contiguous() for t in places)
    with torch.cuda.device_of(q):
        keys = _prepare(call, v, key_places, members, sinks, tile)
        # Laid out as (b, n, h, e), as the linear map after attention reads it.
        out = torch.empty(b, n_q, h, e, dtype=torch.float32 if wide_output else q.dtype, device=q.device)
        out = out.transpose(1, 2)
        by_row = dict(zip(BY_ROW, _numbers_of_rows(len(BY_ROW), b, h, n_q, q.device), strict=True))
        sets = torch.empty(b, h, n_q, m, device=q.device)
        kept = _Lists.made(2 if norm_largest else 1, (b, h, n_q, n), n_bins, q.device)
        pairs = _pairs(call)
        # The last key that causality shows each query, and those that fill up a tile.
        reach = torch.arange(call.offset, call.offset + n_q + MOST_ROWS, dtype=torch.int32, device=q.device)
        pairs = pairs._replace(tensors=pairs.tensors | {"Reach": reach})
        strides = [*q.stride()[:3], *k.stride()[:2], *keys.values.stride()[:2], *out.stride()[:3]]
        launch(
            rows,
            (triton.cdiv(n_q, tile.rows), b * h, 1),
            {
                "Q": q, "K": k, "V": keys.values, **pairs.tensors, "KeyPlaces": key_places,
                "QueryPlaces": query_places, "Side": keys.side, "LogNorms": keys.log_norms, "Unit": keys.unit,
                "Out": out, **by_row, "Sets": sets, "Largest": kept.values[0], "Places": kept.places[0],
                "NormLargest": kept.values[-1], "NormPlaces": kept.places[-1], "Counts": kept.counts,
            },
            dict(zip(ROW_STRIDES, strides + pairs.strides, strict=True)) | _sizes(call)
            | {"recent": recent, "n_sets": m, "bin_mask": bin_mask},
            row_options(
                flags_of(call, tile, v), (near, norm_largest, squares), d, e, tile, n, keys.side.shape[-1],
                (k.stride(2), keys.values.stride(2)),
            ),
        )  # fmt: skip
        if near and call.causal and call.key_visible is None:
            _recent(call, q, k, pairs, by_row["Lse"], by_row["Recent"], recent)
        if q.dtype != torch.float32:
            made_of = _scores_of(call, q, k, pairs, tile._replace(keys=bins.parts * bins.keys))
            largest_in_bins(made_of, bins, kept.values, kept.places, kept.counts, by_row["Lse"], keys.log_norms)
    lists = [t[..., :largest] for pair in zip(kept.values, kept.places, strict=True) for t in pair]
    made = RowStatistics._make([out, *by_row.values(), sets, *lists, *([None] * (4 - len(lists)))])
    return made if squares else made._replace(sum_of_squares=None)


def column_statistics(
    call: AttentionCall, lse: Float[Tensor, "b h q"], *, received: bool, block: int, first: int
) -> ColumnStatistics:
    """The second pass; ``first``, a multiple of ``SIDE``, numbers the first query."""
    (b, h, n_q, d), n_k, side = call.q.shape, call.k.shape[2], block or SIDE
    q, k = _rows_contiguous(call.q, call.k)
    # Squares are counted from the one that holds the first query.
    shift = first % side
    n_i, n_j = triton.cdiv(shift + n_q, side), triton.cdiv(n_k, side)
    sums = torch.empty(b, h, n_k if received else 0, device=q.device)
    blocks = torch.zeros(b, h, n_i if block else 0, n_j, device=q.device)
    pairs = _pairs(call)
    tile = tile_for(COLUMN_TILE, q)
    if block and (side % tile.rows or side % tile.keys or shift % tile.keys):
        tile = tile_for(SMALL_COLUMN_TILE, q)
    strides = [*q.stride()[:3], *k.stride()[:3], *pairs.strides]
    with torch.cuda.device_of(q):
        launch(
            columns,
            (triton.cdiv(n_k, tile.rows), b * h, 1),
            {"Q": q, "K": k, **pairs.tensors, "Lse": lse, "Received": sums, "Blocks": blocks},
            dict(zip(PASS_STRIDES, strides, strict=True))
            | _sizes(call)
            | {"n_i": n_i, "n_j": n_j, "side": side, "shift": shift},
            column_options(
                flags_of(call, tile._replace(rows=tile.keys, keys=tile.rows), q),
                (received, block > 0),
                d,
                tile,
            ),
        )
    return ColumnStatistics(sums, blocks)


class _Keys(NamedTuple):
    """What the first pass reads of keys beside the keys."""

    values: Float[Tensor, "b g k e"]
    side: Float[Tensor, "b g k c"]
    log_norms: Float[Tensor, "b g k"]
    unit: Float[Tensor, "b g"]


def _prepare(call: AttentionCall, v: Tensor, key_places: Tensor, members: Tensor, sinks: int, tile: Tile) -> _Keys:
    """Values in float16 over a power of two, and the matrix that sums over keys are products with."""
    b, g, n_k, e = v.shape
    m, exact = members.shape[-1], v.dtype == torch.float32
    width = max(FEWEST_COLUMNS, triton.next_power_of_2(OWN_COLUMNS + m))
    kind = torch.float32 if exact else torch.float16
    most = v if exact else torch.linalg.vector_norm(v, torch.inf, dim=(2, 3))
    values = v if exact else torch.empty(b, g, n_k, e, dtype=kind, device=v.device)
    side = torch.empty(b, g, n_k, width, dtype=kind, device=v.device)
    log_norms, unit = torch.empty(b, g, n_k, device=v.device), torch.empty(b, g, device=v.device)
    members = members.contiguous()
    shown = key_places if call.key_visible is None else call.key_visible.contiguous()
    launch(
        prepared,
        (triton.cdiv(n_k, tile.keys), b * g, 1),
        {
            "V": v, "Most": most, "Visible": shown, "KeyPlaces": key_places, "Members": members if m else key_places,
            "Values": values, "Side": side, "LogNorms": log_norms, "Unit": unit,
        },
        {
            "vb": v.stride(0), "vh": v.stride(1), "vn": v.stride(2), "sb": 0 if members.shape[0] == 1 else n_k * m,
            "G": g, "n_k": n_k, "c": call.softmax_scale * math.log2(math.e), "sinks": sinks, "n_sets": m,
        },
        prepare_options(call.key_visible is not None, exact, e, tile.keys, width),
    )  # fmt: skip
    return _Keys(values, side, log_norms, unit)


def _numbers_of_rows(count: int, b: int, h: int, n_q: int, device: torch.device) -> tuple[Tensor, ...]:
    """Room for so many numbers of each row in one piece of memory, each aligned as direct launches need it."""
    each = triton.cdiv(b * h * n_q, 4) * 4
    room = torch.empty(count * each, device=device)
    return room.as_strided((count, b, h, n_q), (each, h * n_q, n_q, 1)).unbind()


class _Lists(NamedTuple):
    """Room for the largest weights and their keys; in half precision for bins, ranks, and how many rows have a bin.

    There is one list of each row, or a second one that is ranked by lengths of values.
    """

    values: Float[Tensor, "r b h q n"]
    places: Int[Tensor, "r b h q n"]
    counts: Int[Tensor, "r b h t"]

    @classmethod
    def made(cls, rankings: int, shape: tuple[int, ...], n_bins: int, device: torch.device) -> _Lists:
        values = torch.empty(rankings, *shape, device=device)
        places = torch.empty(rankings, *shape, dtype=torch.int32, device=device)
        # One more counts the places of a list that stay empty.
        return cls(values, places, torch.zeros(rankings, *shape[:2], n_bins + 1, dtype=torch.int32, device=device))


class _Pairs(NamedTuple):
    """What hides pairs and is added to them, by name (any tensor where there is none), and strides of mask and bias."""

    tensors: dict[str, Tensor]
    strides: list[int]


def _scores_of(call: AttentionCall, q: Tensor, k: Tensor, pairs: _Pairs, tile: Tile) -> Scored:
    """What the scores of a tile are made of."""
    numbers = dict(zip(PASS_STRIDES, [*q.stride()[:3], *k.stride()[:3], *pairs.strides], strict=True)) | _sizes(call)
    flags = dict(zip(FLAGS, flags_of(call, tile, q), strict=True)) | {"D": q.shape[-1], "BD": padded_width(q.shape[-1])}
    return Scored({"Q": q, "K": k, **pairs.tensors}, numbers, flags)


def _recent(
    call: AttentionCall, q: Tensor, k: Tensor, pairs: _Pairs, lse: Tensor, mass: Tensor, recent: int
) -> None:  # fmt: skip
    """The mass on the last keys, in the few tiles that hold them."""
    tile = tile_for(SMALL_COLUMN_TILE, q)
    made_of = _scores_of(call, q, k, pairs, tile)
    launch(
        recents,
        (triton.cdiv(q.shape[2], tile.rows), q.shape[0] * q.shape[1], 1),
        {**made_of.tensors, "Lse": lse, "Recent": mass},
        made_of.numbers | {"recent": recent},
        recent_options(flags_of(call, tile, q), q.shape[-1], tile),
    )


def _sizes(call: AttentionCall) -> dict[str, Any]:
    (h, n_q), (g, n_k) = call.q.shape[1:3], call.k.shape[1:3]
    return {"H": h, "G": g, "n_q": n_q, "n_k": n_k, "offset": call.offset, "scale": call.softmax_scale}


def _rows_contiguous(*tensors: Tensor) -> list[Tensor]:
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def _pairs(call: AttentionCall) -> _Pairs:
    tensors, strides = {"Visible": call.q if call.key_visible is None else call.key_visible.contiguous()}, []
    for name, t in (("Mask", call.mask), ("Bias", call.bias)):
        t = None if t is None else t.expand(*t.shape[:2], call.q.shape[2], call.k.shape[2])
        if t is not None and t.stride(-1) != 1:
            t = t.contiguous()
        tensors[name] = call.q if t is None else t
        # An axis of length 1 is that of all texts or heads.
        strides += [0, 0, 0] if t is None else [0 if t.shape[a] == 1 else t.stride(a) for a in (0, 1)] + [t.stride(2)]
    return _Pairs(tensors, strides)
