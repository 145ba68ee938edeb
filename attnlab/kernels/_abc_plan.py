"""How a call is cut into units and tiles, and which dtype its products take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["TUNED", "Plan", "Units", "launch_of", "plan_for", "unit_count", "units_of"]


# Columns at a time, stages, and registers a thread may take, for bf16 and up to 64 slots; measured on an H200.
TUNED: dict[str, tuple[int, int, int | None]] = {
    "write": (128, 1, None),
    "read": (64, 3, 168),
    "query": (64, 2, None),
    "key": (64, 3, None),
}


@dataclass(frozen=True)
class Plan:
    """Tiles of a (head size, slots, dtype): C tokens, NP slots with padding, BD columns at a time."""

    C: int
    NP: int
    BD: int
    CT: tl.dtype
    PREC: str
    state: torch.dtype
    warps: int
    stages: int


@dataclass(frozen=True)
class Units:
    """Tokens cut into units of at most ``size``: ``count`` of them, ``per_row`` in a row unless they are packed."""

    size: int
    count: int
    per_row: int
    sequences: int
    table: Tensor | None
    bounds: Tensor | None


def plan_for(d: int, slots: int, dtype: torch.dtype) -> Plan:
    """Tiles that fit the registers and shared memory of the pair."""
    half = dtype == torch.bfloat16
    # Products with fewer than 64 rows or columns come out wrong on Hopper in bf16 (Triton 3.6).
    NP = max(64, triton.next_power_of_2(slots))
    C = (64 if NP <= 128 else 32) if half else (32 if NP <= 64 else 16)
    # float16 has too few exponents for the weights: its products are taken in tf32, which has its mantissa.
    return Plan(
        C=C,
        NP=NP,
        BD=64 if half or NP <= 64 else 32,
        CT=tl.bfloat16 if half else tl.float32,
        PREC="tf32" if dtype == torch.float16 else "ieee",
        state=torch.bfloat16 if half else torch.float32,
        warps=4 if NP <= 64 else 8,
        stages=2 if half else 1,
    )


def launch_of(plan: Plan, kernel: str, wide: bool) -> dict[str, Any]:
    """How a kernel is launched: its columns, warps, stages and registers."""
    columns, stages, registers = plan.BD, plan.stages, None
    if plan.NP == 64 and plan.state == torch.bfloat16 and not wide:
        columns, stages, registers = TUNED[kernel]
    return {"BD": columns, "num_warps": plan.warps, "num_stages": stages, "maxnreg": registers}


def unit_count(batch: int, length: int, size: int, sequences: int | None) -> int:
    """How many units ``units_of`` makes."""
    if sequences is None:
        return batch * triton.cdiv(length, size)
    # At most one unit a sequence is not full; those that are not needed stay empty.
    return length // size + sequences


def units_of(batch: int, length: int, size: int, cu_seqlens: Tensor | None) -> Units:
    """The units of a batch of rows, or of packed sequences; no word from the device is waited for."""
    if cu_seqlens is None:
        per_row = triton.cdiv(length, size)
        return Units(size, batch * per_row, per_row, batch, None, None)
    sequences = cu_seqlens.shape[0] - 1
    count = unit_count(batch, length, size, sequences)
    cu = cu_seqlens.to(torch.int64)
    bounds = torch.cat([cu.new_zeros(1), ((cu.diff() + size - 1) // size).cumsum(0)])
    unit = torch.arange(count, device=cu.device)
    seq = torch.searchsorted(bounds[1:], unit, right=True).clamp(max=sequences - 1)
    start = cu[seq] + (unit - bounds[seq]) * size
    left = (cu[seq + 1] - start).clamp(0, size)
    table = torch.stack([start, left, seq], 1).to(torch.int32)
    return Units(size, count, count, sequences, table, bounds.to(torch.int32))
