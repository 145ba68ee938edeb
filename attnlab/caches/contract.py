"""The contract of cache policies: a ``KeyScore`` ranks keys, given the ``Moment`` after a call of attention.

A policy is one file of this room: a small dataclass with the paper, the equation and who was first, and one method,
``score``. What all policies share is elsewhere: budgets, sinks, recent keys and schedules in ``kv_policy``, the
bookkeeping of which keys are left in ``kept_keys``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, grouped, query_chunks
from attnlab.mechanisms.softmax import Softmax
from attnlab.shapes import Bool, Float, Int, Shaped
from attnlab.summaries import short_repr

__all__ = ["Gathered", "KeyScore", "Moment", "Place", "Refit", "Rotate", "ranks", "take_keys", "with_zeros"]

# (vectors (b, h, n, d), their positions (b, n)) -> the vectors as the model's rotary positions turn them.
Rotate = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Place:
    """Where in the model a layer's keys are, for policies that look beyond the call."""

    layer: int = 0
    layers: int = 1
    # The weight of W_O, (m, h*e); None where it is not known.
    projection: Float[Tensor, "m he"] | None = None
    # None where queries and keys are not turned by their positions.
    rotate: Rotate | None = None
    # Why ``rotate`` could not be found where the model does turn them.
    no_rotation: str | None = None

    __repr__ = short_repr


@dataclass(eq=False)
class Gathered:
    """What a policy has gathered in one layer: tensors that follow the keys, and tensors that follow the rows.

    Between calls those that follow the keys lie beside them, where no head is padded to the length of another.
    """

    per_key: dict[str, Shaped[Tensor, "b g k ..."]] = field(default_factory=dict)
    per_row: dict[str, Shaped[Tensor, "b ..."]] = field(default_factory=dict)

    __repr__ = short_repr

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Make row i of the batch what row ``rows[i]`` was."""
        self.per_row.update({name: t[rows.to(t.device)] for name, t in self.per_row.items()})


@dataclass(frozen=True, eq=False)
class Moment:
    """What a policy is given after each call: the call over all keys held, what was gathered, and the budget.

    Keys and values are in float32 or wider, and those of ``~held`` are zero. The call's queries are those of the tokens
    just read, whose keys are the last ones.
    """

    call: AttentionCall
    # Which keys are there: heads and rows may hold different numbers, and padding is never held.
    held: Bool[Tensor, "b g k"]
    # Which queries are tokens; None where all are.
    real: Bool[Tensor, "b q"] | None
    # Tokens read in each row before this call, and its column in the text as the model was given it.
    read_before: tuple[int, ...]
    column: int
    # How many keys a head may keep, and how many of the first and of the last ones stay; one number for each row.
    budgets: tuple[int, ...]
    sinks: tuple[int, ...]
    recent: tuple[int, ...]
    gathered: Gathered
    place: Place = field(default_factory=Place)
    seed: int = 0
    # Whether this is the only time that the policy is asked.
    once: bool = False

    __repr__ = short_repr

    @functools.cached_property
    def sure(self) -> Bool[Tensor, "b g k"]:
        """The keys that stay whatever their score: sinks and recent ones."""
        place = self.held.cumsum(-1) - 1
        late = self.held.sum(-1, keepdim=True) - self.per_row(self.recent)
        return self.held & ((place < self.per_row(self.sinks)) | (place >= late))

    @property
    def read(self) -> tuple[int, ...]:
        """Tokens read in each row, those of this call included."""
        new = [self.call.q.shape[2]] * len(self.read_before) if self.real is None else self.real.sum(-1).tolist()
        return tuple(before + more for before, more in zip(self.read_before, new, strict=True))

    def per_row(self, numbers: Sequence[float]) -> Tensor:
        """One number for each row as a tensor (b, 1, 1)."""
        return torch.tensor(numbers, device=self.call.k.device)[:, None, None]

    def numbers(self) -> Int[Tensor, "b q"]:
        """The number of each query's token in its row, from 0; padding has that of the token before it."""
        b, _, n_q, _ = self.call.sizes
        if self.real is None:
            place = torch.arange(n_q, device=self.call.q.device).expand(b, -1)
        else:
            place = (self.real.cumsum(-1) - 1).clamp_min(0)
        return place + self.per_row(self.read_before)[..., 0]

    def weights(self) -> Iterator[Float[Tensor, "b g r c k"]]:
        """W of the queries in chunks, the query heads beside the key/value head that they read; of padding, zeros."""
        first = 0
        for part in query_chunks(self.call):
            W = _causal_weights(part)
            real = None if self.real is None else self.real[:, None, first : first + W.shape[2], None]
            first += W.shape[2]
            yield grouped(W if real is None else W.masked_fill(~real, 0), self.call.groups)

    def last_weights(self, count: int) -> Float[Tensor, "b g r c k"]:
        """W of each row's last ``count`` tokens of this call, oldest first; rows with fewer begin with zeros."""
        b, h, n_q, n_k = self.call.sizes
        count = min(count, n_q)
        if self.real is None:
            at = torch.arange(n_q - count, n_q, device=self.call.q.device).expand(b, -1)
        else:
            # Padding first, tokens in their order after it.
            at = self.real.to(torch.int8).argsort(dim=-1, stable=True)[:, n_q - count :]
        rows = at[:, None, :, None]
        seen = None if self.call.causal is False else self._causal_rows(at)
        mask, bias = (
            None if t is None else t.expand(b, h, n_q, n_k).gather(2, rows.expand(-1, h, -1, n_k))
            for t in (self.call.mask, self.call.bias)
        )
        if seen is not None:
            mask = seen if mask is None else mask & seen
        q = self.call.q.gather(2, rows.expand(-1, h, -1, self.call.q.shape[-1]))
        W = Softmax().weights(replace(self.call, q=q, mask=mask, bias=bias, causal=False, offset=0, x=None))
        if self.real is not None:
            W = W.masked_fill(~self.real.gather(1, at)[:, None, :, None], 0)
        return grouped(W, self.call.groups)

    def _causal_rows(self, at: Int[Tensor, "b c"]) -> Bool[Tensor, "b 1 c k"]:
        keys = torch.arange(self.call.k.shape[2], device=at.device)
        return (keys <= (at + self.call.offset)[..., None])[:, None]

    def past(self, name: str) -> Tensor:
        """What was gathered under a name, (b, g, k, ...) with zeros for the new keys; zeros where it is new itself."""
        shape = self.call.k.shape[:3]
        known = self.gathered.per_key.get(name)
        return self.call.k.new_zeros(shape) if known is None else with_zeros(known, shape[2])

    def add(self, name: str, more: Float[Tensor, "b g k"]) -> Float[Tensor, "b g k"]:
        """Add to what was gathered under a name: the sum over all calls so far."""
        self.gathered.per_key[name] = total = self.past(name) + more
        return total


