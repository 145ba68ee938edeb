"""Memories of a size that a number of bytes allows: what a plan chooses from where no candidates are named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attnlab.adapters.cache_bytes import LayerShape
from attnlab.attention import Mechanism
from attnlab.mechanisms.abc_hybrid import AbcHybrid
from attnlab.mechanisms.abc_select import AbcSelect
from attnlab.mechanisms.abc_window import QueueMechanism
from attnlab.mechanisms.window import Window
from attnlab.registry import mechanism

__all__ = ["fitting", "largest", "reach", "sized", "sized_candidates"]

# Of the bytes that one size for all heads would have.
SHARES = (1 / 8, 3 / 8, 1)
# Slots and windows from this size on are multiples of it, as a block is.
STEP = 16
SINKS = 4


def sized_candidates(shape: LayerShape, length: int, limit: int) -> list[str]:
    """Memories of ``limit`` bytes a head and of shares of that, with slots and without."""
    specs = [spec for share in SHARES for spec in fitting(shape, length, int(share * limit))]
    return list(dict.fromkeys(specs))


def fitting(shape: LayerShape, length: int, limit: int) -> list[str]:
    """The largest memory with slots, and the largest without, of at most ``limit`` bytes a key/value head."""
    specs = [largest(shape, length, limit, partial(sized, slots_of=name)) for name in ("abc-select", None)]
    return list(dict.fromkeys(spec for spec in specs if spec is not None))


def largest(shape: LayerShape, length: int, limit: int, spec_of: Callable[[int], str]) -> str | None:
    """The spec ``spec_of(n)`` of most keys that takes at most ``limit`` bytes a key/value head; None: none does."""
    small, large = 0, length
    while small < large:
        middle = (small + large + 1) // 2
        held = shape.bytes(mechanism(spec_of(middle)), length) // shape.groups
        small, large = (middle, large) if held <= limit else (small, middle - 1)
    return spec_of(small) if small else None


def sized(keys: int, slots_of: str | None) -> str:
    """A mechanism with as many keys, half of them in slots of ``slots_of``; of None, sinks and a window."""
    sinks = min(SINKS, keys // 4)
    slots = 0 if slots_of is None else (keys - sinks) // 2
    slots -= slots % STEP if slots >= STEP else 0
    window = keys - sinks - slots
    window -= window % STEP if window >= STEP else 0
    name = slots_of if slots_of and slots else "abc-hybrid"
    return f"{name}:slots={slots},window={window},sinks={sinks}" + ("" if window >= STEP else ",block=1")


def reach(mech: Mechanism, length: int) -> int:
    """How many of the last tokens a query surely sees as they are; of other mechanisms than windows it is 0."""
    match mech:
        case AbcHybrid() | AbcSelect():
            return min(length, mech.window)
        case Window():
            return min(length, mech.r)
        case QueueMechanism():
            return min(length, mech.slots * mech.stride)
    return 0
