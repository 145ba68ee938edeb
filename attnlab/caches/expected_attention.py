"""Expected Attention: the attention that queries still to come will pay (Devoto et al., 2025, arXiv 2510.00636)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlab.attention import grouped, repeat_groups
from attnlab.caches import KeyScore, Moment, policy
from attnlab.fields import check_fields, check_int
from attnlab.shapes import Bool, Float, Int

__all__ = ["ExpectedAttention", "last_columns", "length_of_turn", "turned"]


@policy("expected-attention", examples=("expected-attention:future=7", "expected-attention:future=7,covariance=false"))
@dataclass(frozen=True)
class ExpectedAttention(KeyScore):
    """E[alpha_j] |v_j|, with alpha_j ~ exp(s mu k_j + s^2 k_j Sigma k_j / 2) for queries of N(mu, Sigma).

    mu and Sigma are those of the queries so far before their rotation, the sinks' left out, turned by the mean rotation
    of the next ``future`` positions; s is the scale of the scores. Devoto et al. were the first to integrate over
    future queries. ``values=false`` leaves |v_j| out.
    """

    future: int = 512
    covariance: bool = True
    values: bool = True

    when = "prefill"
    sinks = 4

    def __post_init__(self) -> None:
        check_fields(self)
        check_int("future", self.future, least=1)

    def recent(self, budget: int) -> int:
        return 0

    def cannot(self) -> dict[str, str]:
        return {
            "mask": "the queries to come are supposed to see every key, and here some are hidden from later tokens",
            "bias": "what a position bias will be for queries to come is not known",
        }

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        call = moment.call
        mean, covariance = self._queries_to_come(moment)
        k, scale = repeat_groups(call.k, call.groups).to(mean.dtype), call.softmax_scale
        s = scale * (k @ mean.unsqueeze(-1)).squeeze(-1)
        if self.covariance:
            s = s + scale**2 / 2 * ((k @ covariance) * k).sum(-1)
        # The sinks stay in any case, and take no part of the mass.
        sink = moment.held & (moment.held.cumsum(-1) <= moment.per_row(moment.sinks))
        s = grouped(s, call.groups).masked_fill((sink | ~moment.held).unsqueeze(2), -torch.inf)
        expected = torch.softmax(s, -1).mean(2).nan_to_num(0).to(call.k.dtype)
        return expected * call.v.norm(dim=-1) if self.values else expected

    def _queries_to_come(self, moment: Moment) -> tuple[Float[Tensor, "b h d"], Float[Tensor, "b h d d"]]:
        """Mean and covariance of the queries of the next positions, in float64: differences of large sums."""
        columns = moment.column + torch.arange(moment.call.q.shape[2], device=moment.call.q.device)
        length = length_of_turn(moment, "expected-attention")
        q = self._turned(moment, moment.call.q, -columns[None]).double() / length**2
        counted = moment.numbers() >= moment.per_row(moment.sinks)[..., 0]
        counted = counted if moment.real is None else counted & moment.real
        q = q.masked_fill(~counted[:, None, :, None], 0)
        total = self._add(moment, "queries", counted.sum(-1).double()).clamp_min(1)
        mean = self._add(moment, "sum of queries", q.sum(2)) / total[:, None, None]
        square = self._add(moment, "squares of queries", q.mT @ q) / total[:, None, None, None]
        covariance = square - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        last = columns[-1].expand(q.shape[0])
        if moment.real is not None:
            last = last_columns(columns.expand_as(moment.real), moment.real, "expected-attention")
        turn = self._mean_turn(moment, last + 1)
        return (mean.unsqueeze(-2) @ turn).squeeze(-2), turn.mT @ covariance @ turn

    def _add(self, moment: Moment, name: str, more: Tensor) -> Tensor:
        """The sum over all calls so far."""
        rows = moment.gathered.per_row
        rows[name] = more + rows.get(name, 0)
        return rows[name]

    def _mean_turn(self, moment: Moment, first: Int[Tensor, " b"]) -> Float[Tensor, "b 1 d d"]:
        """The matrix that turns a row vector by the mean rotation of the positions from ``first`` on."""
        width = moment.call.q.shape[-1]
        basis = torch.eye(width, dtype=moment.call.q.dtype, device=first.device)
        positions = first[:, None] + torch.arange(self.future, device=first.device)
        vectors = basis[None, :, None].expand(len(first), -1, self.future, -1)
        return self._turned(moment, vectors, positions).double().mean(2).unsqueeze(1)

    def _turned(self, moment: Moment, t: Float[Tensor, "b h n d"], positions: Int[Tensor, "#b n"]) -> Tensor:
        return turned(moment, t, positions, "expected-attention")


def turned(moment: Moment, t: Float[Tensor, "b h n d"], positions: Int[Tensor, "#b n"], name: str) -> Tensor:
    """Vectors turned by so many positions; a ValueError where the policy of this name cannot know how."""
    if moment.place.no_rotation is not None:
        raise ValueError(f"{name} must turn queries to later positions: {moment.place.no_rotation}")
    rotate = moment.place.rotate
    return t if rotate is None else rotate(t, positions.expand(t.shape[0], -1))


def length_of_turn(moment: Moment, name: str) -> float:
    """By how much a rotation lengthens a vector (YaRN scales cosine and sine)."""
    unit = torch.zeros_like(moment.call.q[:1, :1, :1])
    unit[..., 0] = 1
    return float(turned(moment, unit, torch.zeros(1, 1, dtype=torch.long, device=unit.device), name).norm())


def last_columns(columns: Int[Tensor, "b q"], real: Bool[Tensor, "b q"], name: str) -> Int[Tensor, " b"]:
    """The column of each row's last token; a ValueError where padding stands between tokens."""
    last = columns.masked_fill(~real, -1).amax(-1)
    first = columns.masked_fill(~real, torch.iinfo(columns.dtype).max).amin(-1)
    if bool((last - first + 1 > real.sum(-1)).any()):
        raise ValueError(
            f"padding stands between the tokens of a prompt, so it is not known how far {name} must turn their "
            "queries; put the padding before or behind them"
        )
    return last
