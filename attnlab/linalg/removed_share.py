"""The share of each row of W that effective attention removes, from outputs and values instead of W."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.linalg.prefix import prefix_squares, visible_counts
from attnlab.linalg.projection import column_basis, first_visible, independence_limit
from attnlab.shapes import Bool, Float

__all__ = ["removed_share_of_rows"]


def removed_share_of_rows(
    output: Float[Tensor, "b h q e"],
    squares: Float[Tensor, "b h q"],
    v: Float[Tensor, "b g k e"],
    *,
    key_visible: Bool[Tensor, "b k"] | None,
    causal: bool,
    offset: int,
) -> Float[Tensor, "b h q"]:
    """1 - |w_perp|^2 / |w|^2 of each row w with w V = o and |w|^2 = ``squares``, V the values that its query sees.

    w_perp = o (V^T V)^+ V^T has |w_perp|^2 = o (V^T V)^+ o^T. Where a query sees no more keys than V has rank, w_perp
    is w and the share is zero. Rounding in ``output`` is amplified by the condition of V, so it comes in at least
    float32. Values are zero at keys that no query sees.

    >>> v = torch.tensor([[[[1.0], [1.0], [2.0]]]])
    >>> w = torch.tensor([[[[0.5, 0.3, 0.2]]]])
    >>> share = removed_share_of_rows(w @ v, w.square().sum(-1), v, key_visible=None, causal=False, offset=0)
    >>> share.round(decimals=4)
    tensor([[[0.3684]]])
    """
    groups = output.shape[1] // v.shape[1]
    known, doubtful = None, [True] * v.shape[1]
    if causal and _kernel_serves(output, v):
        known, in_doubt = _by_kernel(output, squares, v, key_visible, offset)
        doubtful = in_doubt.any(0).tolist()
        if not any(doubtful):
            return known
    shares = []
    # One key/value head at a time: the rows are widened to float64.
    for g in range(v.shape[1]):
        heads = slice(g * groups, (g + 1) * groups)
        if known is not None and not doubtful[g]:
            shares.append(known[:, heads])
            continue
        kept, trivial = _kept(output[:, None, heads], v[:, g : g + 1], key_visible, causal, offset)
        whole = squares[:, heads]
        share = 1 - kept / whole.masked_fill(whole == 0, 1)
        shares.append(share.clamp(0, 1).masked_fill(trivial | (whole == 0), 0).to(squares.dtype))
    return torch.cat(shares, 1)


def _kernel_serves(output: Tensor, v: Tensor) -> bool:
    if not v.is_cuda or output.dtype != torch.float32 or v.dtype == torch.float64:
        return False
    from attnlab.kernels import AVAILABLE

    if not AVAILABLE:
        return False
    from attnlab.kernels.removed import WIDEST

    return v.shape[-1] <= WIDEST and v.shape[2] > 0 and output.shape[2] > 0


def _by_kernel(
    output: Tensor, squares: Tensor, v: Tensor, key_visible: Tensor | None, offset: int
) -> tuple[Float[Tensor, "b h q"], Bool[Tensor, "b g"]]:
    """(shares, heads whose shares are in doubt)."""
    from attnlab.kernels.removed import removed_shares

    e, counts = v.shape[-1], None
    if key_visible is None:
        first, exists = v[:, :, :e], torch.ones_like(v[:, :1, :e, 0], dtype=torch.bool)
    else:
        first, exists, _ = first_visible(v, key_visible[:, None], e)
        counts = visible_counts(key_visible, output.shape[2], offset)[1]
    limit = independence_limit(v.dtype, max(first.shape[2:]))
    shares, doubtful = removed_shares(output, squares, v, (first, exists), counts, offset=offset, independent=limit)
    return shares, doubtful > 0


def _kept(
    o: Float[Tensor, "b 1 r q e"], v: Float[Tensor, "b 1 k e"], key_visible: Tensor | None, causal: bool, offset: int
) -> tuple[Float[Tensor, "b r q"], Bool[Tensor, "b 1 q"]]:
    """(|w_perp|^2 of each row, whether w_perp is w) of the query heads that read one key/value head."""
    if causal and v.shape[2] and o.shape[3]:
        squares, trivial = prefix_squares(o, v, key_visible, offset)
        return squares[:, 0], trivial
    basis = column_basis(v, None if key_visible is None else key_visible[:, None])
    return (o.double() @ basis.whiten[:, :, None]).square().sum(-1)[:, 0], basis.trivial[..., None]
