"""Attention calls on tiny shapes with distinct primes, one per situation a mechanism meets."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnlab import AttentionCall, Mechanism

B, H, Q, K, D, E, M = 2, 3, 5, 7, 11, 13, 17


def self_call(dtype: torch.dtype = torch.float64, *, length: int = Q, heads: int = H, groups: int = 1) -> AttentionCall:
    """Self-attention over ``length`` tokens, nothing hidden."""
    return cross_call(dtype, queries=length, keys=length, heads=heads, groups=groups)


def cross_call(
    dtype: torch.dtype = torch.float64, *, queries: int = Q, keys: int = K, heads: int = H, groups: int = 1
) -> AttentionCall:
    """Attention of ``queries`` over ``keys`` of another sequence, nothing hidden."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    return AttentionCall(
        draw(B, heads, queries, D),
        draw(B, heads // groups, keys, D),
        draw(B, heads // groups, keys, E),
        x=draw(B, keys, M),
    )


def padding(rows: list[list[int]]) -> torch.Tensor:
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
        "biased causal": replace(long, causal=True, bias=torch.randn(B, 1, K, K, dtype=torch.float64).to(dtype)),
        "scaled": replace(plain, scale=0.7),
        "one token": self_call(dtype, length=1),
        "one key": cross_call(dtype, keys=1),
        "queries before the keys": replace(cross, causal=True, offset=-2),
    }


def accepts(mech: Mechanism, call: AttentionCall) -> bool:
    """Whether the mechanism takes this call at all."""
    try:
        mech.refuse(call)
    except ValueError:
        return False
    return True
