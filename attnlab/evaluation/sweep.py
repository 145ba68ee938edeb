"""``attnlab compare --sweep r``: OVA's Figures 1 and 2 for the user's own model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm import tqdm

from attnlab.adapters import LoadedModel, swap
from attnlab.attention import Mechanism, query_chunks
from attnlab.evaluation.quality import Windows, quality
from attnlab.mechanisms.value_aware import ValueAware
from attnlab.reading.approximation import approximation_error
from attnlab.registry import mechanism
from attnlab.trace import Trace

__all__ = ["powers_of_two", "sweep", "sweep_r"]

FAMILIES = ("top-r", "value-aware", "window", "lsh")


@torch.no_grad()
def sweep_r(
    loaded: LoadedModel, windows: Windows, trace: Trace, *, batch: int, patience: float = 60.0
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """({family: [{r, quality, output_error}]}, what was left out and why), over r = 1, 2, 4, ... and d + 1.

    Value-aware attention is the paper's at r = 1 and r = d + 1; between them a support is searched for, which is left
    out where that would take more than ``patience`` seconds.
    """
    layers = list(trace)
    length, width = windows.input_ids.shape[1], layers[0].call.v.shape[-1]
    every = sorted({*powers_of_two(length), min(width + 1, length)})

    def measured(mech: Any) -> float | None:
        with swap(loaded.model, mech):
            result = quality(loaded, windows, batch=batch)
        return None if result is None else result["value"]

    sweeps: dict[str, list[dict[str, Any]]] = {}
    notes: list[str] = []
    for family in FAMILIES:
        steps = every if family != "value-aware" else _affordable(trace, every, windows, patience, notes)
        sweeps |= sweep(trace, r=steps, quality=measured, families=(family,))
        missing = [r for r in steps if r not in {row["r"] for row in sweeps.get(family, [])}]
        if missing:
            notes.append(f"{family}: not possible here with r = {', '.join(map(str, missing))}")
    return sweeps, notes


def powers_of_two(length: int) -> tuple[int, ...]:
    """1, 2, 4, ... below ``length``, and ``length`` itself, with which every family is exact.

    >>> powers_of_two(12)
    (1, 2, 4, 8, 12)
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    return (*(1 << i for i in range((length - 1).bit_length())), length)


def sweep(
    trace: Trace,
    *,
    r: Sequence[int],
    quality: Callable[[Mechanism], float | None],
    families: Sequence[str],
) -> dict[str, list[dict[str, Any]]]:
    """{family: [{r, quality, output_error}]}, as the comparison's page draws it.

    ``quality`` is the model's with a mechanism in place (MLM error, perplexity); a family that refuses the model's
    calls, or an r that it cannot have, is left out.
    """
    sweeps: dict[str, list[dict[str, Any]]] = {}
    for family, keys in tqdm([(f, n) for f in families for n in r], desc="sweeping", disable=None):
        try:
            mech = mechanism(f"{family}:r={keys}")
            row = {
                "r": keys,
                "quality": quality(mech),
                "output_error": approximation_error(trace, mech).summary()["output"],
            }
        except ValueError:
            continue
        sweeps.setdefault(family, []).append(row)
    return sweeps


def _affordable(trace: Trace, every: Sequence[int], windows: Windows, patience: float, notes: list[str]) -> list[int]:
    """1, d + 1, and the r between them whose search is estimated to take ``patience`` seconds together."""
    layers = list(trace)
    call = layers[0].call
    rows, heads, length, n_k = call.sizes
    # From d + 1 keys on, and with all of them, the output is exact without a search.
    searched = [r for r in every if 1 < r < min(call.v.shape[-1] + 1, n_k)]
    exact = min(r for r in every if r >= min(call.v.shape[-1] + 1, n_k))
    # Queries in the middle of the text, which see a fair share of the keys if attention is causal.
    # Fewer than some thousand pairs at once would measure the overhead of small tensors.
    parts = query_chunks(call, max(1 << 15, 4 * rows * heads * n_k))
    part = parts[len(parts) // 2]
    # Each query of the text for the quality, each traced one for the error.
    times = (windows.input_ids.numel() + rows * length) / (rows * part.q.shape[2]) * len(layers)
    left = patience
    for i, r in enumerate(searched):
        start = time.perf_counter()
        ValueAware(r=r)(part)
        left -= (time.perf_counter() - start) * times
        if left < 0:
            skipped = ", ".join(map(str, searched[i:]))
            notes.append(
                f"value-aware: r = {skipped} left out, since {patience - left:.0f} s and more would go into searching "
                f"(the limit is {patience:.0f} s); r = 1 and r = {exact} need no search"
            )
            searched = searched[:i]
            break
    return sorted({1, *searched, exact})
