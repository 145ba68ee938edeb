"""The device of a model or a tensor: the best one, or the one that a user named."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

__all__ = ["best_device", "multiplies_bfloat16", "to_device"]

T = TypeVar("T", Tensor, nn.Module)


def best_device() -> torch.device:
    """The GPU, or the CPU of a machine without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def multiplies_bfloat16() -> bool:
    """Whether the processor has units for products of bfloat16 (AMX, AVX-512 BF16); False where torch cannot tell."""
    asked = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return any(one is not None and bool(one()) for one in asked)


def to_device(device: str, moved: T) -> T:
    """A model or a tensor on the device that a user named; a device that this machine lacks is a ValueError."""
    try:
        return moved.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
