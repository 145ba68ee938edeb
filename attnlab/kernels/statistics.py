"""Softmax attention with statistics of its weights in the same pass, and a second pass for what needs them normalised.

The first (``row_statistics``) is flash attention (Dao, 2023) that beside the output keeps sums over a row's weights and
its largest ones. The second (``column_statistics``) makes the weights again from the logarithms of the rows' sums. The
sums that keys receive are added by many programs at once, in no fixed order, so their last digits vary.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnlab.attention import AttentionCall
from attnlab.kernels.launching import Options, launch
from attnlab.kernels.statistics_triton import columns, rows
from attnlab.shapes import Float, Int

__all__ = [
    "MOST_LARGEST",
    "ROW_TILE",
    "SIDE",
    "ColumnStatistics",
    "RowStatistics",
    "Tile",
    "column_statistics",
    "row_statistics",
    "serves",
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 128
# The longest list of largest weights that a row keeps in registers.
MOST_LARGEST = 8
# Sides of the map's squares are multiples of this, and tiles divide it.
SIDE = 64


# The strides of masks and biases that kernels take.
PAIR_STRIDES = ("mb", "mh", "mq", "bb", "bh", "bq")


class Tile(NamedTuple):
    """Rows and keys of a tile, warps, and stages of the pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


# By the widest head: tiles of the first and of the second pass.
ROW_TILE = {64: Tile(64, 64, 4, 3), WIDEST: Tile(64, 32, 4, 3)}
COLUMN_TILE = {64: Tile(64, 64, 4, 3), WIDEST: Tile(64, 64, 4, 3)}
# Float32 has no tensor cores here, and its products need more registers.
EXACT_TILE = Tile(32, 32, 4, 2)


class RowStatistics(NamedTuple):
    """The output, log2 of each row's sum (infinity where it sees nothing), and the statistics of rows."""

    output: Float[Tensor, "b h q e"]
    lse: Float[Tensor, "b h q"]
    entropy: Float[Tensor, "b h q"]
    sum_of_squares: Float[Tensor, "b h q"]
    largest: Float[Tensor, "b h q n"]
    places: Int[Tensor, "b h q n"]
    sinks: Float[Tensor, "b h q"]
    recent: Float[Tensor, "b h q"]
    distance: Float[Tensor, "b h q"]
    norm: Float[Tensor, "b h q"]
    sets: Float[Tensor, "b h q m"]


class ColumnStatistics(NamedTuple):
    """What keys receive, the mass in squares, and the largest weights times lengths of values."""

    received: Float[Tensor, "b h k"]
    block_mass: Float[Tensor, "b h i j"]
    norm_largest: Float[Tensor, "b h q n"]
    norm_places: Int[Tensor, "b h q n"]


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
    norms: Float[Tensor, "b g k"] | None,
    members: Float[Tensor, "b k m"] | None,
    wide_output: bool,
) -> RowStatistics:
    """The first pass; the bias of ``call`` hides nothing that its mask does not.

    ``places`` are those of keys and queries; None leaves recent keys and distances out, as None of ``norms`` and of
    ``members`` does with these. ``members`` has a multiple of 16 sets. ``wide_output``: the output in float32.
    """
    b, h, n_q, _ = call.q.shape
    g, n_k, e = call.v.shape[1:]
    n = triton.next_power_of_2(largest)
    q, k, v = _rows_contiguous(call.q, call.k, call.v)
    # Laid out as (b, n, h, e), as the linear map after attention reads it.
    out = torch.empty(b, n_q, h, e, dtype=torch.float32 if wide_output else q.dtype, device=q.device).transpose(1, 2)
    numbers = [torch.empty(b, h, n_q, device=q.device) for _ in range(7)]
    lse, entropy, squares, first, near, distance, norm = numbers
    sets = torch.empty(b, h, n_q, 16 if members is None else members.shape[-1], device=q.device)
    values, at = (torch.empty(b, h, n_q, n, dtype=kind, device=q.device) for kind in (torch.float32, torch.int32))
    key_places, query_places = (lse, lse) if places is None else (t.int().contiguous() for t in places)
    masks, mask_strides = _pairs(call)
    tile = _tile(ROW_TILE, q, v)
    strides = [t.stride(axis) for t in (q, k, v, out) for axis in range(3)] + mask_strides
    names = ("qb", "qh", "qn", "kb", "kh", "kn", "vb", "vh", "vn", "ob", "oh", "on", *PAIR_STRIDES)
    sizes = {"H": h, "G": g, "n_q": n_q, "n_k": n_k, "offset": call.offset, "scale": call.softmax_scale}
    with torch.cuda.device_of(q):
        launch(
            rows,
            (triton.cdiv(n_q, tile.rows), b * h, 1),
            {
                "Q": q, "K": k, "V": v, **masks, "KeyPlaces": key_places, "QueryPlaces": query_places,
                "Norms": lse if norms is None else norms.contiguous(),
                "Members": lse if members is None else members.contiguous(),
                "Out": out, "Lse": lse, "Entropy": entropy, "Squares": squares, "Largest": values, "Places": at,
                "Sinks": first, "Recent": near, "Distance": distance, "Norm": norm, "Sets": sets,
            },
            dict(zip(names, strides, strict=True)) | sizes | {"sinks": sinks, "recent": recent},
            _row_options(
                _flags(call, tile, v), (places is not None, norms is not None, members is not None), q.shape[-1], e,
                tile, n, sets.shape[-1],
            ),
        )  # fmt: skip
    return RowStatistics(
        out, lse, entropy, squares, values[..., :largest], at[..., :largest], first, near, distance, norm, sets
    )


