"""Decoding with a bounded key/value cache: which keys to keep, chosen by what each adds to the output.

Keys keep the positions they were made with (a rotary model caches keys after rotation), and new tokens are numbered by
how many tokens were read, not by how many keys are left. Every key/value head evicts for itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, grouped
from attnlab.mechanisms.softmax import Softmax
from attnlab.shapes import Bool, Float, Int

__all__ = ["KVPolicy", "evicting", "keep_mask", "perplexity", "token_losses"]

RANKINGS = ("value-aware", "leave-one-out", "mass", "mass-norm", "recency", "random")
ATTENTION = "attnlab_evicting"


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
        if self.by not in RANKINGS:
            raise ValueError(f"by must be one of {', '.join(RANKINGS)}, got {self.by!r}")
        if isinstance(self.budget, bool) or not isinstance(self.budget, int) or self.budget < 1:
            raise ValueError(f"budget must be an int of at least 1 (the keys a head keeps), got {self.budget!r}")
        for name in ("recent", "sinks"):
            count = getattr(self, name)
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
                raise ValueError(f"{name} must be an int of at least 0, got {count!r}")
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


class _Memory:
    """What one layer remembers of its past queries, and the eviction that follows from it."""

    def __init__(self, policy: KVPolicy, layer: int) -> None:
        self.policy, self.layer = policy, layer
        self.gathered: Tensor | None = None
        self.outputs: Tensor | float = 0.0
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
            self.outputs = self.outputs + o.sum((2, 3))
            self.queries += o.shape[2] * o.shape[3]
            mean = (self.outputs / self.queries).unsqueeze(-1)
            return 2 * (v @ mean).squeeze(-1) - v.square().sum(-1)
        far = v.square().sum(-1)[:, :, None, None] - 2 * o @ v.unsqueeze(2).mT + o.square().sum(-1, keepdim=True)
        self.gathered = past + ((W / (1 - W).clamp_min(1e-6)).square() * far.clamp_min(0)).sum((2, 3))
        return self.gathered

    def evict(self, call: AttentionCall) -> Int[Tensor, "b g n"] | None:
        """The keys to keep after these queries; None while all of them fit."""
        rank = self.rank(call)
        if rank.shape[-1] <= self.policy.budget:
            return None
        kept = keep_mask(self.policy, rank)
        at = kept.nonzero()[:, -1].view(*rank.shape[:2], self.policy.budget)
        if self.gathered is not None:
            self.gathered = self.gathered.gather(-1, at)
        return at


@functools.cache
def _classes() -> tuple[type, type]:
    """The cache and its layer; made on first use, since they inherit from transformers' classes."""
    from transformers.cache_utils import Cache, DynamicLayer

    class EvictingLayer(DynamicLayer):
        """Keys and values that are left, and the number of tokens read."""

        is_croppable = False

        def __init__(self, policy: KVPolicy, layer: int) -> None:
            super().__init__()
            self.memory, self.seen = _Memory(policy, layer), 0

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.seen += key_states.shape[-2]
            return super().update(key_states, value_states, *args, **kwargs)

        def evict(self, call: AttentionCall) -> None:
            at = self.memory.evict(call)
            if at is not None:
                assert self.keys is not None
                assert self.values is not None
                self.keys, self.values = (t.gather(2, _wide(at, t)) for t in (self.keys, self.values))

        def get_seq_length(self, *_: Any) -> int:
            return self.seen

        def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
            length = query_length if isinstance(query_length, int) else query_length.shape[0]
            return self.seen + length, 0

        def crop(self, tokens_to_remove: int) -> None:
            raise ValueError("an evicting cache cannot be cropped: what it evicted is gone; decode without assistance")

    class EvictingCache(Cache):
        """A Hugging Face cache of bounded size; pass it as ``past_key_values``."""

        def __init__(self, policy: KVPolicy, layers: int) -> None:
            super().__init__(layers=[EvictingLayer(policy, i) for i in range(layers)])

        def kept(self) -> list[int]:
            """Keys held by each layer."""
            return [0 if layer.keys is None else layer.keys.shape[-2] for layer in self.layers]  # type: ignore[union-attr]

    return EvictingCache, EvictingLayer


def _wide(at: Tensor, t: Tensor) -> Tensor:
    return at.unsqueeze(-1).expand(*at.shape, t.shape[-1])


@contextmanager
def evicting(model: Any, policy: KVPolicy) -> Iterator[Any]:
    """A cache of bounded size for a decoder-only Hugging Face model, while its attention reports to the policy.

    ``with evicting(model, KVPolicy(64)) as cache: model.generate(ids, past_key_values=cache)``. A prompt attends to
    itself whole and is then cut to the budget. Padding is refused: rows would evict by tokens that do not exist.
    """
    from transformers import AttentionInterface

    cache = _classes()[0](policy, model.config.get_text_config(decoder=True).num_hidden_layers)

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **kwargs: Any) -> tuple[Tensor, None]:
        # The keys that are left come before the new ones, so the new ones see them all.
        call = AttentionCall(q, k, v, causal=True, offset=k.shape[2] - q.shape[2], scale=kwargs.get("scaling"))
        out = Softmax()(call)
        cache.layers[module.layer_idx].evict(call)
        return out.transpose(1, 2).contiguous(), None

    def refuse_padding(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
            raise ValueError("an evicting cache takes no padding; decode rows of one length, or one at a time")

    before = model.config._attn_implementation
    AttentionInterface.register(ATTENTION, attend)
    hook = model.register_forward_pre_hook(refuse_padding, with_kwargs=True)
    try:
        model.set_attn_implementation(ATTENTION)
        yield cache
    finally:
        model.set_attn_implementation(before)
        hook.remove()
        AttentionInterface._global_mapping.pop(ATTENTION, None)


@torch.no_grad()
def token_losses(model: Any, ids: Int[Tensor, "b n"], policy: KVPolicy | None) -> Float[Tensor, "b m"]:
    """-log p of every token but the first, teacher-forced and read one by one; without a policy in one pass."""
    if policy is None:
        logits = model(ids[:, :-1], use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    losses = []
    with evicting(model, policy) as cache:
        for t in range(ids.shape[1] - 1):
            logits = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits[:, -1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, ids[:, t + 1], reduction="none"))
    return torch.stack(losses, 1)


def perplexity(model: Any, ids: Tensor, policy: KVPolicy | None, *, skip: int = 0) -> dict[str, float]:
    """Teacher-forced perplexity of (batch, length) token ids; the first ``skip`` targets do not count."""
    losses = token_losses(model, ids, policy)[:, skip:]
    return {"loss": float(losses.mean()), "perplexity": float(losses.mean().exp()), "tokens": losses.numel()}
