"""OVA's Figures 1 and 2 for any model: quality and output error of sparse attention against the number of keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from attnlab.attention import Mechanism
from attnlab.reading.approximation import approximation_error
from attnlab.registry import mechanism
from attnlab.trace import Trace

__all__ = ["FAMILIES", "powers_of_two", "sweep"]

FAMILIES = ("top-r", "value-aware", "window")


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
    families: Sequence[str] = FAMILIES,
) -> dict[str, list[dict[str, Any]]]:
    """{family: [{r, quality, output_error}]}, as the comparison's page draws it.

    ``quality`` is the model's with a mechanism in place (MLM error, perplexity); a family that refuses the model's
    calls, or an r that it cannot have, is left out.
    """
    found: dict[str, list[dict[str, Any]]] = {}
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
        found.setdefault(family, []).append(row)
    return found
