"""Effective attention of many heads in two kernels, where all queries of an input see the same keys.

One program per head makes the Gram matrix of its values, inverts its Cholesky factor in registers and writes an
orthonormal basis, all in float64; another projects its W on it, with the identity's residual and the share that is
removed on the way. Nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlab.kernels.effective_triton import basis, project
from attnlab.shapes import Float, Int

__all__ = ["WIDEST", "project_heads"]

# Columns of V that the factorisation holds in registers.
WIDEST = 64
# Keys of a tile and warps of the basis.
BASIS = (16, 2)
# Keys of a tile and stages of the projection, rows and warps for few and for many rows.
PROJECTION = (32, 1, (64, 4), (128, 8))

_compiled: dict[tuple[Any, ...], Any] = {}


def project_heads(
    w: Float[Tensor, "n h q k"],
    v: Float[Tensor, "n g k e"],
    output: Float[Tensor, "n h q e"] | None,
    visible: tuple[Int[Tensor, "b k"], Int[Tensor, " b"], Int[Tensor, "b k"]] | None,
    *,
    safe: float,
    independent: float,
) -> tuple[Float[Tensor, "n h q k"], Float[Tensor, "three n h"]]:
    """(W_perp, stats) of the items of several layers; what stands at hidden keys is not read.

    ``visible`` is which keys are visible (1) in each of b inputs, how many, and the keys with those first; n is a
    multiple of b. Stats are |W_perp V - O| / |O| (0 without ``output``), the share of |W|^2 that is gone, and whether a
    bound on the condition number of V leaves that in doubt: it must be below ``safe`` where there are more keys than
    columns, and otherwise below ``independent``, so that W_perp is W.
    """
    n, h, n_q, n_k = w.shape
    g, e = v.shape[1], v.shape[3]
    v = v.float()
    if v.stride(-1) != 1:
        v = v.contiguous()
    w = w.contiguous()
    columns = torch.empty(n, g, n_k, e, device=v.device)
    conditions = torch.empty(n, g, device=v.device)
    found, stats = torch.empty_like(w), torch.empty(3, n, h, device=w.device)
    padded, half = visible is not None, 16 if e <= 32 else 32
    seen, count, order = (conditions,) * 3 if visible is None else visible
    inputs = len(seen)
    at = (n_k, e, v.stride(0), v.stride(1), v.stride(2))
    # Triton launches on the current device, wherever its arguments lie.
    with torch.cuda.device_of(w):
        keys, warps = BASIS
        args: tuple[Any, ...] = (v, seen, order, count, columns, conditions, g, inputs, *at, padded, half, keys)
        _launch(basis, n * g, args, num_warps=warps, num_stages=1)
        keys, stages, short, long = PROJECTION
        rows, warps = short if n_q <= short[0] else long
        given = w if output is None else output.contiguous()
        args = (
            w, columns, v, given, seen, count, conditions, found, stats, h, h // g, inputs, n_q, *at, safe, independent,
            padded, output is not None, 2 * half, rows, keys,
        )  # fmt: skip
        _launch(project, n * h, args, num_warps=warps, num_stages=stages)
    return found, stats


def _launch(kernel: Any, programs: int, args: tuple[Any, ...], **options: int) -> None:
    """Launch a kernel; what Triton works out anew for every launch is remembered for arguments of the same kind."""
    kinds = tuple((a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else a for a in args)
    key = (id(kernel), programs, args[0].device.index, kinds, *options.values())
    known = _compiled.get(key)
    if known is None:
        # The interpreter compiles nothing.
        known = kernel[(programs,)](*args, **options)
        if known is not None:
            _compiled[key] = known[programs, 1, 1]
    else:
        known(*args)
