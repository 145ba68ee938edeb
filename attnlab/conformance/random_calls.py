"""Seeded random attention calls: shapes, sizes of scores, masks, dtypes, grouping, causality, offsets and biases."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnlab.attention import AttentionCall

__all__ = ["RandomCall", "random_call", "random_calls"]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (1, 2, 3, 5, 8, 16, 31)
WIDTHS = (0, 1, 2, 3, 8, 16)
# The standard deviation of queries and of keys: with 30, scores reach some thousands.
SIZES = (0.0, 1e-4, 0.1, 1.0, 1.0, 3.0, 10.0, 30.0)
HIDING_NUMBERS = (-torch.inf, -1e4, -1e9)
# The width of x, for which parameters are made.
WIDTH_OF_X = 7


class RandomCall(NamedTuple):
    """A call, what it is in words, and how large its scores are."""

    description: str
    call: AttentionCall
    largest_score: float


def random_calls(seed: int, count: int) -> Iterator[RandomCall]:
    """``count`` calls; number i is the same for every mechanism, count and machine."""
    return (random_call(seed * 1_000_003 + i) for i in range(count))


def random_call(seed: int) -> RandomCall:
    """The call of one seed."""
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = choose.choice(DTYPES)
    b, g, groups = choose.randint(1, 2), choose.randint(1, 2), choose.choice((1, 1, 2, 3))
    n_q, n_k = choose.choice(LENGTHS), choose.choice(LENGTHS)
    n_q = n_k if choose.random() < 0.5 else n_q
    d, e = choose.choice(WIDTHS), choose.choice(WIDTHS)
    # torch has another kernel for keys and values of one width.
    e = d if choose.random() < 0.4 else e
    size_q, size_k = choose.choice(SIZES), choose.choice(SIZES)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def coins(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) < choose.choice((0.1, 0.5, 0.9))

    q, k = (size_q * normal(b, g * groups, n_q, d)).to(dtype), (size_k * normal(b, g, n_k, d)).to(dtype)
    pairs = (choose.choice((1, b)), choose.choice((1, g * groups)), n_q, n_k)
    causal = choose.random() < 0.5
    offset = choose.choice((0, 0, n_k - n_q, choose.randint(-3, 9))) if causal else 0
    key_visible = coins(b, n_k) if choose.random() < 0.4 else None
    mask = coins(*pairs) if choose.random() < 0.2 else None
    bias = normal(*pairs).to(dtype) if choose.random() < 0.2 else None
    if bias is not None and choose.random() < 0.5:
        least = choose.choice((*HIDING_NUMBERS, torch.finfo(dtype).min))
        bias = bias.masked_fill(coins(*pairs), max(least, torch.finfo(dtype).min) if least > -torch.inf else least)
    scale = choose.choice((None, None, 1.0, 0.3))
    v, x = normal(b, g, n_k, e).to(dtype), normal(b, n_k, WIDTH_OF_X).to(dtype)
    call = AttentionCall(q, k, v, x, key_visible, causal, offset, mask, bias, scale)
    largest = call.softmax_scale * float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max())
    parts = {
        "causal": causal, f"offset {offset}": bool(offset), "padded": key_visible is not None,
        "masked": mask is not None, "biased": bias is not None, f"scale {scale}": scale is not None,
    }  # fmt: skip
    shown = ", ".join(name for name, has in parts.items() if has) or "nothing hidden"
    description = (
        f"random call {seed}: {str(dtype)[6:]}, batch {b}, {g * groups} heads over {g}, {n_q} queries, {n_k} keys of "
        f"width {d}, values of width {e}, {size_q:g} randn queries, {size_k:g} randn keys, {shown}"
    )
    return RandomCall(description, call, largest)