@dataclass(frozen=True, eq=False)
class Refit:
    """What a policy puts in the place of the keys it keeps, at their places; what stands elsewhere is not looked at.

    ``bias`` is added to the scores of every later query with a key; ``certificate`` says how good the replacement is.
    """

    k: Float[Tensor, "b g k d"]
    v: Float[Tensor, "b g k e"]
    bias: Float[Tensor, "b g k"]
    certificate: Any = None

    __repr__ = short_repr


class KeyScore:
    """A way to rank keys. A subclass writes ``score``; every other member has a default."""

    # What the paper does, where the user does not say: when keys are dropped ("step": after every call; "prefill":
    # once, after the first call, which reads the prompt), how budgets spread over layers, and first keys that stay.
    when: str = "step"
    layers: str = "even"
    sinks: int = 0
    # The share of its own budget that a head keeps in any case where heads share theirs.
    safeguard: float = 0.2
    # Whether it must see the prompt a second time, with all keys at hand, before keys are dropped.
    reads_twice: bool = False

    def score(self, moment: Moment) -> Float[Tensor, "b g k"]:
        """The larger, the rather a key is kept; equal scores keep the later key."""
        raise NotImplementedError

    def refit(self, moment: Moment, keep: Bool[Tensor, "b g k"]) -> Refit | None:
        """What replaces the keys that stay, where some are dropped; None, the default: they stay as they are."""
        return None

    def recent(self, budget: int) -> int:
        """How many of the latest keys stay whatever their score, of a budget without sinks: by default half."""
        return math.ceil(budget / 2)

    def least_recent(self) -> int:
        """The fewest recent keys that the policy can work with."""
        return 0

    def cannot(self) -> dict[str, str]:
        """What it refuses: {what: why}, where what is mask, bias, padding, step or shared."""
        return {}


def _causal_weights(call: AttentionCall) -> Float[Tensor, "b h q k"]:
    """W of some queries; keys after the last of them are not computed, since causality hides them."""
    n_q, n_k = call.sizes[2:]
    last = call.offset + n_q
    if not call.causal or last >= n_k or call.mask is not None or call.bias is not None:
        return Softmax().weights(call)
    visible = None if call.key_visible is None else call.key_visible[:, :last]
    first = replace(call, k=call.k[:, :, :last], v=call.v[:, :, :last], key_visible=visible, x=None)
    return torch.nn.functional.pad(Softmax().weights(first), (0, n_k - last))


def take_keys(t: Shaped[Tensor, "b g k ..."], at: Int[Tensor, "b g n"]) -> Shaped[Tensor, "b g n ..."]:
    """What belongs to the keys at these places."""
    index = at.reshape(*at.shape, *[1] * (t.dim() - 3)).expand(*at.shape, *t.shape[3:])
    return t.gather(2, index)


def with_zeros(t: Shaped[Tensor, "b g n ..."], count: int) -> Shaped[Tensor, "b g k ..."]:
    """What belongs to ``count`` keys, of which ``t`` has the first; zeros for the others."""
    return torch.cat([t, t.new_zeros(*t.shape[:2], count - t.shape[2], *t.shape[3:])], 2)


def ranks(score: Float[Tensor, "*rows k"]) -> Int[Tensor, "*rows k"]:
    """The place of each key when the best comes first; equal scores put the later key first.

    >>> ranks(torch.tensor([5.0, 9.0, 5.0])).tolist()
    [2, 0, 1]
    """
    order = score.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    numbers = torch.arange(score.shape[-1], device=score.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, numbers).flip(-1)
