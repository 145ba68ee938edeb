"""Where packed sequences are cut."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["cut_units"]


@triton.jit(do_not_specialize=["COUNT", "SEQUENCES", "SIZE"])
def cut_units(cu, table, bounds, COUNT, SEQUENCES, SIZE, UNITS: tl.constexpr, BLOCK: tl.constexpr):
    """Each unit's first token, length and sequence; and how many units there are before each sequence, and in all.

    A sequence is cut into units of SIZE tokens, the last of which may be shorter; units beyond the last sequence are
    empty. Every program counts the units of all sequences, a block of them at a time.
    """
    pid = tl.program_id(0)
    unit = pid * UNITS + tl.arange(0, UNITS)
    start = tl.zeros([UNITS], tl.int32)
    length = tl.zeros([UNITS], tl.int32)
    owner = tl.zeros([UNITS], tl.int32)
    before = 0
    if pid == 0:
        tl.store(bounds, 0)
    for i in range(0, SEQUENCES, BLOCK):
        seq = i + tl.arange(0, BLOCK)
        there = seq < SEQUENCES
        begin = tl.load(cu + seq, mask=there, other=0).to(tl.int32)
        end = tl.load(cu + seq + 1, mask=there, other=0).to(tl.int32)
        units = (end - begin + SIZE - 1) // SIZE
        after = before + tl.cumsum(units, 0)
        if pid == 0:
            tl.store(bounds + 1 + seq, after, mask=there)
        # A unit lies in the one sequence, if any, whose units are around it.
        nth = unit[:, None] - (after - units)[None, :]
        mine = (nth >= 0) & (nth < units[None, :])
        start += tl.sum(tl.where(mine, begin[None, :] + nth * SIZE, 0), 1)
        length += tl.sum(tl.where(mine, (end - begin)[None, :] - nth * SIZE, 0), 1)
        owner += tl.sum(tl.where(mine, seq[None, :], 0), 1)
        before += tl.sum(units, 0)
    real = unit < COUNT
    tl.store(table + unit * 3, start, mask=real)
    tl.store(table + unit * 3 + 1, tl.minimum(length, SIZE), mask=real)
    tl.store(table + unit * 3 + 2, owner, mask=real)
