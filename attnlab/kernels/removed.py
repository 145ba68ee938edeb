"""What effective attention removes of the rows of a causal map, from outputs and values.

The Gram matrices of every prefix's end are sums over blocks in float64; a program inverts that of its block and takes
key after key out of it. For half-precision values that is done in float32, in coordinates that make the Gram matrix of
the whole text the identity, and again in float64 for the few blocks where float32 is not enough. Heads in which that is
in doubt, too, are named, and nothing is said of their rows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from attnlab.kernels.launching import Options, Tensors, launch
from attnlab.kernels.removed_triton import factors, shares
from attnlab.shapes import Bool, Float, Int

__all__ = ["WIDEST", "Prefixes", "prefixes", "removed_shares"]

WIDEST = 128
# Rows of a program: as few as fill the device once, since a program goes from row to row. Blocks that float32 was not
# enough for are few, and are cut into parts of CAREFUL_ROWS.
MOST_ROWS, FEWEST_ROWS, CAREFUL_ROWS = 128, 16, 16
PROGRAMS = 1024
# Numbers of values that are widened to float64 at once, 64 MiB of them.
MOST_WIDENED = 1 << 23
# Keys of a piece of a long sum.
PIECE = 512
# A pivot is the share of a direction that is new in it; from here on enough digits are left.
SAFE_PIVOT = {torch.float32: 1e-2, torch.float64: 1e-7}
# The trace of the inverse over the width, which is 1 for an identity, up to which float32 is enough.
SAFE_TRACE = 8.0
# Warps by the width: in float32 the inverse of a narrow head fits into the registers of one.
WARPS = {torch.float32: {64: 1, 128: 4}, torch.float64: {64: 4, 128: 8}}


class Prefixes(NamedTuple):
    """What shares need of values: for half precision these in coordinates in which V^T V is the identity."""

    v: Float[Tensor, "b g k e"]
    # The matrix that outputs are to be multiplied by, too; None where values are as they were.
    whiten: Float[Tensor, "b g e e"] | None
    independent: Int[Tensor, "b g"]
    # V^T V at the end of each block of ``rows`` queries.
    grams: Float[Tensor, "b g c e e"]
    counts: Int[Tensor, "b q"] | None
    rows: int
    n_q: int
    offset: int


def prefixes(
    v: Float[Tensor, "b g k e"],
    first: tuple[Float[Tensor, "b g n e"], Bool[Tensor, "b 1 n"] | None],
    counts: Int[Tensor, "b q"] | None,
    n_q: int,
    *,
    offset: int,
    independent: float,
) -> Prefixes:
    """What shares need of values alone; ``counts`` are the keys that queries see, where some are hidden.

    ``first`` are the first e visible values, and which of them exist (None: all): linearly independent if their
    condition number is below ``independent``.
    """
    b, g = v.shape[:2]
    with torch.cuda.device_of(v):
        wide = v.float()
        whiten, free = _factors(wide, *first, independent)
        half = v.dtype != torch.float32
        v = wide @ whiten if half else v
        v = v if v.stride(-1) == 1 else v.contiguous()
        rows = min(max(triton.next_power_of_2(triton.cdiv(b * g * n_q, PROGRAMS)), FEWEST_ROWS), MOST_ROWS)
        counts = None if counts is None else counts.int().contiguous()
        return Prefixes(
            v, whiten if half else None, free, _grams(v, n_q, offset, rows), counts, rows, n_q, offset
        )  # fmt: skip


def removed_shares(
    output: Float[Tensor, "b h q e"], squares: Float[Tensor, "b h q"], of: Prefixes
) -> tuple[Float[Tensor, "b h q"], Int[Tensor, "b g"]]:
    """(shares, 1 where a head's are in doubt)."""
    (b, h, n_q, e), (g, n_k), v = output.shape, of.v.shape[1:3], of.v
    with torch.cuda.device_of(v):
        kinds = [torch.float64]
        if of.whiten is not None:
            kinds = [torch.float32, torch.float64]
            output = _moved(output, of.whiten)
        output = output if output.stride(-1) == 1 else output.contiguous()
        blocks = of.grams.shape[2]
        out = torch.empty(b, h, n_q, device=v.device)
        doubtful = torch.zeros(b, g, dtype=torch.int32, device=v.device)
        flags = torch.ones(b, g, blocks, dtype=torch.int32, device=v.device)
        strides = [*output.stride()[:3], *v.stride()[:3]]
        numbers = dict(zip(("ob", "oh", "on", "vb", "vh", "vn"), strides, strict=True))
        numbers |= {"H": h, "G": g, "n_q": n_q, "n_k": n_k, "offset": of.offset, "groups": h // g}
        for kind in kinds:
            split = 1 if kind == kinds[0] else max(1, of.rows // CAREFUL_ROWS)
            launch(
                shares,
                (blocks * split, b * g, 1),
                {
                    "Output": output, "V": v, "Grams": of.grams, "Squares": squares.contiguous(),
                    "Counts": flags if of.counts is None else of.counts, "Independent": of.independent,
                    "Flags": flags, "Shares": out, "Doubtful": doubtful,
                },
                numbers | {"safe_pivot": SAFE_PIVOT[kind], "safe_trace": SAFE_TRACE * e},
                _options(kind, of.counts is not None, e, of.rows, split),
            )  # fmt: skip
    return out, doubtful


@functools.cache
def _options(kind: torch.dtype, padded: bool, e: int, rows: int, split: int) -> Options:
    width = max(16, triton.next_power_of_2(e))
    warps = next(n for widest, n in WARPS[kind].items() if width <= widest)
    named = {"DOUBLE": kind == torch.float64, "PADDED": padded, "E": e, "BE": width, "C": rows, "SPLIT": split}
    return tuple({**named, "num_warps": warps}.items())


@functools.cache
def _factor_options(e: int) -> Options:
    width = max(16, triton.next_power_of_2(e))
    return (("E", e), ("BE", width), ("num_warps", 8 if width <= 64 else 16))


def _factors(
    v: Float[Tensor, "b g k e"], first: Float[Tensor, "b g n e"], exists: Bool[Tensor, "b 1 n"] | None, limit: float
) -> tuple[Float[Tensor, "b g e e"], Int[Tensor, "b g"]]:
    """(a matrix R that makes (V R)^T V R the identity, whether the first values of each head are independent)."""
    (b, g, _, e), n = v.shape, first.shape[2]
    matrices = torch.empty(2, b, g, e, e, dtype=torch.float64, device=v.device)
    matrices[0] = _whole_gram(v)
    x = (first if exists is None else first.masked_fill(~exists[..., None], 0)).double()
    x = torch.nn.functional.pad(x, (0, 0, 0, e - n)) if n < e else x
    torch.matmul(x, x.mT, out=matrices[1])
    diagonal = matrices[1].diagonal(dim1=-2, dim2=-1)
    size = diagonal.sum(-1)
    if exists is not None or n < e:
        # A key that is missing gets a direction of its own, of the size of the others.
        size = size.clamp(min=torch.finfo(torch.float64).tiny)
        exists = first.new_ones(b, 1, n, dtype=torch.bool) if exists is None else exists
        diagonal.add_(torch.nn.functional.pad(~exists, (0, e - n), value=True) * size[..., None])
    whiten = torch.empty(b, g, e, e, device=v.device)
    free = torch.empty(b, g, dtype=torch.int32, device=v.device)
    tensors: Tensors = {"Matrices": matrices, "Sizes": size, "Whiten": whiten, "Independent": free}
    launch(factors, (2 * b * g, 1, 1), tensors, {"heads": b * g, "limit": limit}, _factor_options(e))
    return whiten, free


def _whole_gram(v: Float[Tensor, "b g k e"]) -> Float[Tensor, "b g e e"]:
    """V^T V of each head, piece by piece: as one product it is one small tile, which a single program goes through."""
    cut = v.shape[2] // PIECE * PIECE
    pieces = v[:, :, :cut].unflatten(2, (cut // PIECE, PIECE))
    rest = v[:, :, cut:].double()
    return (pieces.mT @ pieces).sum(2, dtype=torch.float64) + rest.mT @ rest


def _moved(output: Float[Tensor, "b h q e"], whiten: Float[Tensor, "b g e e"]) -> Float[Tensor, "b h q e"]:
    """Outputs times the matrix of their values, which changes no share."""
    b, h = output.shape[:2]
    moved = torch.empty(output.shape, device=output.device)
    by_head = whiten.repeat_interleave(h // whiten.shape[1], 1, output_size=h)
    # Text by text, since a product of all would copy outputs that are laid out as (b, n, h, e).
    for at in range(b):
        torch.bmm(output[at], by_head[at], out=moved[at])
    return moved


def _grams(v: Float[Tensor, "b g k e"], n_q: int, offset: int, rows: int) -> Float[Tensor, "b g c e e"]:
    """V^T V over the keys that the last of each ``rows`` queries sees; a few heads at once are widened to float64."""
    (b, g, n_k, e), blocks = v.shape, triton.cdiv(n_q, rows)
    grams = torch.empty(b, g, blocks, e, e, dtype=torch.float64, device=v.device)
    # The keys that queries see newly, from the first to the last query; the others come before.
    first, last = min(max(offset, 0), n_k), min(max(n_q + offset, 0), n_k)
    before = max(-offset, 0)
    after = blocks * rows - before - (last - first)
    heads, at_once = v.flatten(0, 1), max(1, MOST_WIDENED // (blocks * rows * e))
    for at in range(0, b * g, at_once):
        some = heads[at : at + at_once]
        own = some[:, first:last].double()
        if before or after:
            own = torch.nn.functional.pad(own, (0, 0, before, after))
        own = own.reshape(-1, rows, e)
        gram = grams.flatten(0, 1)[at : at + at_once]
        torch.bmm(own.mT, own, out=gram.flatten(0, 1))
        if first:
            old = some[:, :first].double()
            gram[:, 0] += old.mT @ old
    return grams.cumsum_(2)
