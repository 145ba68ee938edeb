"""Does a training text share a passage with the held-out ones? Titles change between editions; sentences often stay."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

__all__ = ["Passages"]


class Passages:
    """Every run of ``n`` words of the held-out texts, letters and digits only, so that tokenisation does not matter.

    >>> held_out = Passages(["It 's a well @-@ known fact ."], n=4)
    >>> held_out.shared("As everyone says, it's a well-known fact indeed.")
    3
    """

    def __init__(self, texts: Iterable[str], *, n: int = 13) -> None:
        if n < 1:
            raise ValueError(f"a passage has at least one word, got n={n}")
        self.n = n
        self._hashes = {h for text in texts for h in self._runs(text)}

    def shared(self, text: str) -> int:
        """How many runs of n words of ``text`` also stand in the held-out texts."""
        return sum(h in self._hashes for h in self._runs(text))

    def _runs(self, text: str) -> Iterator[int]:
        words = re.findall(r"[^\W_]+", text.lower())
        return (hash(tuple(words[i : i + self.n])) for i in range(len(words) - self.n + 1))
