"""Attention calls on tiny shapes with distinct primes, one for each situation that a mechanism meets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from attnlab.attention import AttentionCall, Mechanism
from attnlab.shapes import Bool

__all__ = [
    "B",
    "D",
    "E",
    "H",
    "K",
    "M",
    "Q",
    "accepts",
    "cross_call",
    "long_situations",
    "padding",
    "refusal",
    "self_call",
    "situations",
    "stacked",
]

B, H, Q, K, D, E, M = 2, 3, 5, 7, 11, 13, 17
# Beyond the 64 tokens that are the least that mechanisms work on at once.
LONG = 67


def self_call(
    dtype: torch.dtype = torch.float64,
    *,
    length: int = Q,
    **sizes: Any,
) -> AttentionCall:
    """Self-attention over ``length`` tokens, nothing hidden; ``sizes`` are those of ``cross_call``."""
    return cross_call(dtype, queries=length, keys=length, **sizes)


def cross_call(
    dtype: torch.dtype = torch.float64,
    *,
    queries: int = Q,
    keys: int = K,
    heads: int = H,
    groups: int = 1,
    batch: int = B,
    widths: tuple[int, int, int] = (D, E, M),
) -> AttentionCall:
    """Attention of ``queries`` over ``keys`` of another sequence, nothing hidden.

    ``widths`` are those of keys, values and x.
    """
    d, e, m = widths

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    return AttentionCall(
        draw(batch, heads, queries, d),
        draw(batch, heads // groups, keys, d),
        draw(batch, heads // groups, keys, e),
        x=draw(batch, keys, m),
    )


def padding(rows: list[list[int]]) -> Bool[Tensor, "b k"]:
    """key_visible from rows of zeros and ones."""
    return torch.tensor(rows, dtype=torch.bool)


def situations(dtype: torch.dtype = torch.float64) -> dict[str, AttentionCall]:
    """Every situation by name; a mechanism may refuse some (``cannot``)."""
    plain, cross = self_call(dtype), cross_call(dtype)
    long = self_call(dtype, length=K)
    left_and_middle = padding([[0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 0]])
    mask = torch.rand(B, H, K, K) > 0.4
    mask[0, 0, 1] = False
    mask[1, :, :, 2] = False
    hiding_bias = torch.randn(B, 1, K, K).to(dtype).masked_fill(~mask[:, :1], torch.finfo(dtype).min)
    cached = replace(cross, causal=True, offset=K - Q)
    return {
        "encoder": plain,
        "padded encoder": replace(long, key_visible=left_and_middle),
        "all hidden": replace(long, key_visible=padding([[0] * K, [1] * K])),
        "causal": replace(plain, causal=True),
        "padded causal": replace(long, causal=True, key_visible=left_and_middle),
        "cached": cached,
        "padded cached": replace(cached, key_visible=left_and_middle),
        "cross": cross,
        "padded cross": replace(cross, key_visible=left_and_middle),
        "grouped": self_call(dtype, heads=6, groups=2),
        "grouped causal": replace(self_call(dtype, heads=6, groups=2), causal=True),
        "masked": replace(long, mask=mask),
        "masked causal": replace(long, mask=mask, causal=True, key_visible=left_and_middle),
        "biased": replace(long, bias=torch.randn(1, H, K, K, dtype=torch.float64).to(dtype)),
        "masked in the bias": replace(long, causal=True, bias=hiding_bias),
        "scaled": replace(plain, scale=0.7),
        "one token": self_call(dtype, length=1),
        "one key": cross_call(dtype, keys=1),
        "queries before the keys": replace(cross, causal=True, offset=-2),
    }


def long_situations() -> dict[str, AttentionCall]:
    """Sequences beyond what mechanisms work on at once: 64 tokens, or as few as ``small_chunks`` says."""
    narrow = (5, 3, 7)
    long = self_call(length=LONG, batch=1, widths=narrow)
    seen = torch.rand(1, LONG) > 0.2
    return {
        "long": long,
        # As in the first layer of a model with rotary positions, where equal tokens have equal values.
        "long causal with repeated values": replace(long, v=long.v[:, :, torch.randint(11, (LONG,))], causal=True),
        "long padded causal": replace(long, causal=True, key_visible=seen),
        "long masked": replace(long, mask=torch.rand(1, H, LONG, LONG) > 0.4),
        "long biased": replace(long, bias=torch.randn(1, H, LONG, LONG, dtype=torch.float64)),
        # Some mechanisms treat lengths that are multiples of 8 in another way.
        "long cross": cross_call(queries=29, keys=128, batch=1, widths=narrow),
    }


def stacked(calls: Sequence[AttentionCall]) -> AttentionCall:
    """Calls of equal shapes and settings as one call, with their batches one after another."""
    first, b = calls[0], calls[0].q.shape[0]
    joined: dict[str, Any] = {}
    for field in fields(first):
        if isinstance(getattr(first, field.name), Tensor):
            parts = [getattr(call, field.name) for call in calls]
            joined[field.name] = torch.cat([part.expand(b, *part.shape[1:]) for part in parts])
    return replace(first, **joined)


def refusal(mech: Mechanism, call: AttentionCall) -> str | None:
    """Why the mechanism refuses this call; None if it takes it."""
    try:
        mech.refuse(call)
    except ValueError as error:
        return str(error)
    return None


def accepts(mech: Mechanism, call: AttentionCall) -> bool:
    """Whether the mechanism takes this call."""
    return refusal(mech, call) is None
