"""StreamingLLM: the first keys and the latest ones (Xiao et al., 2024, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnlab.caches import KeyScore, Moment, policy
from attnlab.shapes import Float

__all__ = ["StreamingLLM"]


@policy("streaming-llm", also="recency")
@dataclass(frozen=True)
class StreamingLLM(KeyScore):
    """Four sinks, which softmax needs as a place for its mass, and a window of the latest keys.

    Xiao et al. were the first to keep the sinks; windows alone are as old as local attention. Here keys keep the
    positions that they were made with; the paper numbers them anew inside the cache.
    """

    sinks = 4

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        # Equal scores keep the later key.
        return moment.call.k.new_zeros(moment.held.shape)

    def recent(self, budget: int) -> int:
        return budget
