"""Packed sequences: a kernel that cuts them into chunks."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["cut_sequences"]


@triton.jit(do_not_specialize=["COUNT", "SEQUENCES", "SIZE"])
def cut_sequences(
    # where each sequence begins, and after them the end of the last
    cu,
    # written: each chunk's first token, length and sequence; the number of chunks before each sequence, and in all
    table, bounds,
    # sizes
    COUNT, SEQUENCES, SIZE,
    # tiles: chunks of a program, sequences at a time
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cut every sequence into chunks of SIZE tokens, the last of which may be shorter.

    Chunks beyond the last sequence are empty. Every program counts the chunks of all sequences, a block of sequences at
    a time.
    """
    pid = tl.program_id(0)
    chunk = pid * CHUNKS + tl.arange(0, CHUNKS)
    start = tl.zeros([CHUNKS], tl.int32)
    length = tl.zeros([CHUNKS], tl.int32)
    owner = tl.zeros([CHUNKS], tl.int32)
    before = 0
    if pid == 0:
        tl.store(bounds, 0)
    for i in range(0, SEQUENCES, BLOCK):
        seq = i + tl.arange(0, BLOCK)
        exists = seq < SEQUENCES
        begin = tl.load(cu + seq, mask=exists, other=0).to(tl.int32)
        end = tl.load(cu + seq + 1, mask=exists, other=0).to(tl.int32)
        chunks = (end - begin + SIZE - 1) // SIZE
        after = before + tl.cumsum(chunks, 0)
        if pid == 0:
            tl.store(bounds + 1 + seq, after, mask=exists)
        # A chunk belongs to the sequence, if any, between whose first and last chunk it lies.
        nth = chunk[:, None] - (after - chunks)[None, :]
        mine = (nth >= 0) & (nth < chunks[None, :])
        start += tl.sum(tl.where(mine, begin[None, :] + nth * SIZE, 0), 1)
        length += tl.sum(tl.where(mine, (end - begin)[None, :] - nth * SIZE, 0), 1)
        owner += tl.sum(tl.where(mine, seq[None, :], 0), 1)
        before += tl.sum(chunks, 0)
    real = chunk < COUNT
    tl.store(table + chunk * 3, start, mask=real)
    tl.store(table + chunk * 3 + 1, tl.minimum(length, SIZE), mask=real)
    tl.store(table + chunk * 3 + 2, owner, mask=real)
