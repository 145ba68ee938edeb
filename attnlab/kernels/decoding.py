"""A decoded token of linear attention, and a query that reads slots to which nothing is added: one launch each."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from attnlab.kernels._linear_decode import ELU, RELU, WAVES, add_and_read, read_only
from attnlab.kernels.abc.launcher import Options, launch

__all__ = ["linear_step", "read_slots", "serves_reading", "serves_step"]

MAPS = {"elu": ELU.value, "relu": RELU.value, "waves": WAVES.value}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256
# Numbers of K~ that one program holds.
MOST = 16384
# Numbers of a tile: large, so that all loads of a program are under way at once.
TILE = 8192


def linear_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    kind: str,
    factor: float = 1.0,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    gate: tuple[Tensor, Tensor] | None = None,
    least: float = 0.0,
    key_visible: Tensor | None = None,
) -> Tensor:
    """out = phi(q) S / phi(q) z after S += phi(k) v^T and z += phi(k); ``state`` is [S, z], updated in place.

    phi(t) is elu(factor t) + 1, relu(W t + b), or the ``waves`` factor [sin(W t), cos(W t)] of t brought to length 1; W
    is (features, d), or has an axis of heads before that, and then so has b. Without a key (k is (b, g, 0, d)) the
    state is only read. ``gate`` is (the logarithm of what stays of the state, what enters of the token), (b, g, 1)
    each. It has no gradients, and may be captured in a CUDA graph.
    """
    (b, h, n_q, d), g, e = q.shape, k.shape[1], v.shape[-1]
    if n_q != 1 or k.shape[2] > 1:
        raise ValueError(f"a step takes one query and at most one key, got {n_q} and {k.shape[2]}")
    rows = d if weight is None else weight.shape[-2]
    held = (b, g, 2 * rows if kind == "waves" else rows, e + 1)
    if state.dtype != torch.float32 or not state.is_contiguous() or state.numel() != b * g * held[2] * held[3]:
        raise ValueError(f"the state is updated in place: {held}, float32 and contiguous, got {tuple(state.shape)}")
    writes = k.shape[2] == 1
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    # A column of a longer mask is not, nor is a parameter's part.
    visible, weight, bias = (None if t is None else t.contiguous() for t in (key_visible, weight, bias))
    stays, enters = (None, None) if gate is None or not writes else (t.contiguous() for t in gate)
    out = torch.empty(b, h, 1, e, dtype=q.dtype, device=q.device)
    options = _step_options(
        kind, h // g, rows, d, e, writes, visible is not None and writes, stays is not None, least > 0
    )
    numbers = (
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2],
        0 if weight is None or weight.dim() == 2 else weight.stride(0), g, rows, factor, least,
    )  # fmt: skip
    token = (k, v) if writes else (None, None)
    tensors = (q, *token, weight, bias, stays, enters, visible if writes else None, state, out)
    launch(add_and_read, (b, g, 1), tensors, numbers, options)
    return out


def read_slots(q: Tensor, memory: tuple[Tensor, Tensor, Tensor], *, scale: float) -> Tensor:
    """V~^T softmax(scale K~ q) over the slots of ``memory`` (K~, V~, z) that are not empty, for one query."""
    (b, h, _, d), (g, n), e = q.shape, memory[0].shape[1:3], memory[1].shape[-1]
    q = q if q.stride(3) == 1 else q.contiguous()
    k, v, z = (t.contiguous() for t in memory)
    out = torch.empty(b, h, 1, e, dtype=q.dtype, device=q.device)
    numbers = (*q.stride()[:2], *out.stride()[:2], g, n, scale)
    launch(read_only, (b, g, 1), (q, k, v, z, out), numbers, _read_options(h // g, n, d, e))
    return out


def serves_step(q: Tensor, v: Tensor, state: Tensor) -> bool:
    """Whether ``linear_step`` is made for these."""
    narrow = max(q.shape[-1], v.shape[-1]) <= WIDEST
    return narrow and q.dtype in DTYPES and state.dtype == torch.float32 and state.is_contiguous()


def serves_reading(q: Tensor, memory: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Whether ``read_slots`` is made for these."""
    sizes = _read_sizes(memory[0].shape[2], q.shape[-1], memory[1].shape[-1])
    return sizes[0] * max(sizes[1:]) <= MOST and q.dtype in DTYPES and memory[0].dtype == torch.float32


@lru_cache(maxsize=1024)
def _step_options(
    kind: str, heads: int, rows: int, d: int, e: int, writes: bool, masked: bool, gated: bool, bounded: bool
) -> Options:
    wide, wide_values, several, padded = (triton.next_power_of_2(size) for size in (d, e, heads, rows))
    tile = max(1, min(padded, TILE // (max(wide, wide_values) * several)))
    return tuple(
        {
            "R": heads, "RP": several, "FP": padded, "BF": tile, "D": d, "BD": wide, "E": e, "BE": wide_values,
            "MAP": MAPS[kind], "FULL": (d, e, rows) == (wide, wide_values, padded), "WRITES": writes, "MASKED": masked,
            "GATED": gated, "BOUNDED": bounded, "num_warps": _warps(tile * several * max(wide, wide_values)),
        }.items()
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _read_options(heads: int, slots: int, d: int, e: int) -> Options:
    padded, wide, wide_values = _read_sizes(slots, d, e)
    return tuple(
        {
            "R": heads, "NP": padded, "D": d, "BD": wide, "E": e,
            "BE": wide_values, "FULL": (d, e, slots) == (wide, wide_values, padded),
            "num_warps": _warps(padded * max(wide, wide_values)),
        }.items()
    )  # fmt: skip


def _warps(numbers: int) -> int:
    return 4 if numbers <= 2048 else 8


@lru_cache(maxsize=1024)
def _read_sizes(slots: int, d: int, e: int) -> tuple[int, int, int]:
    return triton.next_power_of_2(slots), triton.next_power_of_2(d), triton.next_power_of_2(e)
