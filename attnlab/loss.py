"""The value of a loss term, shared by the training loop and by the rooms that define terms."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnlab.summaries import short_repr

__all__ = ["IGNORED", "Loss"]

# The label of a position that is not predicted: padding, and in a masked LM every token left as it was.
IGNORED = -100


class Loss(NamedTuple):
    """A sum of losses and the number they are averaged over; the loop divides by the count over all ranks."""

    total: Tensor
    # A field of this name hides tuple.count, which no loss needs.
    count: Tensor | float  # type: ignore[assignment]

    def __repr__(self) -> str:
        return short_repr(self)
