"""What is wrong with an attention call, in words: each of its parts, and how they fit together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attnlab.attention import AttentionCall

__all__ = ["check_bias", "check_call"]

# Positions up to here, and sums of two of them, are exact in int64.
MOST_TOKENS = 1 << 60
# The tensors that a call may have, and those of them that say what may be seen.
OPTIONAL = ("x", "key_visible", "mask", "bias", "memory")
FLAGS = ("key_visible", "mask")


def check_call(call: AttentionCall) -> None:
    """Raise a ValueError unless kinds, shapes, devices, dtypes and numbers are those of an attention call."""
    _check_tensors(call)
    _check_masks(call)
    _check_numbers(call)


def check_bias(call: AttentionCall) -> None:
    """Refuse NaN and plus infinity in a bias on the CPU; elsewhere reading a number would wait for the device."""
    if call.bias is None or call.bias.device.type != "cpu" or not call.bias.numel() or torch.compiler.is_compiling():
        return
    try:
        # The maximum of numbers of which one is NaN is NaN.
        largest = float(call.bias.detach().max())
    except RuntimeError:
        # Inside a transform such as vmap no number can be read.
        return
    if not largest < math.inf:
        raise ValueError(
            f"bias must hold finite numbers, or minus infinity where a pair is hidden, and holds {largest}; "
            "find where it was made, or mask what should not be seen"
        )


def _check_tensors(call: AttentionCall) -> None:
    for name in ("q", "k", "v"):
        t = getattr(call, name)
        if not isinstance(t, Tensor) or t.dim() != 4:
            got = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(f"{name} must be a tensor (batch, heads, length, width), got {got}")
    for name in OPTIONAL:
        t = getattr(call, name)
        if t is not None and not isinstance(t, Tensor):
            raise ValueError(f"{name} must be a tensor or None, got {type(t).__name__}")
    _check_shapes(call)
    _check_devices_and_dtypes(call)


def _check_shapes(call: AttentionCall) -> None:
    # A decoding step makes a call in every layer, so each tensor is asked once.
    q, k, v = call.q.shape, call.k.shape, call.v.shape
    if q[3] != k[3]:
        raise ValueError(f"q and k must have the same width, got {q[3]} and {k[3]}")
    if k[:3] != v[:3]:
        raise ValueError(f"k and v must agree in (batch, heads, length), got {tuple(k[:3])} and {tuple(v[:3])}")
    if q[0] != k[0]:
        raise ValueError(f"q and k must have the same batch size, got {q[0]} and {k[0]}")
    if k[1] == 0 or q[1] % k[1]:
        raise ValueError(
            f"query heads must be a multiple of key/value heads, got {q[1]} and {k[1]}; "
            "did you pass (batch, length, heads, width)?"
        )
    x = None if call.x is None else call.x.shape
    if x is not None and (len(x) != 3 or x[0] != k[0] or x[1] > k[2]):
        raise ValueError(
            f"x must be (batch, at most the keys, width) = ({k[0]}, <= {k[2]}, m), "
            f"got {tuple(x)}; x is what the keys were made from"
        )


def _check_devices_and_dtypes(call: AttentionCall) -> None:
    device, dtype = call.q.device, call.q.dtype
    if not dtype.is_floating_point:
        raise ValueError(f"q must be floating point, got {dtype}")
    for name in ("k", "v", *OPTIONAL):
        t = getattr(call, name)
        if t is None:
            continue
        if t.device != device:
            raise ValueError(f"{name} is on {t.device} but q is on {device}; move them to one device")
        if t.dtype != dtype and name not in FLAGS:
            raise ValueError(f"{name} is {t.dtype} but q is {dtype}; cast them to one dtype")


def _check_masks(call: AttentionCall) -> None:
    b, h, n_q, n_k = call.sizes
    for name in FLAGS:
        t = getattr(call, name)
        if t is not None and t.dtype != torch.bool:
            raise ValueError(
                f"{name} must be bool (True: may be seen), got {t.dtype}; "
                "an additive mask goes into bias=, a 0/1 mask becomes bool with .bool()"
            )
    if call.key_visible is not None and tuple(call.key_visible.shape) != (b, n_k):
        raise ValueError(f"key_visible must be (batch, keys) = ({b}, {n_k}), got {tuple(call.key_visible.shape)}")
    for name in ("mask", "bias"):
        t = getattr(call, name)
        if t is None:
            continue
        if t.dim() != 4 or t.shape[0] not in (1, b) or t.shape[1] not in (1, h) or t.shape[2:] != (n_q, n_k):
            hint = "; did you pass (k, q)?" if t.shape[-2:] == (n_k, n_q) and n_q != n_k else ""
            raise ValueError(
                f"{name} must be (batch or 1, heads or 1, q, k) = ({b}, {h}, {n_q}, {n_k}), got {tuple(t.shape)}{hint}"
            )


def _check_numbers(call: AttentionCall) -> None:
    if call.scale is not None and not (_is_number(call.scale) and math.isfinite(call.scale) and call.scale > 0):
        raise ValueError(f"scale must be a positive finite number, got {call.scale!r}; None means 1/sqrt(d)")
    if not isinstance(call.causal, bool):
        raise ValueError(f"causal must be True or False, got {call.causal!r}")
    if isinstance(call.offset, bool) or not isinstance(call.offset, int):
        raise ValueError(f"offset must be an int (the number of cached keys), got {call.offset!r}")
    if abs(call.offset) > MOST_TOKENS:
        raise ValueError(f"offset must be the number of cached keys, at most {MOST_TOKENS}, got {call.offset}")
    if call.offset and not call.causal:
        raise ValueError(f"offset={call.offset} has no meaning without causal=True")


def _is_number(value: object) -> bool:
    # Numbers of numpy and of a compiler's graph too.
    return hasattr(value, "__float__") and not isinstance(value, bool)
