"""Decoding with a bounded key/value cache, by any policy of ``attnlab.caches``.

Keys keep the positions they were made with (a rotary model caches keys after rotation), and new tokens are numbered by
how many tokens were read, not by how many keys are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.protocol import adapter_of
from attnlab.attention import Mechanism
from attnlab.caches.kv_policy import KVPolicy, cache_policy
from attnlab.mechanisms.softmax import Softmax
from attnlab.shapes import Float, Int

__all__ = ["evicting", "perplexity", "refuse_other_attention", "refuse_prefill", "token_losses"]


def refuse_other_attention(name: str, mech: Mechanism) -> None:
    """Raise a ValueError if a layer does not attend by softmax, whose keys a policy ranks."""
    if not isinstance(mech, Softmax):
        raise ValueError(
            f"{name} attends by {mech!r}, but keys are evicted by their softmax attention; evict from the unconverted "
            "model, outside of swap"
        )


@contextmanager
def evicting(model: nn.Module, policy: KVPolicy | str) -> Iterator[Any]:
    """A cache of bounded size for a decoder whose attention is softmax; pass it to every call inside the context.

    Hugging Face: ``with evicting(model, "h2o:budget=64") as cache: model.generate(ids, past_key_values=cache)``.
    Our Transformer: ``greedy_search(model, ids, cache=cache, ...)``, ``beam_search`` or ``model(ids, cache=cache)``; an
    encoder-decoder keeps its whole source. A prompt attends to itself whole and is then cut to the budget. Prompts of
    different lengths may be padded: a row keeps what it keeps alone.
    """
    with adapter_of(model).evicting_cache(cache_policy(policy)) as cache:
        yield cache


def refuse_prefill(policy: KVPolicy) -> None:
    """Raise a ValueError if a policy that compresses a prompt is to read a text without one, token by token."""
    if policy.schedule == "prefill":
        raise ValueError(
            f"the cache policy {policy.by!r} drops keys once, after the prompt, and a text that is read token by token "
            "has none; add when=step to drop keys after every token"
        )


@torch.no_grad()
def token_losses(model: nn.Module, ids: Int[Tensor, "b n"], policy: KVPolicy | str | None) -> Float[Tensor, "b m"]:
    """-log p of every token but the first, teacher-forced and read one by one; without a policy in one pass."""
    adapter = adapter_of(model)
    if policy is None:
        logits = adapter.logits(ids[:, :-1]).float()
        return torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    policy = cache_policy(policy)
    refuse_prefill(policy)
    losses = []
    with adapter.evicting_cache(policy) as cache:
        for t in range(ids.shape[1] - 1):
            logits = adapter.logits(ids[:, t : t + 1], cache=cache)[:, -1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, ids[:, t + 1], reduction="none"))
    return torch.stack(losses, 1)


def perplexity(model: nn.Module, ids: Tensor, policy: KVPolicy | str | None, *, skip: int = 0) -> dict[str, float]:
    """Teacher-forced perplexity of (batch, length) token ids; the first ``skip`` targets do not count."""
    losses = token_losses(model, ids, policy)[:, skip:]
    return {"loss": float(losses.mean()), "perplexity": float(losses.mean().exp()), "tokens": losses.numel()}