def column_statistics(
    call: AttentionCall,
    lse: Float[Tensor, "b h q"],
    *,
    largest: int,
    log_norms: Float[Tensor, "b g k"] | None,
    received: bool,
    block: int,
    first: int,
) -> ColumnStatistics:
    """The second pass; ``log_norms`` are log2 |v_j|, and ``first``, a multiple of ``SIDE``, numbers the first query."""
    (b, h, n_q, d), (g, n_k) = call.q.shape, call.k.shape[1:3]
    n, side = triton.next_power_of_2(largest), block or SIDE
    q, k = _rows_contiguous(call.q, call.k)
    # Squares are counted from the one that holds the first query.
    shift = first % side
    n_i, n_j = triton.cdiv(shift + n_q, side), triton.cdiv(n_k, side)
    sums = torch.zeros(b, h, n_k if received else 0, device=q.device)
    blocks = torch.zeros(b, h, n_i if block else 0, n_j, device=q.device)
    values, at = (torch.empty(b, h, n_q, n, dtype=kind, device=q.device) for kind in (torch.float32, torch.int32))
    masks, mask_strides = _pairs(call)
    tile = _tile(COLUMN_TILE, q, q)
    strides = [t.stride(axis) for t in (q, k) for axis in range(3)] + mask_strides
    names = ("qb", "qh", "qn", "kb", "kh", "kn", *PAIR_STRIDES)
    sizes = {"H": h, "G": g, "n_q": n_q, "n_k": n_k, "offset": call.offset, "scale": call.softmax_scale}
    with torch.cuda.device_of(q):
        launch(
            columns,
            (triton.cdiv(n_q, tile.rows), b * h, 1),
            {
                "Q": q, "K": k, **masks, "LogNorms": lse if log_norms is None else log_norms.contiguous(), "Lse": lse,
                "Received": sums, "Blocks": blocks, "Largest": values, "Places": at,
            },
            dict(zip(names, strides, strict=True)) | sizes | {"n_i": n_i, "n_j": n_j, "side": side, "shift": shift},
            _column_options(_flags(call, tile, q), (log_norms is not None, received, block > 0), d, tile, n),
        )  # fmt: skip
    return ColumnStatistics(sums, blocks, values[..., :largest], at[..., :largest])


def _rows_contiguous(*tensors: Tensor) -> list[Tensor]:
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def _pairs(call: AttentionCall) -> tuple[dict[str, Tensor], list[int]]:
    """Flags of keys and pairs and the bias by name (any tensor where there is none), and strides of the latter two."""
    tensors, strides = {"Visible": call.q if call.key_visible is None else call.key_visible.contiguous()}, []
    for name, t in (("Mask", call.mask), ("Bias", call.bias)):
        t = None if t is None else t.expand(*t.shape[:2], call.q.shape[2], call.k.shape[2])
        if t is not None and t.stride(-1) != 1:
            t = t.contiguous()
        tensors[name] = call.q if t is None else t
        # An axis of length 1 is that of all texts or heads.
        strides += [0, 0, 0] if t is None else [0 if t.shape[a] == 1 else t.stride(a) for a in (0, 1)] + [t.stride(2)]
    return tensors, strides


def _tile(tiles: dict[int, Tile], *tensors: Tensor) -> Tile:
    if tensors[0].dtype == torch.float32:
        return EXACT_TILE
    return next(tile for width, tile in tiles.items() if max(t.shape[-1] for t in tensors) <= width)


def _flags(call: AttentionCall, tile: Tile, v: Tensor) -> tuple[bool, ...]:
    """CAUSAL, PADDED, MASKED, BIASED, CUT (keys of some tile are hidden), WHOLE (every tile is inside), EXACT."""
    _, _, n_q, n_k = call.sizes
    padded, ragged = call.key_visible is not None, n_k % tile.keys != 0
    widths = [t.shape[-1] for t in (call.q, v)]
    whole = not padded and not ragged and n_q % tile.rows == 0 and all(w == _width(w) for w in widths)
    masked, biased = call.mask is not None, call.bias is not None
    return call.causal, padded, masked, biased, padded or ragged, whole, call.q.dtype == torch.float32


def _width(d: int) -> int:
    """A product on the tensor cores is at least 16 wide, and a tile's width a power of two."""
    return max(16, triton.next_power_of_2(d))


FLAGS = ("CAUSAL", "PADDED", "MASKED", "BIASED", "CUT", "WHOLE", "EXACT")


@functools.cache
def _row_options(
    flags: tuple[bool, ...], asked: tuple[bool, bool, bool], d: int, e: int, tile: Tile, n: int, sets: int
) -> Options:
    named = dict(zip((*FLAGS, "NEAR", "NORM", "SETS"), (*flags, *asked), strict=True))
    widths = {"D": d, "E": e, "BD": _width(d), "BE": _width(e)}
    return _options(named | widths, tile, {"N": n, "MS": sets})


@functools.cache
def _column_options(flags: tuple[bool, ...], asked: tuple[bool, bool, bool], d: int, tile: Tile, n: int) -> Options:
    named = dict(zip((*FLAGS, "NORM", "RECEIVED", "BLOCKS"), (*flags, *asked), strict=True))
    return _options(named | {"D": d, "BD": _width(d)}, tile, {"N": n})


def _options(named: dict[str, Any], tile: Tile, last: dict[str, int]) -> Options:
    tiles = {"BM": tile.rows, "BN": tile.keys}
    return tuple({**named, **tiles, **last, "num_warps": tile.warps, "num_stages": tile.stages}.items())
