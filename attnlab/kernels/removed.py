"""What effective attention removes of the rows of a causal map, from outputs and values.

The Gram matrices of every prefix's end are sums over blocks in float64; a program inverts that of its block and takes
key after key out of it. For half-precision values that is done in float32, in coordinates that make the Gram matrix of
the whole text the identity, and again in float64 for the few blocks where float32 is not enough. Heads in which that is
in doubt, too, are named, and nothing is said of their rows.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from attnlab.kernels.launching import Options, Tensors, launch
from attnlab.kernels.removed_triton import factors, shares
from attnlab.shapes import Bool, Float, Int

__all__ = ["WIDEST", "removed_shares"]

WIDEST = 128
# Rows of a program: as few as fill the device once, since a program goes from row to row. Blocks that float32 was not
# enough for are few, and are cut into parts of CAREFUL_ROWS.
MOST_ROWS, FEWEST_ROWS, CAREFUL_ROWS = 128, 16, 16
PROGRAMS = 1024
# A pivot is the share of a direction that is new in it; from here on enough digits are left.
SAFE_PIVOT = {torch.float32: 1e-2, torch.float64: 1e-7}
# The trace of the inverse over the width, which is 1 for an identity, up to which float32 is enough.
SAFE_TRACE = 8.0
# Warps by the width: in float32 the inverse of a narrow head fits into the registers of one.
WARPS = {torch.float32: {64: 1, 128: 4}, torch.float64: {64: 4, 128: 8}}


def removed_shares(
    output: Float[Tensor, "b h q e"],
    squares: Float[Tensor, "b h q"],
    v: Float[Tensor, "b g k e"],
    first: tuple[Float[Tensor, "b g n e"], Bool[Tensor, "b 1 n"]],
    counts: Int[Tensor, "b q"] | None,
    *,
    offset: int,
    independent: float,
) -> tuple[Float[Tensor, "b h q"], Int[Tensor, "b g"]]:
    """(shares, 1 where a head's are in doubt); ``counts`` are the keys that queries see, where some are hidden.

    ``first`` are the first e visible values, and which of them exist: linearly independent if their condition number
    is below ``independent``.
    """
    (b, h, n_q, e), (g, n_k) = output.shape, v.shape[1:3]
    with torch.cuda.device_of(v):
        whiten, free = _factors(v, *first, independent)
        kinds = [torch.float64]
        if v.dtype != torch.float32:
            kinds = [torch.float32, torch.float64]
            output, v = _moved(output, v, whiten)
        output, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (output, v))
        rows = min(max(triton.next_power_of_2(triton.cdiv(b * g * n_q, PROGRAMS)), FEWEST_ROWS), MOST_ROWS)
        grams = _grams(v, n_q, offset, rows)
        out = torch.empty(b, h, n_q, device=v.device)
        doubtful = torch.zeros(b, g, dtype=torch.int32, device=v.device)
        flags = torch.ones(b, g, grams.shape[2], dtype=torch.int32, device=v.device)
        strides = [t.stride(axis) for t in (output, v) for axis in range(3)]
        numbers = dict(zip(("ob", "oh", "on", "vb", "vh", "vn"), strides, strict=True))
        numbers |= {"H": h, "G": g, "n_q": n_q, "n_k": n_k, "offset": offset, "groups": h // g}
        for kind in kinds:
            split = 1 if kind == kinds[0] else max(1, rows // CAREFUL_ROWS)
            launch(
                shares,
                (grams.shape[2] * split, b * g, 1),
                {
                    "Output": output, "V": v, "Grams": grams, "Squares": squares.contiguous(),
                    "Counts": flags if counts is None else counts.int().contiguous(), "Independent": free,
                    "Flags": flags, "Shares": out, "Doubtful": doubtful,
                },
                numbers | {"safe_pivot": SAFE_PIVOT[kind], "safe_trace": SAFE_TRACE * e},
                _options(kind, counts is not None, e, rows, split),
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
    v: Float[Tensor, "b g k e"], first: Float[Tensor, "b g n e"], exists: Bool[Tensor, "b 1 n"], limit: float
) -> tuple[Float[Tensor, "b g e e"], Int[Tensor, "b g"]]:
    """(a matrix R that makes (V R)^T V R the identity, whether the first values of each head are independent)."""
    (b, g, _, e), n = v.shape, first.shape[2]
    matrices = torch.empty(2, b, g, e, e, dtype=torch.float64, device=v.device)
    wide = v.float()
    matrices[0] = wide.mT @ wide
    x = torch.zeros(b, g, e, e, dtype=torch.float64, device=v.device)
    x[:, :, :n] = first.masked_fill(~exists[..., None], 0)
    torch.matmul(x, x.mT, out=matrices[1])
    # A key that is missing gets a direction of its own, of the size of the others.
    size = x.square().sum((-1, -2)).clamp(min=torch.finfo(torch.float64).tiny)
    missing = torch.nn.functional.pad(~exists, (0, e - n), value=True)
    matrices[1].diagonal(dim1=-2, dim2=-1).add_(missing * size[..., None])
    whiten = torch.empty(b, g, e, e, device=v.device)
    free = torch.empty(b, g, dtype=torch.int32, device=v.device)
    tensors: Tensors = {"Matrices": matrices, "Sizes": size, "Whiten": whiten, "Independent": free}
    launch(factors, (2 * b * g, 1, 1), tensors, {"heads": b * g, "limit": limit}, _factor_options(e))
    return whiten, free


def _moved(
    output: Float[Tensor, "b h q e"], v: Float[Tensor, "b g k e"], whiten: Float[Tensor, "b g e e"]
) -> tuple[Float[Tensor, "b h q e"], Float[Tensor, "b g k e"]]:
    """Outputs and values times one matrix, which changes no share."""
    b, h, n_q, e = output.shape
    moved = torch.empty(b, h, n_q, e, device=v.device)
    # Head by head, since these are not contiguous and a product of all would copy them.
    for at in range(b * h):
        torch.mm(output[at // h, at % h], whiten[at // h, at % h // (h // v.shape[1])], out=moved[at // h, at % h])
    return moved, v.float() @ whiten


def _grams(v: Float[Tensor, "b g k e"], n_q: int, offset: int, rows: int) -> Float[Tensor, "b g c e e"]:
    """V^T V over the keys that the last of each ``rows`` queries sees; one head at a time is widened to float64."""
    (b, g, n_k, e), blocks = v.shape, triton.cdiv(n_q, rows)
    grams = torch.empty(b, g, blocks, e, e, dtype=torch.float64, device=v.device)
    # The keys that queries see newly, from the first to the last query; the others come before.
    first, last = min(max(offset, 0), n_k), min(max(n_q + offset, 0), n_k)
    before = max(-offset, 0)
    for at, gram in enumerate(grams.flatten(0, 1)):
        head = v[at // g, at % g]
        own = head.new_zeros(blocks * rows, e, dtype=torch.float64)
        own[before : before + last - first] = head[first:last]
        own = own.unflatten(0, (blocks, rows))
        torch.bmm(own.mT, own, out=gram)
        if first:
            old = head[:first].double()
            gram[0] += old.mT @ old
    return grams.cumsum_(2)
