"""KVzip: the keys that the model needs to repeat the prompt (Kim et al., 2025, arXiv 2505.23416)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnlab.caches import KeyScore, Moment, policy
from attnlab.shapes import Float

__all__ = ["KVzip"]


@policy("kvzip")
@dataclass(frozen=True)
class KVzip(KeyScore):
    """max_i alpha_ij over the queries i of the prompt read once more behind itself, and over a group's heads.

    Kim et al. were the first to score keys by reconstruction. Like theirs it knows no question. Unlike theirs, no
    instruction stands between the two readings, the prompt is repeated whole, and every layer keeps the same number.
    """

    when = "prefill"
    reads_twice = True
    sinks = 4

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        score = moment.call.k.new_zeros(())
        for W in moment.weights():
            score = score.maximum(W.amax((2, 3)))
        return score

    def recent(self, budget: int) -> int:
        return 0

    def cannot(self) -> dict[str, str]:
        return {
            "step": "it reads a prompt twice, and after a single token there is none",
            "padding": "the second reading would stand behind the padding; give prompts of one length, or single ones",
        }
