"""The largest scores of rows from the few bins that hold them: ``statistics_largest_triton``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnlab.kernels.launching import Numbers, Options, Tensors, launch
from attnlab.kernels.statistics_largest_triton import chosen, ordered, scored
from attnlab.kernels.statistics_tiles import Bins
from attnlab.shapes import Float, Int

__all__ = ["PAIR_TILE", "PairTile", "Scored", "largest_in_bins", "pair_tile"]

# Candidates held at once, 32 MiB of them, which a large cache holds.
MOST_CANDIDATES = 1 << 23
# Pairs of a program that orders them, and rows of one that chooses, a thread each.
BLOCK, CHOSEN_ROWS = 1024, 32


class PairTile(NamedTuple):
    """Pairs that are scored at once, warps, stages, and the most registers of a thread (0: as the compiler likes)."""

    pairs: int
    warps: int
    stages: int
    registers: int = 0


# Of small bins and narrow heads, twice as many programs are at work at once.
PAIR_TILE, SMALL_PAIR_TILE = PairTile(64, 4, 1, 128), PairTile(64, 4, 1, 64)
SMALL_BIN, NARROW = 32, 64


class Scored(NamedTuple):
    """What scores are made of: tensors by name, their strides and sizes, flags and widths of the kernel."""

    tensors: Tensors
    numbers: Numbers
    flags: dict[str, Any]


def largest_in_bins(
    made_of: Scored,
    bins: Bins,
    kept: Float[Tensor, "r b h q n"],
    places: Int[Tensor, "r b h q n"],
    counts: Int[Tensor, "r b h t"],
    lse: Float[Tensor, "b h q"],
    log_norms: Float[Tensor, "b g k"],
) -> None:
    """The n largest weights of each row, from its n bins with the largest scores, and their keys.

    They take the place of the bins that are ``kept``, and of the rank of each row among those of a bin, which
    ``counts`` counts.
    In a second ranking weights are times lengths of values.
    """
    rankings, b, h, n_q, n = kept.shape
    heads, lists, n_bins = b * h, rankings * b * h, counts.shape[-1] - 1
    numbers: Numbers = {"n_bins": n_bins, "bin_mask": triton.next_power_of_2(n_bins) - 1}
    ends = counts.cumsum(-1, dtype=torch.int32)
    # As many lists at once as there is room for, and about as many each time.
    at_once = triton.cdiv(lists, triton.cdiv(lists, max(1, MOST_CANDIDATES // (n_q * n * n))))
    candidates = torch.empty(at_once, n_q, n, n, device=kept.device)
    order = torch.empty(at_once, n_q * n, dtype=torch.int64, device=kept.device)
    sizes, tile = {"KEYS": bins.keys, "PARTS": bins.parts, "N": n}, pair_tile(bins.keys, made_of.flags["D"])
    flags = made_of.flags | {"NORM": rankings > 1, "BM": tile.pairs}
    for first in range(0, lists, at_once):
        count = min(at_once, lists - first)
        launch(
            ordered,
            (triton.cdiv(n_q * n, BLOCK), count, 1),
            {"Bins": kept, "Ends": ends, "Counts": counts, "Ranks": places, "Order": order},
            {"pairs": n_q * n, **numbers, "first_list": first},
            _options({"BLOCK": BLOCK}, 4),
        )
        launch(
            scored,
            (triton.cdiv(n_q * n, tile.pairs), count, 1),
            made_of.tensors | {"LogNorms": log_norms, "Bins": kept, "Order": order, "Candidates": candidates},
            made_of.numbers | {"heads": heads, **numbers, "first_list": first},
            _options(flags | sizes, tile.warps, tile.stages, tile.registers),
        )
        launch(
            chosen,
            (triton.cdiv(n_q, CHOSEN_ROWS), count, 1),
            {"Candidates": candidates, "Lse": lse, "Bins": kept, "Places": places},
            {"n_q": n_q, "heads": heads, "scale": made_of.numbers["scale"], **numbers, "first_list": first},
            _options({"BM": CHOSEN_ROWS} | sizes, max(1, CHOSEN_ROWS // 32)),
        )


def pair_tile(keys: int, width: int) -> PairTile:
    """How pairs of rows and bins of so many keys are scored, by heads of this width."""
    return SMALL_PAIR_TILE if keys <= SMALL_BIN and width <= NARROW else PAIR_TILE


# A launch is remembered under the very same options.
_KNOWN: dict[tuple[Any, ...], Options] = {}


def _options(named: dict[str, Any], warps: int, stages: int = 1, registers: int = 0) -> Options:
    how = {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})
    options = tuple({**named, **how}.items())
    return _KNOWN.setdefault(options, options)
