"""Decoding in one launch: a token of linear attention, or a query that reads slots to which nothing is added."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from attnlab.kernels.decoding_triton import ELU, RELU, WAVES, add_and_read, read_only
from attnlab.kernels.launching import Options, launch

__all__ = ["linear_step", "read_slots", "serves_reading", "serves_step"]

MAPS = {"elu": ELU.value, "relu": RELU.value, "waves": WAVES.value}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256
# The most numbers of K~ or V~ that ``read_slots`` holds in one program.
MOST_READ = 16384
# Numbers of a tile of ``linear_step``: large, so that all loads of a program are under way at once.
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

    The feature map phi(t) is by ``kind``: "elu" elu(factor t) + 1; "relu" relu(W t + b); "waves" factor [sin(W t),
    cos(W t)] of t divided by its length. W (``weight``) is (features, d), or has an axis of heads before that, and then
    so has b (``bias``). Without a key (k is (b, g, 0, d)) the state is only read. ``gate`` is (the logarithm of the
    factor of the state, the factor of the token), (b, g, 1) each. It has no gradients, and may be captured in a CUDA
    graph.
    """
    (b, h, _, d), g, e = q.shape, k.shape[1], v.shape[-1]
    rows = d if weight is None else weight.shape[-2]
    _check_step(q, k, state, (b, g, 2 * rows if kind == "waves" else rows, e + 1))
    writes = k.shape[2] == 1
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    # A column of a longer mask is not contiguous, nor is a part of a parameter.
    visible, weight, bias = (
        None if t is None else t.contiguous() for t in (key_visible if writes else None, weight, bias)
    )  # fmt: skip
    stays, enters = (None, None) if gate is None or not writes else (t.contiguous() for t in gate)
    out = torch.empty(b, h, 1, e, dtype=q.dtype, device=q.device)
    (sqb, sqh, _, _), (skb, skh, _, _), (svb, svh, _, _) = q.stride(), k.stride(), v.stride()
    sob, soh, _, _ = out.stride()
    launch(
        add_and_read,
        (b, g, 1),
        {
            "q": q, "k": k if writes else None, "v": v if writes else None, "weight": weight, "bias": bias,
            "stays": stays, "enters": enters, "visible": visible, "state": state, "o": out,
        },
        {
            "sqb": sqb, "sqh": sqh, "skb": skb, "skh": skh, "svb": svb, "svh": svh, "sob": sob, "soh": soh,
            "swg": 0 if weight is None or weight.dim() == 2 else weight.stride(0), "G": g, "F": rows, "scale": factor,
            "least": least,
        },
        _step_options(kind, h // g, rows, d, e, writes, visible is not None, stays is not None, least > 0),
    )  # fmt: skip
    return out


def _check_step(q: Tensor, k: Tensor, state: Tensor, expected: tuple[int, int, int, int]) -> None:
    """Raise unless there is one token, and a state of the ``expected`` shape that can be updated in place."""
    if q.shape[2] != 1 or k.shape[2] > 1:
        raise ValueError(f"a step takes one query and at most one key, got {q.shape[2]} and {k.shape[2]}")
    b, g, features, width = expected
    if state.dtype != torch.float32 or not state.is_contiguous() or state.numel() != b * g * features * width:
        raise ValueError(f"the state is updated in place: {expected}, float32 and contiguous, got {tuple(state.shape)}")


def read_slots(q: Tensor, memory: tuple[Tensor, Tensor, Tensor], *, scale: float) -> Tensor:
    """V~^T softmax(scale K~ q) over the slots of ``memory`` (K~, V~, z) that are not empty, for one query."""
    (b, h, _, d), (g, n), e = q.shape, memory[0].shape[1:3], memory[1].shape[-1]
    q = q if q.stride(3) == 1 else q.contiguous()
    k, v, z = (t.contiguous() for t in memory)
    out = torch.empty(b, h, 1, e, dtype=q.dtype, device=q.device)
    (sqb, sqh, _, _), (sob, soh, _, _) = q.stride(), out.stride()
    launch(
        read_only,
        (b, g, 1),
        {"q": q, "memory_k": k, "memory_v": v, "memory_z": z, "o": out},
        {"sqb": sqb, "sqh": sqh, "sob": sob, "soh": soh, "G": g, "N": n, "scale": scale},
        _read_options(h // g, n, d, e),
    )
    return out


def serves_step(q: Tensor, v: Tensor, state: Tensor) -> bool:
    """Whether ``linear_step`` is made for these."""
    narrow = max(q.shape[-1], v.shape[-1]) <= WIDEST
    return narrow and q.dtype in DTYPES and state.dtype == torch.float32 and state.is_contiguous()


def serves_reading(q: Tensor, memory: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Whether ``read_slots`` is made for these."""
    sizes = _read_sizes(memory[0].shape[2], q.shape[-1], memory[1].shape[-1])
    return sizes[0] * max(sizes[1:]) <= MOST_READ and q.dtype in DTYPES and memory[0].dtype == torch.float32


@lru_cache(maxsize=1024)
def _step_options(
    kind: str, heads: int, rows: int, d: int, e: int, writes: bool, masked: bool, gated: bool, bounded: bool
) -> Options:
    """Constants of ``add_and_read``."""
    columns, value_columns, padded_heads, padded = (triton.next_power_of_2(size) for size in (d, e, heads, rows))
    tile = max(1, min(padded, TILE // (max(columns, value_columns) * padded_heads)))
    return tuple(
        {
            "R": heads, "RP": padded_heads, "FP": padded, "BF": tile, "D": d, "BD": columns, "E": e,
            "BE": value_columns, "UNPADDED": (d, e, rows) == (columns, value_columns, padded), "MAP": MAPS[kind],
            "WRITES": writes, "MASKED": masked, "GATED": gated, "BOUNDED": bounded,
            "num_warps": _warps(tile * padded_heads * max(columns, value_columns)),
        }.items()
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _read_options(heads: int, slots: int, d: int, e: int) -> Options:
    """Constants of ``read_only``."""
    padded, columns, value_columns = _read_sizes(slots, d, e)
    return tuple(
        {
            "R": heads, "NP": padded, "D": d, "BD": columns, "E": e,
            "BE": value_columns, "UNPADDED": (d, e, slots) == (columns, value_columns, padded),
            "num_warps": _warps(padded * max(columns, value_columns)),
        }.items()
    )  # fmt: skip


def _warps(numbers: int) -> int:
    """Warps for a tile of so many numbers."""
    return 4 if numbers <= 2048 else 8


@lru_cache(maxsize=1024)
def _read_sizes(slots: int, d: int, e: int) -> tuple[int, int, int]:
    """Slots, columns of K~ and of V~, padded to powers of two as tiles need it."""
    return triton.next_power_of_2(slots), triton.next_power_of_2(d), triton.next_power_of_2(e)
