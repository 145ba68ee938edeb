"""``select_step``: one more token of abc-select while decoding, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
from torch import Tensor

from attnlab.kernels.hybrid.attention import dense_rows
from attnlab.kernels.hybrid.step import keys_at_once
from attnlab.kernels.launching import Options, launch
from attnlab.kernels.select.step_triton import take_and_read
from attnlab.shapes import Float

__all__ = ["select_step", "supports"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Keys of a memory and widths of heads that the kernel holds.
MOST_KEYS, MOST_WIDTH, MOST_GROUP = 1024, 256, 64
# Pairs of keys that a thread compares at once, and numbers of x.
PAIRS, WIDTH_TILE = 64, 1024
# A larger memory has twice the warps.
FEW_KEYS = 128


def supports(d: int, e: int, dtype: torch.dtype, *, keys: int, heads: int) -> bool:
    """Whether the kernel is made for these widths, this many keys and query heads of a key/value head."""
    return dtype in DTYPES and min(d, e) >= 1 and max(d, e) <= MOST_WIDTH and keys <= MOST_KEYS and heads <= MOST_GROUP


def select_step(
    q: Float[Tensor, "b h 1 d"],
    k: Float[Tensor, "b g 1 d"],
    v: Float[Tensor, "b g 1 e"],
    x: Float[Tensor, "b 1 m"],
    parameters: tuple[Tensor, Tensor],
    kept: Sequence[Tensor],
    *,
    slots: int,
    window: int,
    block: int,
    sinks: int,
    tokens: int,
    scale: float,
    key_visible: Tensor | None = None,
) -> Float[Tensor, "b h 1 e"]:
    """The output for one more token; ``kept`` is updated in place, in one launch that a CUDA graph may hold.

    ``kept`` is what a cache has: keys, values, scores, places, and counts (b, g). ``parameters`` are w and r; a recency
    of 1 adds 1 to the score of a token that comes ``tokens`` tokens later. Keys are left in any order.
    """
    if not all(t.is_contiguous() for t in kept):
        raise ValueError("what is kept is updated in place: it must be contiguous")
    q, k, v = map(dense_rows, (q, k, v))
    x = x.contiguous()
    weight, recency = (t.contiguous() for t in parameters)
    visible = None if key_visible is None else key_visible.contiguous()
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    step = _step if torch.compiler.is_compiling() else _launch_step
    keys, values, scores, places, count = kept
    step(
        q, k, v, x, visible, weight, recency, keys, values, scores, places, count, out, slots, window, block, sinks,
        tokens, scale,
    )  # fmt: skip
    return out


def _launch_step(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor, visible: Tensor | None, weight: Tensor, recency: Tensor, kept_k: Tensor,
    kept_v: Tensor, kept_score: Tensor, kept_place: Tensor, count: Tensor, out: Tensor, slots: int, window: int,
    block: int, sinks: int, tokens: int, scale: float,
) -> None:  # fmt: skip
    (b, h, _, d), (g, keys, e), width = q.shape, kept_v.shape[1:], x.shape[-1]
    strides: dict[str, int] = {}
    for name, t in (("q", q), ("k", k), ("v", v)):
        strides |= {f"s{name}b": t.stride(0), f"s{name}h": t.stride(1)}
    strides |= {"sxb": x.stride(0), "sob": out.stride(0), "soh": out.stride(1)}
    launch(
        take_and_read,
        (g, b, 1),
        {
            "q": q, "k": k, "v": v, "x": x, "visible": visible, "weight": weight, "recency": recency, "kept_k": kept_k,
            "kept_v": kept_v, "kept_score": kept_score, "kept_place": kept_place, "count": count, "out": out,
        },
        {**strides, "G": g, "M": width, "root": max(1, width) ** -0.5, "tokens": float(tokens), "scale": scale},
        _options(d, e, h // g, width, keys, slots, window, block, sinks, visible is not None, q.dtype),
    )  # fmt: skip


_step = torch.library.custom_op(
    "attnlab::select_step",
    _launch_step,
    mutates_args=("kept_k", "kept_v", "kept_score", "kept_place", "count", "out"),
)


@lru_cache(maxsize=1024)
def _options(
    d: int, e: int, heads: int, width: int, keys: int, slots: int, window: int, block: int, sinks: int, masked: bool,
    dtype: torch.dtype,
) -> Options:  # fmt: skip
    """The constants of a step."""
    heads_tile, columns, value_columns = (max(16, triton.next_power_of_2(size)) for size in (heads, d, e))
    padded = max(16, triton.next_power_of_2(keys))
    warps = 4 if padded <= FEW_KEYS else 8
    values = {
        "R": heads, "RP": heads_tile, "C": keys, "CP": padded, "T": min(32 * warps * PAIRS // padded, padded),
        "TR": min(keys_at_once(max(columns, value_columns), dtype), padded), "S": sinks, "N": slots, "W": window,
        "B": block, "D": d, "BD": columns, "E": e, "BE": value_columns,
        "MT": max(16, min(WIDTH_TILE, triton.next_power_of_2(width))), "MASKED": masked,
        "PREC": "ieee" if dtype == torch.float32 else "tf32", "num_warps": warps,
    }  # fmt: skip
    return tuple(values.items())
