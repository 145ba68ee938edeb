"""The largest scores of rows from the few tiles that hold them: ``statistics_largest_triton``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnlab.kernels.launching import Numbers, Options, Tensors, launch
from attnlab.kernels.statistics_largest_triton import chosen, ordered, ranked, scored
from attnlab.shapes import Float, Int

__all__ = ["Scored", "largest_in_tiles"]

# Candidates held at once, 64 MiB of them.
MOST_CANDIDATES = 1 << 24
# Pairs of a program that counts or orders them, and rows of one that chooses.
BLOCK, CHOSEN_ROWS = 1024, 32
# Pairs that are scored at once, and warps.
PAIRS, PAIR_WARPS = 64, 4


class Scored(NamedTuple):
    """What scores are made of: tensors by name, their strides and sizes, flags and widths of the kernel."""

    tensors: Tensors
    numbers: Numbers
    flags: dict[str, Any]
    keys: int


def largest_in_tiles(
    made_of: Scored,
    tiles: Float[Tensor, "b h q n"],
    largest: Float[Tensor, "b h q n"],
    places: Int[Tensor, "b h q n"],
    lse: Float[Tensor, "b h q"],
    log_norms: Float[Tensor, "b g k"] | None,
    tile_mask: int,
) -> None:
    """The n largest weights of each row, from its n tiles with the largest scores, and their keys.

    ``largest`` and ``places`` are written. With ``log_norms`` weights are times lengths of values.
    """
    b, h, n_q, n = tiles.shape
    heads, pairs = b * h, n_q * n
    n_tiles = triton.cdiv(made_of.numbers["n_k"], made_of.keys)
    order = _order(tiles.view(heads, pairs), n_tiles, tile_mask)
    at_once = max(1, min(heads, MOST_CANDIDATES // (pairs * n)))
    candidates = torch.empty(at_once, pairs, n, device=tiles.device)
    sizes = {"BN": made_of.keys, "N": n}
    flags = made_of.flags | {"NORM": log_norms is not None}
    tensors: Tensors = made_of.tensors | {"LogNorms": lse if log_norms is None else log_norms}
    by_head = {"Tiles": tiles, "Lse": lse, "Largest": largest, "Places": places}
    for first in range(0, heads, at_once):
        last = min(first + at_once, heads)
        launch(
            scored,
            (triton.cdiv(pairs, PAIRS), last - first, 1),
            tensors | {"Tiles": tiles, "Order": order, "Candidates": candidates},
            made_of.numbers | {"n_tiles": n_tiles, "tile_mask": tile_mask, "first_head": first},
            _options(flags | {"BM": PAIRS} | sizes, PAIR_WARPS),
        )
        own: Tensors = {name: t.view(heads, -1)[first:last] for name, t in by_head.items()}
        launch(
            chosen,
            (triton.cdiv((last - first) * n_q, CHOSEN_ROWS), 1, 1),
            {"Candidates": candidates, **own},
            {"rows": (last - first) * n_q, "scale": made_of.numbers["scale"], "n_tiles": n_tiles}
            | {"tile_mask": tile_mask},
            _options({"BM": CHOSEN_ROWS} | sizes, 4),
        )


def _order(tiles: Float[Tensor, "heads pairs"], n_tiles: int, tile_mask: int) -> Int[Tensor, "heads pairs"]:
    """The pairs of each head in the order of their tiles."""
    heads, pairs = tiles.shape
    counts = torch.zeros(heads, n_tiles + 1, dtype=torch.int32, device=tiles.device)
    ranks, order = (torch.empty(heads, pairs, dtype=torch.int32, device=tiles.device) for _ in range(2))
    grid, sizes = (triton.cdiv(pairs, BLOCK), heads, 1), {"pairs": pairs, "n_tiles": n_tiles, "tile_mask": tile_mask}
    options = _options({"BLOCK": BLOCK}, 4)
    launch(ranked, grid, {"Tiles": tiles, "Counts": counts, "Ranks": ranks}, sizes, options)
    ends = counts.cumsum(-1, dtype=torch.int32)
    named: Tensors = {"Tiles": tiles, "Ends": ends, "Counts": counts, "Ranks": ranks, "Order": order}
    launch(ordered, grid, named, sizes, options)
    return order


# A launch is remembered under the very same options.
_KNOWN: dict[tuple[Any, ...], Options] = {}


def _options(named: dict[str, Any], warps: int) -> Options:
    options = (*named.items(), ("num_warps", warps))
    return _KNOWN.setdefault(options, options)
