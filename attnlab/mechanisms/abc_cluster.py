"""ABC with clusters: keys are grouped by k-means, a slot holds the mean of a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.attention import AttentionCall
from attnlab.mechanisms._bounded.continued import visible_first
from attnlab.mechanisms._bounded.slots import Control, SlotMechanism, check_slots, one_hot
from attnlab.registry import register
from attnlab.shapes import Bool, Float, Int

__all__ = ["AbcCluster", "cluster"]

MOST_ROUNDS = 10_000


@register("abc-cluster", examples=("abc-cluster:slots=3",))
@dataclass(frozen=True)
class AbcCluster(SlotMechanism):
    """phi_i = sum_j M_ij / (sum_l M_lj) e_j, M the clusters of the keys, shared with the values (ABC, Eqs. 7-8).

    M is found without gradient by ``rounds`` of Lloyd's algorithm on each head's visible keys, from centres spread
    evenly over the sequence. With no more tokens than slots each token is its own cluster. Not causal: a later key
    moves the centres, and with them the cluster of an earlier one.
    """

    slots: int = 64
    rounds: int = 5

    normalise = "read"

    def __post_init__(self) -> None:
        check_slots(self.slots)
        if isinstance(self.rounds, bool) or not isinstance(self.rounds, int) or self.rounds < 0:
            raise ValueError(f"rounds must be an int of at least 0, got {self.rounds!r}")
        if self.rounds > MOST_ROUNDS:
            raise ValueError(f"rounds must be at most {MOST_ROUNDS}, since clusters settle before, got {self.rounds}")

    def cannot(self) -> dict[str, str]:
        why = "k-means looks at all keys, so a later key would move an earlier one to another slot; use abc-mlp"
        return {**super().cannot(), "causal": why}

    def control(self, call: AttentionCall, places: Int[Tensor, "b k"]) -> Control:
        """Membership of the keys."""
        k = call.k.detach().to(torch.promote_types(call.k.dtype, torch.float32))
        seen = torch.ones_like(places, dtype=torch.bool) if call.key_visible is None else call.key_visible
        return Control(one_hot(cluster(k, seen, self.slots, rounds=self.rounds), self.slots, k.dtype))


def cluster(
    k: Float[Tensor, "b g k d"], seen: Bool[Tensor, "b k"], clusters: int, *, rounds: int
) -> Int[Tensor, "b g k"]:
    """The cluster of each key; unseen keys have no influence, and theirs has no meaning."""
    b, g, n_k, _ = k.shape
    if n_k == 0:
        return torch.zeros(b, g, 0, dtype=torch.long, device=k.device)
    count = seen.sum(-1, keepdim=True)
    order = visible_first(seen)
    slot = torch.arange(clusters, device=k.device)
    # Fewer tokens than clusters: the last clusters stay empty.
    spread = torch.where(count > clusters, slot * count // clusters, slot)
    empty = (spread >= count)[:, None]
    first = order.gather(1, spread.clamp(max=n_k - 1))[:, None, :, None].expand(-1, g, -1, k.shape[3])
    centres = k.gather(2, first)
    nearest = _nearest(k, centres, empty)
    for _ in range(rounds):
        member = one_hot(nearest, clusters, k.dtype).exp() * seen[:, None, :, None]
        size = member.sum(2).unsqueeze(-1)
        centres = torch.where(size > 0, member.mT @ k / size.clamp(min=1), centres)
        nearest = _nearest(k, centres, empty)
    return nearest


def _nearest(k: Tensor, centres: Tensor, empty: Bool[Tensor, "b 1 n"]) -> Tensor:
    distance = centres.square().sum(-1).unsqueeze(2) - 2 * k @ centres.mT
    return distance.masked_fill(empty.unsqueeze(2), torch.inf).argmin(-1)
