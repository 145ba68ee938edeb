"""Where keys and queries stand in a text, padding left out."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.attention import AttentionCall
from attnlab.shapes import Int

__all__ = ["places"]


def places(call: AttentionCall) -> tuple[Int[Tensor, "b k"], Int[Tensor, "b q"]]:
    """The place of each key among the visible keys, and of each query: that of the key in its own row.

    >>> q = k = v = torch.zeros(1, 1, 3, 4)
    >>> places(AttentionCall(q, k, v, key_visible=torch.tensor([[False, True, True]])))[0]
    tensor([[-1,  0,  1]])
    """
    b, _, n_q, n_k = call.sizes
    if call.key_visible is None:
        of_keys = torch.arange(n_k, device=call.q.device).expand(b, -1)
    else:
        of_keys = call.key_visible.cumsum(-1) - 1
    own = torch.arange(n_q, device=call.q.device) + call.offset
    inside = own.clamp(0, max(n_k - 1, 0))
    of_queries = of_keys[:, inside] + (own - inside) if n_k else own.expand(b, -1)
    return of_keys, of_queries
