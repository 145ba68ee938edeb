"""``abc_step``: one more token while decoding."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from attnlab.kernels.abc.attention import check_sizes, dense_rows
from attnlab.kernels.abc.step_triton import fold_and_read, fold_and_read_group
from attnlab.kernels.launching import Options, launch

__all__ = ["abc_step"]

# The most numbers and slots of a tile, and the warps, for one query head on a memory and for several; measured on an
# H200.
ONE_HEAD, GROUPED_HEADS = (1024, 8, 1), (4096, 256, 8)


def abc_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    control: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float | None = None,
    key_visible: Tensor | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """The output for one more token; ``state`` (K~, V~, z) and ``count`` are updated in place, in one launch.

    It has no gradients, and may be captured in a CUDA graph.
    """
    check_sizes(q, k, v, control, causal=True, cu_seqlens=None)
    if q.shape[2] != 1:
        raise ValueError(f"a step takes one token, got {q.shape[2]}; use abc_attention(..., state=state)")
    dtypes = (torch.float32,), (torch.float32,), (torch.float32, torch.float64)
    if not all(t.is_contiguous() and t.dtype in allowed for t, allowed in zip(state, dtypes, strict=True)):
        raise ValueError("the state is updated in place: K~ and V~ float32, z float32 or float64, all contiguous")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, control = map(dense_rows, (q, k, v, control))
    if key_visible is not None:
        # A column of a longer mask is not contiguous.
        key_visible = key_visible.contiguous()
    out = torch.empty_like(q)
    step = _step if torch.compiler.is_compiling() else _launch_step
    step(q, k, v, control, *state, key_visible, count, out, scale)
    return out


@torch.library.custom_op("attnlab::abc_step", mutates_args=("memory_k", "memory_v", "memory_z", "count", "out"))
def _step(
    q: Tensor, k: Tensor, v: Tensor, control: Tensor, memory_k: Tensor, memory_v: Tensor, memory_z: Tensor,
    visible: Tensor | None, count: Tensor | None, out: Tensor, scale: float,
) -> None:  # fmt: skip
    _launch_step(q, k, v, control, memory_k, memory_v, memory_z, visible, count, out, scale)


def _launch_step(
    q: Tensor, k: Tensor, v: Tensor, control: Tensor, memory_k: Tensor, memory_v: Tensor, memory_z: Tensor,
    visible: Tensor | None, count: Tensor | None, out: Tensor, scale: float,
) -> None:  # fmt: skip
    b, h, _, d = q.shape
    _, g, _, n = control.shape
    (sqb, sqh, _, _), (skb, skh, _, _), (svb, svh, _, _) = q.stride(), k.stride(), v.stride()
    (ssb, ssh, _, _), (sob, soh, _, _) = control.stride(), out.stride()
    launch(
        fold_and_read if h == g else fold_and_read_group,
        (g, b, 1),
        {
            "q": q, "k": k, "v": v, "s": control, "visible": visible, "memory_k": memory_k, "memory_v": memory_v,
            "memory_z": memory_z, "count": count, "o": out,
        },
        {
            "sqb": sqb, "sqh": sqh, "skb": skb, "skh": skh, "svb": svb, "svh": svh, "ssb": ssb, "ssh": ssh, "sob": sob,
            "soh": soh, "G": g, "N": n, "scale": scale,
        },
        _step_options(h // g, n, d, visible is not None, count is not None),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _step_options(heads: int, slots: int, d: int, masked: bool, counted: bool) -> Options:
    """Constants of a step for so many query heads on one memory."""
    columns, padded_heads, padded_slots = (triton.next_power_of_2(size) for size in (d, heads, slots))
    numbers, most_slots, warps = ONE_HEAD if heads == 1 else GROUPED_HEADS
    slot_tile = max(1, min(padded_slots, most_slots, numbers // (columns * padded_heads)))
    options = {
        "NP": padded_slots, "BN": slot_tile, "D": d, "BD": columns,
        "UNPADDED": d == columns and slots == padded_slots, "MASKED": masked, "COUNTED": counted, "num_warps": warps,
    }  # fmt: skip
    return tuple((options if heads == 1 else {"R": heads, "RP": padded_heads, **options}).items())
