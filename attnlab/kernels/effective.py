"""Effective attention of all heads of a layer in two kernels, where all queries of an input see the same keys.

One program per head makes the Gram matrix of its values, inverts its Cholesky factor in registers and writes an
orthonormal basis, all in float64; then tiles of W are projected on it, with the identity's residual and the share that
was removed on the way. Nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from attnlab.kernels.effective_triton import basis, project
from attnlab.shapes import Float, Int

__all__ = ["WIDEST", "project_heads"]

# Columns of V that the factorisation holds in registers.
WIDEST = 64
# Keys of a tile and warps of the basis; rows, keys, warps and stages of the projection.
BASIS = (16, 4)
PROJECTION = (64, 32, 4, 1)


def project_heads(
    w: Float[Tensor, "b h q k"],
    v: Float[Tensor, "b g k e"],
    output: Float[Tensor, "b h q e"] | None,
    visible: tuple[Int[Tensor, " b"], Int[Tensor, "b k"]] | None,
) -> tuple[Float[Tensor, "b h q k"], Float[Tensor, "b g 2"], Float[Tensor, "b h parts 4"]]:
    """(W_perp, facts, sums) of weights and values that are zero at hidden keys.

    ``visible`` is how many keys an input has, and its keys with those first. Facts are |V|^2 and |L^-1|^2 with
    L L^T = V^T V: W_perp is that, or W itself where no more than e keys are visible, if they say that V is
    well-conditioned. Sums are the squares of W_perp V - O, O, W and W_perp in parts of rows, the first two zero where
    no ``output`` is given.
    """
    b, h, n_q, n_k = w.shape
    g, e = v.shape[1], v.shape[3]
    if v.stride(-1) != 1:
        v = v.contiguous()
    w, known = w.contiguous(), output is not None
    output = w if output is None else output.contiguous()
    columns = torch.empty(b, g, n_k, e, device=v.device)
    facts = torch.empty(b, g, 2, dtype=torch.float64, device=v.device)
    found = torch.empty_like(w)
    keys, warps = BASIS
    count, order = (facts, facts) if visible is None else visible
    at = (n_k, e, v.stride(0), v.stride(1), v.stride(2))
    half = 16 if e <= 32 else 32
    basis[(b * g,)](
        v, order, count, columns, facts, g, *at,
        PADDED=visible is not None, H=half, BK=keys, num_warps=warps, num_stages=1,
    )  # fmt: skip
    rows, keys, warps, stages = PROJECTION
    parts = triton.cdiv(n_q, rows)
    sums = torch.empty(b, h, parts, 4, device=w.device)
    project[(b * h, parts)](
        w, columns, v, output, found, sums, count, h, h // g, n_q, *at,
        PADDED=visible is not None, KNOWN=known, E=2 * half, BM=rows, BK=keys, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return found, facts, sums
