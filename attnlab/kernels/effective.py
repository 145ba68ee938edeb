"""Effective attention of many heads in two kernels, where all queries of an input see the same keys.

One program per head makes the Gram matrix of its values, inverts its Cholesky factor in registers and writes an
orthonormal basis, all in float64; another projects its W on it, with the identity's residual and the share that is
removed on the way. Nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.kernels.effective_triton import basis, project
from attnlab.shapes import Float, Int

__all__ = ["WIDEST", "project_heads"]

# Columns of V that the factorisation holds in registers.
WIDEST = 64
# Keys of a tile and warps of the basis; keys of a tile, and rows and warps of the projection of short and long W.
BASIS = (16, 2)
PROJECTION = (32, (64, 4), (128, 8))


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
    keys, warps = BASIS
    basis[(n * g,)](
        v, seen, order, count, columns, conditions, g, inputs, *at,
        PADDED=padded, H=half, BK=keys, num_warps=warps, num_stages=1,
    )  # fmt: skip
    keys, short, long = PROJECTION
    rows, warps = short if n_q <= short[0] else long
    project[(n * h,)](
        w, columns, v, w if output is None else output.contiguous(), seen, count, conditions, found, stats,
        h, h // g, inputs, n_q, *at, safe, independent,
        PADDED=padded, KNOWN=output is not None, E=2 * half, BM=rows, BK=keys, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return found, stats
