"""Who sees which keys, what values there are, and the definition that effective attention is measured by."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.attention import repeat_groups


def seen_by(shape, key_visible=None, causal=False, offset=0, mask=None) -> Tensor:
    seen = torch.ones(shape, dtype=torch.bool)
    if key_visible is not None:
        seen &= key_visible[:, None, None]
    if causal:
        seen &= torch.ones(shape[2:], dtype=torch.bool).tril(offset)
    return seen if mask is None else seen & mask


def definition(w: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """W_perp and rank by one SVD per row, in float64."""
    v = repeat_groups(v, w.shape[1] // v.shape[1]).double()
    out, rank = torch.zeros_like(w, dtype=torch.float64), torch.zeros(w.shape[:3], dtype=torch.long)
    for b, h, q in seen.any(-1).nonzero().tolist():
        keys = seen[b, h, q]
        part = v[b, h][keys]
        rtol = 2e-6 if w.dtype == torch.float32 else 1e-13
        out[b, h, q, keys] = w[b, h, q][keys].double() @ part @ torch.linalg.pinv(part, rtol=rtol)
        rank[b, h, q] = torch.linalg.matrix_rank(part, rtol=rtol)
    return out, rank


def padding(b: int, k: int) -> Tensor:
    """Left, right and inner padding in one batch."""
    seen = torch.ones(b, k, dtype=torch.bool)
    seen[0, : k // 3] = False
    seen[1, -k // 4 :] = False
    seen[1, k // 2] = False
    return seen


WINDOW = (torch.ones(1, 1, 43, 43).tril() * torch.ones(43, 43).triu(-12)).bool()


CASES = {
    "encoder": ((2, 4, 5, 37, 7), {}),
    "cross padded": ((2, 4, 5, 37, 7), {"key_visible": padding(2, 37)}),
    "no more keys than dimensions": ((2, 4, 5, 6, 7), {}),
    "one token": ((2, 4, 1, 1, 7), {}),
    "some items short": ((2, 4, 5, 37, 29), {"key_visible": padding(2, 37)}),
    "causal": ((1, 2, 149, 149, 11), {"causal": True}),
    "causal padded": ((2, 2, 149, 149, 11), {"causal": True, "key_visible": padding(2, 149)}),
    "causal decoding": ((2, 4, 3, 149, 11), {"causal": True, "offset": 146, "key_visible": padding(2, 149)}),
    "causal, keys ahead of all": ((1, 2, 19, 83, 5), {"causal": True, "offset": 2}),
    "causal, queries before all keys": ((1, 2, 83, 19, 5), {"causal": True, "offset": -3}),
    "window": ((2, 4, 43, 43, 7), {"mask": WINDOW}),
    "mask per head": ((2, 4, 5, 43, 7), {"mask": torch.arange(2 * 4 * 5 * 43).view(2, 4, 5, 43) % 3 > 0}),
    "mask and padding and causal": ((2, 4, 43, 43, 7), {"mask": WINDOW, "causal": True, "key_visible": padding(2, 43)}),
}


VALUES = {
    "plain": lambda v: v,
    "repeated tokens": lambda v: v[:, :, torch.arange(v.shape[2]) % 13 // torch.arange(1, v.shape[2] + 1).clamp(max=2)],
    "low rank": lambda v: v[..., :2] @ torch.randn(2, v.shape[-1]),
    "ill-conditioned": lambda v: v * 10.0 ** -torch.linspace(0, 4, v.shape[-1]),
}
