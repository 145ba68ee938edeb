"""What calls that continue a past have in common: where their keys stand, and what such a call may bring."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.attention import AttentionCall
from attnlab.shapes import Int

__all__ = ["check_batch", "check_new_tokens", "numbered_keys"]


def check_batch(call: AttentionCall, batch: int) -> None:
    """Raise a ValueError unless the call is for as many rows as the past."""
    if call.q.shape[0] != batch:
        raise ValueError(f"this cache is for a batch of {batch}, the call has {call.q.shape[0]}; make a new one")


def check_new_tokens(call: AttentionCall) -> None:
    """Raise a ValueError unless the call's queries and keys are those of new tokens alone."""
    n_q, n_k = call.sizes[2:]
    if call.offset or (call.causal and n_q != n_k):
        raise ValueError(
            f"a call that continues a memory brings new tokens only: as many queries ({n_q}) as keys ({n_k}) and "
            f"offset=0, got offset={call.offset}"
        )


def numbered_keys(call: AttentionCall) -> tuple[Int[Tensor, "b k"], Int[Tensor, "b q"]]:
    """The place of each key among the visible ones, and of the newest key that each query sees; -1 if it sees none."""
    b, _, n_q, n_k = call.sizes
    seen = torch.ones(b, n_k, dtype=torch.bool, device=call.q.device) if call.key_visible is None else call.key_visible
    places = seen.cumsum(-1) - 1
    counts = torch.cat([places.new_full((b, 1), -1), places], 1)
    last = torch.full((n_q,), n_k, device=call.q.device)
    if call.causal:
        last = (torch.arange(n_q, device=call.q.device) + call.offset + 1).clamp(0, n_k)
    return places, counts[:, last]
