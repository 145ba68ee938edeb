"""The policies that tests run over."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlab.attention import AttentionCall
from attnlab.caches.contract import Gathered, Moment
from attnlab.caches.kv_policy import KVPolicy, keep_masks
from attnlab.caches.registry import cache_policy_names, entry_of

__all__ = ["EXAMPLES", "RANKINGS", "kept_of_scores"]

# Those that drop keys after every step and take any budget, under the names of the table in the guide.
RANKINGS = ("value-aware", "leave-one-out", "mass", "mass-norm", "recency", "random")
EXAMPLES = [spec for name in cache_policy_names() for spec in entry_of(name)[0].examples]


def kept_of_scores(policy: KVPolicy, score: Tensor) -> Tensor:
    """Which keys a policy keeps whose scores are these, (b, g, k)."""
    rows = score.shape[0]
    sinks, recent, _ = policy.split()
    moment = Moment(
        call=AttentionCall(torch.zeros(*score.shape[:2], 1, 1), score.unsqueeze(-1), score.unsqueeze(-1)),
        held=torch.ones_like(score, dtype=torch.bool),
        real=None,
        read_before=(score.shape[2] - 1,) * rows,
        column=score.shape[2] - 1,
        budgets=(int(policy.budget),) * rows,
        sinks=(sinks,) * rows,
        recent=(recent,) * rows,
        gathered=Gathered(),
    )
    return keep_masks(policy, [moment], [score])[0]
