"""Decoding with a bounded key/value cache: which keys to keep, chosen by how much each adds to the output.

Keys keep the positions they were made with (a rotary model caches keys after rotation), and new tokens are numbered by
how many tokens were read, not by how many keys are left. Every key/value head evicts for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.protocol import adapter_of
from attnlab.attention import AttentionCall, Mechanism, grouped
from attnlab.fields import check_fields, check_int, expect
from attnlab.mechanisms.softmax import Softmax
from attnlab.shapes import Bool, Float, Int

__all__ = [
    "KVPolicy",
    "KeyRanking",
    "evicting",
    "keep_mask",
    "keep_positions",
    "perplexity",
    "refuse_other_attention",
    "refuse_padding",
    "token_losses",
]

RANKINGS = ("value-aware", "leave-one-out", "mass", "mass-norm", "recency", "random")


@dataclass(frozen=True)
class KVPolicy:
    """Keep ``budget`` keys per head: the last ``recent``, the first ``sinks``, and the best of the rest by ``by``.

    ``value-aware`` keeps the values nearest to the mean output, |v_i|^2 - 2 <v_i, o> (OVA, Eq. 3's ranking, summed over
    queries); ``leave-one-out`` the keys whose removal moves the output most, alpha_i / (1 - alpha_i) |v_i - o|, summed
    in squares; ``mass`` those of largest summed alpha (H2O, Zhang et al., 2023), ``mass-norm`` of that times |v_i|_1
    (VATP, Guo et al., 2024); ``recency`` the latest (StreamingLLM, Xiao et al., 2024); ``random`` any. By default half
    of the budget is recent, and only ``recency`` has sinks (4).

    >>> KVPolicy(64, by="mass").split()
    (0, 32, 32)
    """

    budget: int
    by: str = "leave-one-out"
    recent: int | None = None
    sinks: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.by not in RANKINGS:
            raise ValueError(f"by must be one of {', '.join(RANKINGS)}, got {self.by!r}")
        check_int("budget", self.budget, least=1)
        for name in ("recent", "sinks"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least=0)
        if (self.recent or 0) + (self.sinks or 0) > self.budget:
            raise ValueError(f"recent={self.recent} and sinks={self.sinks} exceed the budget of {self.budget} keys")

    def split(self) -> tuple[int, int, int]:
        """How many keys are kept as sinks, as recent, and by rank."""
        sinks = self.sinks if self.sinks is not None else (min(4, self.budget // 2) if self.by == "recency" else 0)
        recent = self.recent
        if recent is None:
            recent = self.budget - sinks if self.by == "recency" else min(self.budget - sinks, -(-self.budget // 2))
        return sinks, recent, self.budget - sinks - recent


def keep_mask(policy: KVPolicy, rank: Float[Tensor, "b g k"]) -> Bool[Tensor, "b g k"]:
    """The keys to keep, the larger the rank the better, equal ranks to the later key; exactly ``budget`` in a row.

    >>> keep_mask(KVPolicy(2, recent=1), torch.tensor([[[5.0, 9.0, 7.0, 1.0]]])).tolist()
    [[[False, True, False, True]]]
    """
    n = rank.shape[-1]
    if n <= policy.budget:
        return torch.ones_like(rank, dtype=torch.bool)
    sinks, recent, _ = policy.split()
    at = torch.arange(n, device=rank.device)
    sure = (at < sinks) | (at >= n - recent)
    rank = rank.masked_fill(sure, torch.inf).flip(-1)
    order = rank.sort(dim=-1, descending=True, stable=True).indices[..., : policy.budget]
    return torch.zeros_like(rank, dtype=torch.bool).scatter(-1, order, True).flip(-1)


class KeyRanking:
    """What one layer gathers from its past queries to rank its keys, and the eviction that follows from it."""

    def __init__(self, policy: KVPolicy, layer: int) -> None:
        self.policy, self.layer = policy, layer
        self.gathered: Tensor | None = None
        self.outputs: Tensor | None = None
        self.queries = 0
        self.draws = torch.Generator().manual_seed(policy.seed * 1009 + layer)

    def rank(self, call: AttentionCall) -> Float[Tensor, "b g k"]:
        """The policy's rank of every key, after these queries too."""
        v = call.v.float()
        past = torch.zeros(v.shape[:3], device=v.device)
        if self.gathered is not None:
            past[..., : self.gathered.shape[-1]] = self.gathered
        if self.policy.by == "recency":
            return past
        if self.policy.by == "random":
            known = 0 if self.gathered is None else self.gathered.shape[-1]
            fresh = torch.rand(past[..., known:].shape, generator=self.draws).to(v.device)
            self.gathered = torch.cat([past[..., :known], fresh], -1)
            return self.gathered
        W = grouped(Softmax().weights(call).float(), call.groups)
        if self.policy.by in ("mass", "mass-norm"):
            self.gathered = past + W.sum((2, 3))
            return self.gathered * (v.abs().sum(-1) if self.policy.by == "mass-norm" else 1)
        o = W @ v.unsqueeze(2)
        if self.policy.by == "value-aware":
            self.gathered = past
            summed = o.sum((2, 3))
            self.outputs = summed if self.outputs is None else self.outputs + summed
            self.queries += o.shape[2] * o.shape[3]
            mean = (self.outputs / self.queries).unsqueeze(-1)
            return 2 * (v @ mean).squeeze(-1) - v.square().sum(-1)
        far = v.square().sum(-1)[:, :, None, None] - 2 * o @ v.unsqueeze(2).mT + o.square().sum(-1, keepdim=True)
        self.gathered = past + ((W / (1 - W).clamp_min(1e-6)).square() * far.clamp_min(0)).sum((2, 3))
        return self.gathered

    def kept_after(self, call: AttentionCall) -> Int[Tensor, "b g n"] | None:
        """The keys to keep after these queries; None while all of them fit."""
        rank = self.rank(call)
        if rank.shape[-1] <= self.policy.budget:
            return None
        kept = keep_mask(self.policy, rank)
        at = kept.nonzero()[:, -1].view(*rank.shape[:2], self.policy.budget)
        if self.gathered is not None:
            self.gathered = self.gathered.gather(-1, at)
        return at

    def select(self, rows: Int[Tensor, " n"]) -> None:
        """Make row i of the batch what row ``rows[i]`` was."""
        if self.gathered is not None:
            self.gathered = self.gathered[rows.to(self.gathered.device)]
        if self.outputs is not None:
            self.outputs = self.outputs[rows.to(self.outputs.device)]


