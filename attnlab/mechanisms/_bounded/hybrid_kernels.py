"""``abc-hybrid`` on a GPU, by the kernels of ``attnlab.kernels.hybrid``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, hide_unseen
from attnlab.mechanisms._device import host_may_read, kernels_take, no_autocast
from attnlab.shapes import Bool, Float, Int

if TYPE_CHECKING:
    from attnlab.mechanisms._bounded.hybrid_cache import HybridMechanism, HybridState

__all__ = ["attend_by_kernel", "left_padding", "step_by_kernel"]


def attend_by_kernel(mech: HybridMechanism, call: AttentionCall) -> Float[Tensor, "b h q e"] | None:
    """The output of a call that has all keys: causal self-attention, padded on the left if at all; else None."""
    n_q, n_k = call.sizes[2:]
    if not _served(mech, call) or not call.causal or call.offset or n_q != n_k or n_q == 0:
        return None
    starts = None
    if call.key_visible is not None:
        starts = left_padding(call.key_visible)
        if starts is None:
            return None
    from attnlab.kernels.hybrid import hybrid_attention

    call = hide_unseen(call)
    with no_autocast(call.q):
        log = mech.log_alpha(call)
    return hybrid_attention(
        call.q, call.k, call.v, log, window=_window(mech, n_k), block=mech.block, sinks=mech.sinks, mass=mech.mass,
        scale=call.softmax_scale, starts=starts,
    )  # fmt: skip


def step_by_kernel(mech: HybridMechanism, call: AttentionCall, state: HybridState) -> Float[Tensor, "b h 1 e"] | None:
    """The output for one more token, which ``state`` takes in, in place; None where no kernel does it."""
    kept = state.tensors()
    if torch.is_grad_enabled() or call.sizes[2:] != (1, 1) or not _served(mech, call):
        return None
    if call.q.dtype != state.ring.k.dtype or not all(t.is_contiguous() for t in kept):
        return None
    from attnlab.kernels.hybrid import hybrid_step

    control, log = mech.control_of_keys(call), None
    if not mech.by_key:
        with no_autocast(call.q):
            log = mech.log_alpha(call)
    return hybrid_step(
        call.q, call.k, call.v, log, kept, control=control, block=mech.block, mass=mech.mass, scale=call.softmax_scale,
        key_visible=call.key_visible,
    )  # fmt: skip


def left_padding(key_visible: Bool[Tensor, "b k"]) -> Int[Tensor, " b"] | None:
    """How many keys of each row are hidden, if those come first in every row; else None. Waits for a GPU."""
    if not host_may_read(key_visible):
        return None
    starts = key_visible.shape[1] - key_visible.sum(-1)
    padded = torch.arange(key_visible.shape[1], device=starts.device) >= starts[:, None]
    return starts if torch.equal(padded, key_visible) else None


def _served(mech: HybridMechanism, call: AttentionCall) -> bool:
    """Whether the kernels are made for this mechanism and these sizes."""
    if not kernels_take(call.q) or call.k.shape[0] == 0:
        return False
    from attnlab.kernels.hybrid import MOST_ROWS, supports

    if call.k.shape[0] * call.k.shape[1] > MOST_ROWS:
        return False
    sizes = {"slots": mech.slots, "window": mech.window, "block": mech.block, "sinks": mech.sinks}
    return supports(call.q.shape[-1], call.v.shape[-1], call.q.dtype, **sizes)


def _window(mech: HybridMechanism, longest: int) -> int:
    """The window, or as much of it as there are keys: the kernels' tiles cover it all."""
    return min(mech.window, -(-longest // mech.block) * mech.block)
