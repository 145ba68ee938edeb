"""The tiles of the kernels of ``statistics``, and the constants that they are compiled with."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnlab.attention import AttentionCall
from attnlab.kernels.launching import Options

__all__ = [
    "COLUMN_TILE",
    "EXACT_TILE",
    "FEWEST_COLUMNS",
    "FLAGS",
    "OWN_COLUMNS",
    "RANKED_ROW_TILE",
    "ROW_TILE",
    "SMALL_COLUMN_TILE",
    "WIDEST",
    "Bins",
    "Tile",
    "bins_of",
    "column_options",
    "flags_of",
    "padded_width",
    "prepare_options",
    "recent_options",
    "row_options",
    "row_tile",
    "tile_for",
]

WIDEST = 128


class Tile(NamedTuple):
    """Rows and keys of a tile (in the second pass keys and rows), warps, stages, and numbers that a sum is kept as.

    ``registers`` is the most that a thread may have; 0 leaves it to the compiler. ``span``: how many tiles a bin of
    keys reaches over.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    fold: int = 8
    registers: int = 0
    span: int = 1


class Bins(NamedTuple):
    """Keys among which only the largest score is kept at first: ``parts`` bins take turns, each of ``keys`` keys."""

    parts: int
    keys: int

    def count(self, n_k: int) -> int:
        return triton.cdiv(n_k, self.parts * self.keys) * self.parts


# By the widest head: tiles of the first pass, of the first pass that also ranks by lengths, and of the second pass.
ROW_TILE = {64: Tile(64, 64, 4, 2, 4, 128, span=2), WIDEST: Tile(64, 64, 4, 2, 4, span=2)}
RANKED_ROW_TILE = {64: Tile(64, 128, 4, 2, 4), WIDEST: Tile(64, 64, 4, 2)}
# Of the first pass where a mask or a bias is read, which takes registers.
MASKED_ROW_TILE = {64: Tile(64, 64, 4, 2, 4), WIDEST: Tile(64, 64, 4, 2)}
# The least limit of registers where tiles may end beyond the text, keys are padding or no query is cut off.
ROOMY = 168
COLUMN_TILE = {64: Tile(64, 128, 4, 2, registers=128), WIDEST: Tile(64, 64, 4, 2)}
# Of squares whose side or place is no multiple of the tile's.
SMALL_COLUMN_TILE = {64: Tile(64, 64, 4, 3), WIDEST: Tile(64, 64, 4, 3)}
# Float32 has no tensor cores here, and its products need more registers.
EXACT_TILE = Tile(32, 32, 4, 2, 1)
# Columns that a product has at least, and how many of them are no sets.
FEWEST_COLUMNS, OWN_COLUMNS = 16, 4
# Keys of a program that prepares them are those of a tile.
PREPARED_WARPS = 4
# What a call is compiled for.
FLAGS = ("CAUSAL", "PADDED", "MASKED", "BIASED", "CUT", "WHOLE", "EXACT")


def tile_for(tiles: dict[int, Tile], *tensors: Tensor) -> Tile:
    """The tile for heads as wide as those of the tensors."""
    if tensors[0].dtype == torch.float32:
        return EXACT_TILE
    return next(tile for width, tile in tiles.items() if max(t.shape[-1] for t in tensors) <= width)


def row_tile(call: AttentionCall, v: Tensor, ranked: bool) -> Tile:
    """The tile of the first pass; its limit of registers is one for plain causal calls."""
    if call.mask is not None or call.bias is not None:
        return tile_for(MASKED_ROW_TILE, call.q, v)
    tile = tile_for(RANKED_ROW_TILE if ranked else ROW_TILE, call.q, v)
    whole = flags_of(call, tile, v)[FLAGS.index("WHOLE")]
    return (
        tile if not tile.registers or (call.causal and whole) else tile._replace(registers=max(tile.registers, ROOMY))
    )


def bins_of(tile: Tile) -> Bins:
    """The bins of the first pass: the keys of one thread, where each has sums of its own, else whole tiles."""
    parts = 4 if _fold(tile) == 4 else 1
    return Bins(parts, tile.keys * tile.span // parts)


def flags_of(call: AttentionCall, tile: Tile, v: Tensor) -> tuple[bool, ...]:
    """CAUSAL, PADDED, MASKED, BIASED, CUT (keys of some tile are hidden), WHOLE (every tile is inside), EXACT."""
    _, _, n_q, n_k = call.sizes
    padded, ragged = call.key_visible is not None, n_k % tile.keys != 0
    widths = [t.shape[-1] for t in (call.q, v)]
    whole = not padded and not ragged and n_q % tile.rows == 0 and all(w == padded_width(w) for w in widths)
    masked, biased = call.mask is not None, call.bias is not None
    return call.causal, padded, masked, biased, padded or ragged, whole, call.q.dtype == torch.float32


def padded_width(d: int) -> int:
    """A product on the tensor cores is at least 16 wide, and a tile's width a power of two."""
    return max(16, triton.next_power_of_2(d))


@functools.cache
def row_options(
    flags: tuple[bool, ...], asked: tuple[bool, ...], d: int, e: int, tile: Tile, n: int,
    width: int, apart: tuple[int, int],
) -> Options:  # fmt: skip
    """The constants of the first pass; ``apart``: how far a key and a value are from the next."""
    named = dict(zip((*FLAGS, "NEAR", "NORM", "SQUARES"), (*flags, *asked), strict=True))
    widths = {"D": d, "E": e, "BD": padded_width(d), "BE": padded_width(e)}
    last = {"PARTS": bins_of(tile).parts, "SPAN": tile.span}
    return _options(named | widths, tile, last | {"N": n, "MS": width, "KN": apart[0], "VN": apart[1]})


@functools.cache
def column_options(
    flags: tuple[bool, ...], asked: tuple[bool, bool], d: int, tile: Tile
) -> Options:  # fmt: skip
    """The constants of the second pass."""
    named = dict(zip((*FLAGS, "RECEIVED", "BLOCKS"), (*flags, *asked), strict=True))
    return _options(named | {"D": d, "BD": padded_width(d)}, tile, {})


@functools.cache
def recent_options(flags: tuple[bool, ...], d: int, tile: Tile) -> Options:
    """The constants of the kernel of recent mass."""
    return _options(dict(zip(FLAGS, flags, strict=True)) | {"D": d, "BD": padded_width(d)}, tile, {})


@functools.cache
def prepare_options(padded: bool, exact: bool, e: int, keys: int, width: int) -> Options:
    """The constants of the kernel that prepares keys and values."""
    named = {"PADDED": padded, "EXACT": exact, "E": e, "BE": padded_width(e), "BN": keys, "MS": width}
    return (*named.items(), ("num_warps", PREPARED_WARPS))


def _rows_of_warps(tile: Tile) -> bool:
    """Whether each warp has rows of its own, as on Hopper: where warps share rows, Triton must not reshape sums."""
    if not torch.cuda.is_available():
        return True
    return tile.rows >= 16 * tile.warps and torch.cuda.get_device_capability()[0] >= 9


def _fold(tile: Tile) -> int:
    return tile.fold if _rows_of_warps(tile) else 1


def _options(named: dict[str, Any], tile: Tile, last: dict[str, int]) -> Options:
    tiles = {"BM": tile.rows, "BN": tile.keys, "FOLD": _fold(tile)}
    how = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.registers:
        how["maxnreg"] = tile.registers
    return tuple({**named, **tiles, **last, **how}.items())
