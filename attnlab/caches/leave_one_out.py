"""Leave one out: the keys whose removal moves the output most; CAOTE's criterion (Goel et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnlab.attention import group_product
from attnlab.caches import KeyScore, Moment, policy
from attnlab.shapes import Float

__all__ = ["LeaveOneOut"]


@policy("leave-one-out")
@dataclass(frozen=True)
class LeaveOneOut(KeyScore):
    """sum_i (alpha_ij / (1 - alpha_ij))^2 |v_j - o_i|^2: what query i's output o_i loses without key j, squared.

    The error of one query, alpha / (1 - alpha) |v - o|, is CAOTE's (Goel et al., 2025, arXiv 2504.14051),
    who were first. Ours is that it is summed, in squares, over all queries so far and over the heads of a group; they
    take the weights of another policy in alpha's place.
    """

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        v = moment.call.v
        lengths = v.square().sum(-1)[:, :, None, None]
        lost = moment.call.k.new_zeros(())
        for W in moment.weights():
            o = group_product(W, v)
            far = lengths - 2 * group_product(o, v.mT) + o.square().sum(-1, keepdim=True)
            lost = lost + ((W / (1 - W).clamp_min(1e-6)).square() * far.clamp_min(0)).sum((2, 3))
        return moment.add("lost", lost)
