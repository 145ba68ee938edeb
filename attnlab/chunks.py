"""How much is computed at once; inside ``small_chunks`` short calls are split as long ones are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["chunk_budget", "chunk_length", "small_chunks"]

# The most elements and the most tokens that a chunk may have; ``small_chunks`` lowers them.
_most_elements, _most_tokens = 1 << 62, 1 << 62


def chunk_budget(elements: int) -> int:
    """How many elements to work on at once: ``elements``, or fewer inside ``small_chunks``."""
    return min(elements, _most_elements)


def chunk_length(tokens: int) -> int:
    """How many tokens to work on at once: ``tokens``, or fewer inside ``small_chunks``."""
    return min(tokens, _most_tokens)


@contextmanager
def small_chunks(*, elements: int, tokens: int) -> Iterator[None]:
    """Inside, chunks are at most this large, so that short sequences are split as long ones are."""
    global _most_elements, _most_tokens
    before = _most_elements, _most_tokens
    try:
        _most_elements, _most_tokens = elements, tokens
        yield
    finally:
        _most_elements, _most_tokens = before
