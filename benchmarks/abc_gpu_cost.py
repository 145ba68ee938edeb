"""Bytes and operations of ABC_MLP: the fewest there can be, and what attnlab's kernels move."""

from __future__ import annotations

from typing import Any

import torch

Row = dict[str, Any]


def cost(shape: tuple[int, ...], groups: int | None = None) -> Row:
    """The fewest bytes and operations: inputs and outputs once; 2nd for each of K~, V~, q K~, p V~ and gradients."""
    b, h, t, d, n = shape
    g = h if groups is None else groups
    token = 2 * b * t
    inputs = token * (h * d + g * (2 * d + n))
    return {
        "least MB forward": (inputs + token * h * d) / 1e6,
        "least MB both": (3 * inputs + 3 * token * h * d) / 1e6,
        "GFLOP forward": 8 * b * h * t * n * d / 1e9,
        "GFLOP both": 24 * b * h * t * n * d / 1e9,
    }


def traffic(shape: tuple[int, ...], groups: int | None = None, packed: int = 1, train: bool = True) -> dict[str, float]:
    """MB that each kernel reads and writes, if what one launch reads twice comes from the cache the second time.

    "saved" is what reading writes only for gradients. Bytes for the correction of rounding are not counted: there are
    nearly none unless single keys fill slots.
    """
    from attnlab.kernels.abc.plan import CallForm, plan_for, sum_walks, write_walks

    b, h, t, d, n = shape
    g = h if groups is None else groups
    plan = plan_for(d, n, torch.bfloat16, train)
    form = CallForm(True, packed == 1, packed > 1, False, groups=h // g)
    rows, chunks = b * packed * g, t // packed // plan.chunk
    write, back = len(write_walks(plan, form, rows, chunks)), len(sum_walks(plan, form, rows, chunks))
    # Bytes for each token: of width d and of n slots, for each query head and each key head; states are shared out.
    state, later = (2 * n * d * kind.itemsize / plan.chunk * g for kind in (plan.state_dtype, plan.sums_dtype))
    q, k, s, share, score = 2 * d * h, 2 * d * g, 2 * n * g, 2 * n * h, 4 * n * h
    per_token = {
        "weigh_logits": 2 * s,
        "write_states": write * (s + 2 * k) + state,
        "read_states": 2 * q + 2 * k + s + state,
        "saved": score,
        "query_gradients": 2 * q + 2 * k + s + state + 2 * score + 2 * share,
        "sum_back": back * (2 * q + 2 * share) + later,
        "key_gradients": 2 * q + 4 * k + 2 * s + score + 2 * share + later,
    }
    return {name: b * t * size / 1e6 for name, size in per_token.items()}


def moved(shape: tuple[int, ...], groups: int | None = None, packed: int = 1) -> Row:
    """What all kernels read and write: forward alone, without gradients, and both."""
    alone, both = (traffic(shape, groups, packed, train) for train in (False, True))
    forward = sum(alone[name] for name in ("weigh_logits", "write_states", "read_states"))
    return {"moved MB forward": forward, "moved MB both": sum(both.values())}
