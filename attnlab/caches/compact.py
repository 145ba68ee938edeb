"""Compaction: fewer keys with fitted biases and values in the place of all (Zweiger et al., 2026, arXiv 2602.16284)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnlab.attention import AttentionCall
from attnlab.caches import KeyScore, Moment, policy
from attnlab.caches.compact_fit import Rows, fit
from attnlab.caches.contract import Refit
from attnlab.caches.expected_attention import last_columns, length_of_turn, turned
from attnlab.fields import check_fields, check_int
from attnlab.shapes import Bool, Float

__all__ = ["Compact"]

QUERIES = ("repeat", "prompt", "sampled")
# Of so many queries one is held out, to measure the fit by.
HELD_OUT = 8


@policy(
    "compact",
    examples=("compact", "compact:queries=prompt", "compact:queries=sampled,future=7"),
)
@dataclass(frozen=True)
class Compact(KeyScore):
    """max_i alpha_ij over reference queries i; keys that stay get a bias b_j and a value u_j in place of v_j.

    With alpha over all keys and C those kept, w = exp(b) minimises sum_i (sum_{j in C} alpha_ij w_j - 1)^2, so that the
    mass of the prompt stays what it was beside later keys, then u minimises sum_i |o_i - o^_i|^2, where o^_i attends to
    C by alpha_ij w_j. Zweiger et al. were first; they also search for keys greedily and ask the model questions about
    the text. Ours fits shares of attention, pulls values towards what they were, and shares the budget among all heads
    by the largest alpha, as KVzip does (Kim et al., 2025, arXiv 2505.23416).

    ``queries``: "repeat" reads the prompt a second time behind itself, and takes the queries of that; "prompt" takes
    the prompt's own; "sampled" takes these turned to the next ``future`` positions, from where they see every key.
    """

    queries: str = "repeat"
    future: int = 512
    ridge: float = 0.01

    when = "prefill"
    layers = "shared"
    sinks = 4

    def __post_init__(self) -> None:
        check_fields(self)
        check_int("future", self.future, least=1)
        if self.queries not in QUERIES:
            raise ValueError(f"queries must be one of {', '.join(QUERIES)}, got {self.queries!r}")
        if not self.ridge > 0:
            raise ValueError(f"ridge must be above 0, got {self.ridge}")
        object.__setattr__(self, "reads_twice", self.queries == "repeat")

    def recent(self, budget: int) -> int:
        return 0

    def cannot(self) -> dict[str, str]:
        refused = {
            "step": "keys are fitted once, to the queries of a whole prompt",
            "mask": "a key stands for others, and here some are hidden from later tokens",
            "bias": "what a position bias will be for queries to come is not known",
        }
        if self.reads_twice:
            refused["padding"] = (
                "the second reading would stand behind the padding; give prompts of one length, or single ones"
            )
        return refused

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        score = moment.call.k.new_zeros(())
        for W in self._references(moment).weights():
            score = score.maximum(W.amax((2, 3)))
        return score

    def refit(self, moment: Moment, keep: Bool[Tensor, "b g k"]) -> Refit:
        count = keep.shape[-1]
        call = moment.call
        return fit(self._rows(moment, count), call.k[:, :, :count], call.v[:, :, :count], keep, ridge=self.ridge)

    def _rows(self, moment: Moment, count: int) -> Rows:
        references = self._references(moment)
        fitted = references.numbers() % HELD_OUT != HELD_OUT - 1
        real = references.real

        def rows() -> Iterator[tuple[Tensor, Tensor]]:
            first = 0
            for W in references.weights():
                here = slice(first, first + W.shape[3])
                first += W.shape[3]
                counted = fitted[:, here] if real is None else fitted[:, here] | ~real[:, here]
                # The heads of a group beside each other: they read the same keys.
                yield W[..., :count].flatten(2, 3), counted.repeat(1, W.shape[2])

        return rows

    def _references(self, moment: Moment) -> Moment:
        """The moment with the reference queries in place of the call's."""
        if self.queries != "sampled":
            return moment
        call = moment.call
        columns = moment.column + torch.arange(call.q.shape[2], device=call.q.device)
        if moment.real is not None:
            last_columns(columns.expand_as(moment.real), moment.real, "compact")
        numbers = moment.numbers()
        ahead = moment.per_row(moment.read)[..., 0] + numbers % self.future - numbers
        q = turned(moment, call.q, ahead, "compact") / length_of_turn(moment, "compact")
        visible = repeat_visible(moment)
        return replace(moment, call=AttentionCall(q, call.k, call.v, mask=visible, scale=call.scale))


def repeat_visible(moment: Moment) -> Bool[Tensor, "b h q k"] | None:
    """Every key that is held, for every query; None where all are."""
    if bool(moment.held.all()):
        return None
    n_q = moment.call.q.shape[2]
    return moment.held.repeat_interleave(moment.call.groups, 1).unsqueeze(2).expand(-1, -1, n_q, -1)
