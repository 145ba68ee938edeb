"""``hybrid_step``: one more token while decoding."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from attnlab.kernels.hybrid.attention import dense_rows, precision
from attnlab.kernels.hybrid.step_triton import take_and_read
from attnlab.kernels.launching import Options, launch
from attnlab.shapes import Float

__all__ = ["hybrid_step", "keys_at_once"]

# The most keys that are read at once, and the bytes of as many.
KEY_TILE, KEY_BYTES = 128, 16_384


def hybrid_step(
    q: Float[Tensor, "b h 1 d"],
    k: Float[Tensor, "b g 1 d"],
    v: Float[Tensor, "b g 1 d"],
    log_alpha: Float[Tensor, "b g 1 n"] | None,
    kept: list[Tensor],
    *,
    control: tuple[Tensor, Tensor] | None,
    block: int,
    mass: bool,
    scale: float,
    key_visible: Tensor | None = None,
) -> Float[Tensor, "b h 1 d"]:
    """The output for one more token; ``kept`` is updated in place, in one launch that a CUDA graph may hold.

    ``kept`` is what a cache has: keys and values of sinks, those of the window, log alpha of the window unless
    ``control`` (W_k, b) makes it from keys, sums of slots [k, v], their masses, and counts (b, g).
    """
    if not all(t.is_contiguous() for t in kept):
        raise ValueError("what is kept is updated in place: it must be contiguous")
    sink_k, sink_v, ring_k, ring_v, *ring_x, slots, z, count = kept
    q, k, v = map(dense_rows, (q, k, v))
    log_alpha = None if log_alpha is None else dense_rows(log_alpha)
    # A column of a longer mask is not contiguous.
    key_visible = None if key_visible is None else key_visible.contiguous()
    weight, bias = (None, None) if control is None else (t.contiguous() for t in control)
    out = torch.empty_like(q)
    step = _step if torch.compiler.is_compiling() else _launch_step
    step(
        q, k, v, log_alpha, key_visible, weight, bias, sink_k, sink_v, ring_k, ring_v, ring_x[0] if ring_x else None,
        slots, z, count, out, block, mass, scale,
    )  # fmt: skip
    return out


def _launch_step(
    q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, visible: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, sink_k: Tensor, sink_v: Tensor, ring_k: Tensor, ring_v: Tensor, ring_x: Tensor | None,
    slots_kv: Tensor, slots_z: Tensor, count: Tensor, out: Tensor, block: int, mass: bool, scale: float,
) -> None:  # fmt: skip
    (b, h, _, d), (g, window) = q.shape, ring_k.shape[1:3]
    strides: dict[str, int] = {}
    for name, t in (("q", q), ("k", k), ("v", v), ("x", x), ("o", out)):
        strides |= {f"s{name}b": 0 if t is None else t.stride(0), f"s{name}h": 0 if t is None else t.stride(1)}
    launch(
        take_and_read,
        (g, b, 1),
        {
            "q": q, "k": k, "v": v, "x": x, "visible": visible, "weight": weight, "bias": bias, "sink_k": sink_k,
            "sink_v": sink_v, "ring_k": ring_k, "ring_v": ring_v, "ring_x": ring_x, "slots_kv": slots_kv,
            "slots_z": slots_z, "count": count, "out": out,
        },
        {**strides, "G": g, "scale": scale},
        _options(d, h // g, slots_z.shape[2], sink_k.shape[2], window, block, mass, x is None, visible is not None,
                 q.dtype),
    )  # fmt: skip


_step = torch.library.custom_op(
    "attnlab::hybrid_step",
    _launch_step,
    mutates_args=("sink_k", "sink_v", "ring_k", "ring_v", "ring_x", "slots_kv", "slots_z", "count", "out"),
)


@lru_cache(maxsize=1024)
def _options(
    d: int, heads: int, slots: int, sinks: int, window: int, block: int, mass: bool, by_key: bool, masked: bool,
    dtype: torch.dtype,
) -> Options:  # fmt: skip
    """The constants of a step."""
    heads_tile, sink_tile, slot_tile, columns, window_tile = (
        max(16, triton.next_power_of_2(size)) for size in (heads, sinks, slots, d, window)
    )
    values = {
        "R": heads, "RP": heads_tile, "W": window, "KT": min(keys_at_once(columns, dtype), window_tile), "C": block,
        "S": sinks, "SP": sink_tile, "N": slots, "NP": slot_tile, "D": d, "BD": columns, "MASS": mass,
        "BY_KEY": by_key, "MASKED": masked, "PREC": precision(dtype),
        "num_warps": 8 if slot_tile * columns >= 8192 else 4,
    }  # fmt: skip
    return tuple(values.items())


def keys_at_once(columns: int, dtype: torch.dtype) -> int:
    """How many keys of a memory a program reads at once: the more there are on their way, the less it waits."""
    return max(16, min(KEY_TILE, KEY_BYTES // (columns * dtype.itemsize)))
