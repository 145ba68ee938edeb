"""What a call says to a cache: which of its tokens are padding, its numbers in float32, and what a policy refuses."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, repeat_groups, visible
from attnlab.caches.kv_policy import KVPolicy
from attnlab.shapes import Bool

__all__ = ["plain_numbers", "real_tokens", "refuse"]


def real_tokens(call: AttentionCall) -> Bool[Tensor, "b q"] | None:
    """Which new columns are tokens and not padding, which nothing sees; None where all are."""
    b, h, n_q, n_k = call.sizes
    if call.mask is None and call.bias is None:
        # Flags need no mask of all pairs.
        real = None if call.key_visible is None else call.key_visible[:, n_k - n_q :]
        return None if real is None or bool(real.all()) else real
    seen = visible(call)
    assert seen is not None
    new = seen[..., n_k - n_q :].expand(b, h, n_q, n_q)
    real = new.diagonal(dim1=-2, dim2=-1).any(1)
    if bool(real.all()):
        return None
    if bool((new.any(2).any(1) & ~real).any()):
        raise ValueError(
            "a mask hides a token from itself but not from later ones; a cache that evicts takes masks in which every "
            "token sees itself, and padding that nothing sees"
        )
    return real


def plain_numbers(call: AttentionCall, held: Bool[Tensor, "b g k"] | None) -> AttentionCall:
    """The call in float32 or wider, where places without a key and padding hold zeros; None: there are none."""
    kind = torch.promote_types(call.q.dtype, torch.float32)
    if kind == call.q.dtype and held is None:
        return call
    k, v = call.k.to(kind), call.v.to(kind)
    if held is not None:
        k, v = (t.masked_fill(~held.unsqueeze(-1), 0) for t in (k, v))
    bias = None if call.bias is None else call.bias.to(kind)
    memory = None if call.memory is None else call.memory.to(kind)
    return replace(call, q=call.q.to(kind), k=k, v=v, x=None, bias=bias, memory=memory)


def _hides_keys(call: AttentionCall, held: Bool[Tensor, "b g k"], real: Bool[Tensor, "b q"] | None) -> bool:
    """Whether a key that is held is hidden from a later token, as by a sliding window."""
    seen = None if call.mask is None else visible(call)
    if seen is None:
        return False
    n_q, n_k = call.sizes[2:]
    later = torch.ones(n_q, n_k, dtype=torch.bool, device=seen.device).tril(n_k - n_q)
    expected = later & repeat_groups(held, call.groups).unsqueeze(2)
    if real is not None:
        expected = expected & real[:, None, :, None]
    return bool((expected & ~seen).any())


def refuse(
    policy: KVPolicy, call: AttentionCall, held: Bool[Tensor, "b g k"], real: Bool[Tensor, "b q"] | None
) -> None:
    """Raise a ValueError if the policy cannot honour this call."""
    cannot = policy.score.cannot()
    asked = {
        "padding": real is not None,
        "bias": call.bias is not None,
        "mask": "mask" in cannot and _hides_keys(call, held, real),
    }
    for what, why in cannot.items():
        if asked.get(what):
            raise ValueError(f"the cache policy {policy.by!r} cannot take this call ({what}): {why}")
