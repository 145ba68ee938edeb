"""What memories with a past have in common: where keys stand, where a window begins, what a call may bring."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism
from attnlab.shapes import Bool, Int
from attnlab.sizes import check_bytes

__all__ = [
    "bytes_of",
    "check_batch",
    "check_memory",
    "check_new_tokens",
    "check_window",
    "first_exact",
    "fitted_window",
    "numbered_keys",
    "visible_first",
]


@runtime_checkable
class _Windowed(Protocol):
    """What says how tokens leave a window."""

    @property
    def window(self) -> int: ...

    @property
    def block(self) -> int: ...


def check_window(window: int, block: int) -> None:
    """Raise a ValueError unless tokens can leave a window of this size a block at a time."""
    if window % block or (window == 0 and block > 1):
        raise ValueError(
            f"tokens leave the window block={block} at a time, so it must be a multiple of that, got window={window}; "
            "give another of them (block=1 goes with every window)"
        )


def fitted_window(window: int, block: int, longest: int) -> tuple[int, int]:
    """(window, block) for at most ``longest`` places: a block longer than all keys never leaves."""
    block = min(block, max(1, longest))
    return min(window, -(-longest // block) * block), block


def first_exact(newest: Int[Tensor, "*b"], rules: _Windowed) -> Int[Tensor, "*b"]:
    """s(p): where the window begins of a query whose newest key has place p; earlier keys are in a memory, or sinks."""
    return (newest // rules.block * rules.block - (rules.window - rules.block)).clamp(min=0)


def visible_first(key_visible: Bool[Tensor, "b k"]) -> Int[Tensor, "b k"]:
    """Visible keys first, in their order: then a key's number is its place."""
    return (~key_visible).to(torch.int8).argsort(dim=-1, stable=True)


def check_memory(mechanism: Mechanism, call: AttentionCall, batch: int) -> None:
    """Raise a ValueError if the device cannot hold the memory that this call begins."""
    (_, g, n, d), e = call.k.shape, call.v.shape[-1]
    held = batch * g * mechanism.cache_bytes(length=n, d=d, e=e, dtype=call.k.dtype)
    check_bytes(mechanism, held, instead="make it smaller", device=call.q.device)


def bytes_of(*tensors: Tensor | None) -> int:
    """The bytes of those tensors that there are."""
    return sum(t.nbytes for t in tensors if t is not None)


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