def keep_positions(t: Float[Tensor, "b g k d"], at: Int[Tensor, "b g n"]) -> Float[Tensor, "b g n d"]:
    """The keys or values at these positions."""
    return t.gather(2, at.unsqueeze(-1).expand(*at.shape, t.shape[-1]))


def refuse_other_attention(name: str, mech: Mechanism) -> None:
    """Raise a ValueError if a layer does not attend by softmax, whose weights rank the keys."""
    if not isinstance(mech, Softmax):
        raise ValueError(
            f"{name} attends by {mech!r}, but keys are evicted by their softmax attention; evict from the unconverted "
            "model, outside of swap"
        )


def refuse_padding(mask: Tensor) -> None:
    """Raise a ValueError if a mask of tokens hides any."""
    if not bool(mask.all()):
        raise ValueError("an evicting cache takes no padding; decode rows of one length, or one at a time")


@contextmanager
def evicting(model: nn.Module, policy: KVPolicy) -> Iterator[Any]:
    """A cache of bounded size for a decoder whose attention is softmax; pass it to every call inside the context.

    Hugging Face: ``with evicting(model, KVPolicy(64)) as cache: model.generate(ids, past_key_values=cache)``.
    Our Transformer: ``greedy_search(model, ids, cache=cache, ...)``, ``beam_search`` or ``model(ids, cache=cache)``; an
    encoder-decoder keeps its whole source. A prompt attends to itself whole and is then cut to the budget. Padding is
    refused: rows would evict by tokens that do not exist.
    """
    expect("policy", policy, KVPolicy, "a KVPolicy, such as KVPolicy(budget=64)")
    with adapter_of(model).evicting_cache(policy) as cache:
        yield cache


@torch.no_grad()
def token_losses(model: nn.Module, ids: Int[Tensor, "b n"], policy: KVPolicy | None) -> Float[Tensor, "b m"]:
    """-log p of every token but the first, teacher-forced and read one by one; without a policy in one pass."""
    adapter = adapter_of(model)
    if policy is None:
        logits = adapter.logits(ids[:, :-1]).float()
        return torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    losses = []
    with adapter.evicting_cache(policy) as cache:
        for t in range(ids.shape[1] - 1):
            logits = adapter.logits(ids[:, t : t + 1], cache=cache)[:, -1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, ids[:, t + 1], reduction="none"))
    return torch.stack(losses, 1)


def perplexity(model: nn.Module, ids: Tensor, policy: KVPolicy | None, *, skip: int = 0) -> dict[str, float]:
    """Teacher-forced perplexity of (batch, length) token ids; the first ``skip`` targets do not count."""
    losses = token_losses(model, ids, policy)[:, skip:]
    return {"loss": float(losses.mean()), "perplexity": float(losses.mean().exp()), "tokens": losses.numel()}
