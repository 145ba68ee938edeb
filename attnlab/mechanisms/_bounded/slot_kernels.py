"""Slots on a GPU, by the kernels of ``attnlab.kernels.abc``: any log alpha that is normalised when it is read."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.attention import AttentionCall
from attnlab.mechanisms._bounded.slot_memory import SlotState
from attnlab.mechanisms._device import kernels_may_run
from attnlab.shapes import Float

__all__ = ["attend_by_kernel", "kernel_serves"]


def kernel_serves(call: AttentionCall, slots: int, normalise: str) -> bool:
    """Whether the kernels take this call: its keys are new tokens, and all earlier ones are in the state."""
    n_q, n_k = call.sizes[2:]
    at_reading = normalise == "read" or (normalise == "write" and not call.causal)
    if not call.q.is_cuda or not at_reading or n_q == 0 or n_k == 0:
        return False
    if call.offset or (call.causal and n_q != n_k):
        return False
    if not kernels_may_run():
        return False
    from attnlab.kernels.abc import supports

    return supports(call.q.shape[-1], call.v.shape[-1], slots, call.q.dtype)


def attend_by_kernel(
    call: AttentionCall, log: Float[Tensor, "b g k n"], state: SlotState | None, *, in_place: bool
) -> tuple[Float[Tensor, "b h q e"], SlotState]:
    """The output of a call whose unseen keys are zero, and the memory after it.

    With ``in_place`` a single token updates ``state`` itself.
    """
    from attnlab.kernels.abc import abc_attention, abc_step

    n_q, n_k = call.sizes[2:]
    seen, scale = call.key_visible, call.softmax_scale
    if state is not None and in_place and n_q == n_k == 1 and not log.requires_grad and state.k.is_contiguous():
        memory = (state.k, state.v, state.z)
        out = abc_step(call.q, call.k, call.v, log, memory, scale=scale, key_visible=seen, count=state.count)
        return out, state
    first = None if state is None else (state.k.float(), state.v.float(), state.z.float())
    out, (k, v, z) = abc_attention(
        call.q, call.k, call.v, log, causal=call.causal, scale=scale, key_visible=seen, state=first
    )
    new = torch.full((k.shape[0],), n_k, device=k.device) if seen is None else seen.sum(-1)
    return out, SlotState(k, v, z, new if state is None else state.count + new)
