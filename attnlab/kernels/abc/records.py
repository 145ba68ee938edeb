"""The records that the passes hand to each other: inputs, states, and what the forward pass saves for the backward."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnlab.kernels.abc.plan import TilePlan
from attnlab.kernels.abc.recorded_calls import Layout, bytes_before, bytes_of

__all__ = [
    "BufferLayout",
    "Inputs",
    "Saved",
    "State",
    "StateGradients",
    "Weights",
    "buffer_layout",
    "call_key",
    "empty_state",
    "known_buffer_layout",
    "mask_stride",
    "strides",
]

Shape = Sequence[int]
# The kernels' names of strides; o is the output or its gradient, d the gradient of q.
STRIDES = {name: (f"s{name}b", f"s{name}h", f"s{name}t") for name in "qkvsod"}


class Inputs(NamedTuple):
    """The tensors of a call; ``first_k``, ``first_v``, ``first_z`` are the memory before the first key."""

    q: Tensor
    k: Tensor
    v: Tensor
    control: Tensor
    key_visible: Tensor | None = None
    first_k: Tensor | None = None
    first_v: Tensor | None = None
    first_z: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def first(self) -> State | None:
        """The memory before the first key, if there is one."""
        if self.first_k is None or self.first_v is None or self.first_z is None:
            return None
        return State(self.first_k, self.first_v, self.first_z)


class State(NamedTuple):
    """The memory: averages of keys and values for each slot (K~ and V~), and the logarithms of their weights."""

    k: Tensor
    v: Tensor
    z: Tensor


class StateGradients(NamedTuple):
    """Gradients of a state; None where there is none."""

    k: Tensor | None
    v: Tensor | None
    z: Tensor | None

    @property
    def missing(self) -> bool:
        """Whether there are none at all."""
        return self.k is None and self.v is None and self.z is None


class Weights(NamedTuple):
    """What ``weigh_logits`` writes for ``write_states``."""

    # exp(s - top) for each token and slot
    weights: Tensor
    # for each chunk and slot: top, the largest logit, and the sum of weights
    top_logits: Tensor
    weight_sums: Tensor


class Saved(NamedTuple):
    """What writing and reading the memory leave in a buffer: reading needs it, and the backward pass does again.

    Without ``causal`` there is one state for each sequence with its z, and the last three are empty.
    """

    # K~ and V~ before each chunk
    states: Tensor
    # what rounding takes of them, and the largest logit of each slot, if the plan has low parts
    low_parts: Tensor
    peak_logits: Tensor
    # z before and after each chunk
    z_before: Tensor
    z_after: Tensor
    # IS_WIDE and KEYS_MAY_FILL of each chunk
    chunk_flags: Tensor
    # K~_t q_t for each query and slot
    scores: Tensor


class BufferLayout(NamedTuple):
    """One buffer of ``size`` bytes for both: ``weights`` begin at ``weights_at``, where scores do.

    Scores are written when weights are not needed any more.
    """

    saved: Layout
    weights: Layout
    weights_at: int
    size: int


def buffer_layout(
    q: Shape, control: Shape, plan: TilePlan, chunks: int, sequences: int, causal: bool, train: bool
) -> BufferLayout:  # fmt: skip
    """The fields of ``Saved`` and ``Weights``, for the shapes of q and control."""
    (b, h, n_q, d), (_, g, n_k, n) = q, control
    states, own = (chunks, chunks) if causal else (sequences, 0)
    saved: Layout = {
        "states": ((states, g, 2, n, d), plan.state_dtype),
        "low_parts": ((states if plan.low_parts else 0, g, 2, n, d), plan.state_dtype),
        "peak_logits": ((own if plan.low_parts else 0, g, n), torch.float32),
        "z_before": ((states, g, n), plan.full_dtype),
        "z_after": ((own, g, n), plan.full_dtype),
        "chunk_flags": ((own, g), torch.int32),
        "scores": ((b, h, n_q if causal and train else 0, n), plan.full_dtype),
    }
    weights: Layout = {
        "weights": ((b, g, n_k, n), plan.weight_dtype),
        "top_logits": ((chunks, g, n), torch.float32),
        "weight_sums": ((chunks, g, n), plan.full_dtype),
    }
    weights_at = bytes_before("scores", saved)
    return BufferLayout(saved, weights, weights_at, max(bytes_of(saved), bytes_of(weights, weights_at)))


known_buffer_layout = lru_cache(maxsize=4096)(buffer_layout)


def empty_state(rows: int, heads: int, slots: int, d: int, device: torch.device) -> State:
    """Uninitialised memory for a state."""
    k = torch.empty((rows, heads, slots, d), dtype=torch.float32, device=device)
    return State(k, torch.empty_like(k), torch.empty((rows, heads, slots), dtype=torch.float32, device=device))


def call_key(inputs: Inputs, causal: bool, scale: float, train: bool) -> Hashable:
    """All that the launches of a call depend on."""
    q, k, v, s, *extras = inputs
    return (
        causal, scale, train, q.device, q.shape, k.shape, v.shape, s.shape, q.stride(), k.stride(), v.stride(),
        s.stride(), q.dtype, k.dtype, v.dtype, s.dtype,
        *[None if t is None else (t.shape, t.stride(), t.dtype) for t in extras],
    )  # fmt: skip


def strides(**tensors: Tensor) -> dict[str, int]:
    """The strides of batch, head and token by the kernels' names: sqb, sqh and sqt for q."""
    named = {}
    for name, t in tensors.items():
        batch, head, token = STRIDES[name]
        named[batch], named[head], named[token], _ = t.stride()
    return named


def mask_stride(key_visible: Tensor | None) -> int:
    """The stride of a mask's rows; 0 without a mask."""
    return 0 if key_visible is None else key_visible.stride(0)
