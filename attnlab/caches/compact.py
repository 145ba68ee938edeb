"""Compaction: fewer keys with fitted biases and values in the place of all (Zweiger et al., 2026, arXiv 2602.16284)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, group_product, grouped
from attnlab.caches import KeyScore, Moment, policy
from attnlab.caches.compact_fit import References, fit
from attnlab.caches.contract import Refit, ranks, take_keys
from attnlab.caches.expected_attention import last_columns, length_of_turn, turned
from attnlab.fields import check_fields, check_int
from attnlab.shapes import Bool, Float, Int

__all__ = ["Compact"]

QUERIES = ("repeat", "prompt", "sampled")
CHOICES = ("mean-square", "largest")
# Of so many queries one is held out, to measure the fit by.
HELD_OUT = 8
# Keys are chosen by all reference queries, and fitted to those of at most so many tokens.
MOST = 1024
# What is noted of each reference query between the choice of keys and their fit.
NOTED = ("normalisers", "shares", "targets")


@policy(
    "compact",
    examples=("compact", "compact:queries=prompt,choose=largest", "compact:queries=sampled,future=7"),
)
@dataclass(frozen=True)
class Compact(KeyScore):
    """sum_i alpha_ij^2 over reference queries i; keys that stay get a bias b_j and a value u_j in place of v_j.

    With alpha over all keys and C those kept, w = exp(b) minimises sum_i (sum_{j in C} alpha_ij w_j - 1)^2, so that the
    mass of the prompt stays what it was beside later keys, then u minimises sum_i |o_i - o^_i|^2, where o^_i attends to
    C by alpha_ij w_j. Zweiger et al. were first; they also search for keys greedily and ask the model questions about
    the text. Ours fits shares of attention, pulls values towards what they were, and gives a head as many keys as it
    has among the largest max_i alpha_ij of all heads, as KVzip does (Kim et al., 2025, arXiv 2505.23416).

    ``queries``: "repeat" reads the prompt a second time behind itself, and takes the queries of that; "prompt" takes
    the prompt's own; "sampled" takes these turned to the next ``future`` positions, from where they see every key.
    ``choose``: "largest" keeps the keys of the largest max_i alpha_ij instead, as KVzip does.
    """

    queries: str = "repeat"
    choose: str = "mean-square"
    future: int = 512
    ridge: float = 0.01

    when = "prefill"
    layers = "shared"
    safeguard = 0.5
    sinks = 4

    def __post_init__(self) -> None:
        check_fields(self)
        check_int("future", self.future, least=1)
        if self.queries not in QUERIES:
            raise ValueError(f"queries must be one of {', '.join(QUERIES)}, got {self.queries!r}")
        if self.choose not in CHOICES:
            raise ValueError(f"choose must be one of {', '.join(CHOICES)}, got {self.choose!r}")
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
        references = self._references(moment)
        call, count, at = references.call, self._count(moment), self._fitted_at(references)
        v = call.v[:, :, :count]
        largest, squares = call.k.new_zeros(2, 1, 1, 1)
        noted: list[tuple[Tensor, ...]] = []
        first = 0
        for W in references.weights():
            largest, squares = largest.maximum(W.amax((2, 3))), squares + W.square().sum((2, 3))
            here = at[(at >= first) & (at < first + W.shape[3])] - first
            first += W.shape[3]
            rows = W[:, :, :, here]
            noted.append((*rows.max(-1), rows[..., :count].sum(-1), group_product(rows[..., :count], v)))
        alpha, place, share, target = (torch.cat(parts, 3).flatten(2, 3) for parts in zip(*noted, strict=True))
        # The score of a query with its best key says by what its exponentials were divided.
        best = (self._fitted_queries(references, at) * take_keys(call.k, place)).sum(-1)
        normaliser = call.softmax_scale * best - alpha.log()
        moment.gathered.per_row.update(dict(zip(NOTED, (normaliser, share, target), strict=True)))
        if self.choose == "largest":
            return largest[..., :count]
        # The budgets of heads are those of the largest alpha, and each takes its keys by the mean square.
        best_first = largest[..., :count].sort(dim=-1, descending=True).values
        return best_first.gather(-1, ranks(squares[..., :count]))

    def refit(self, moment: Moment, keep: Bool[Tensor, "b g k"]) -> Refit:
        count = keep.shape[-1]
        references = self._references(moment)
        call, at = references.call, self._fitted_at(references)
        normaliser, share, target = (moment.gathered.per_row.pop(name) for name in NOTED)
        fitted = references.numbers()[:, at] // self._stride(references) % HELD_OUT != HELD_OUT - 1
        last = (at + call.offset).repeat(call.groups) if call.causal else None
        q = self._fitted_queries(references, at)
        fitted = fitted.repeat(1, call.groups)
        queries = References(q, call.softmax_scale, normaliser, share, target, fitted, last)
        return fit(queries, call.k[:, :, :count], call.v[:, :, :count], keep, ridge=self.ridge)

    def _count(self, moment: Moment) -> int:
        """How many keys are to be compacted: all, but for those of the second reading."""
        return moment.call.k.shape[2] - (moment.call.q.shape[2] if self.reads_twice else 0)

    def _stride(self, references: Moment) -> int:
        # Rows of different lengths are not thinned out: each would need a stride of its own.
        return 1 if references.real is not None else -(-references.call.q.shape[2] // MOST)

    def _fitted_at(self, references: Moment) -> Int[Tensor, " c"]:
        """The queries that keys are fitted to: every so many-th of a long text."""
        return torch.arange(0, references.call.q.shape[2], self._stride(references), device=references.call.q.device)

    def _fitted_queries(self, references: Moment, at: Int[Tensor, " c"]) -> Float[Tensor, "b g m d"]:
        """Those queries, the heads of a group beside each other: they read the same keys."""
        return grouped(references.call.q[:, :, at], references.call.groups).flatten(2, 3)

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
        visible = _every_key(moment)
        return replace(moment, call=AttentionCall(q, call.k, call.v, mask=visible, scale=call.scale))


def _every_key(moment: Moment) -> Bool[Tensor, "b h q k"] | None:
    """Every key that is held, for every query; None where all are."""
    if bool(moment.held.all()):
        return None
    n_q = moment.call.q.shape[2]
    return moment.held.repeat_interleave(moment.call.groups, 1).unsqueeze(2).expand(-1, -1, n_q, -1)
