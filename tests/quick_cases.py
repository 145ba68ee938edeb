"""Parameters of laws that hold over many combinations: ``make test`` takes some of them in turn, ``make test-all`` all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def one_quick(cases: Sequence[tuple[Any, ...]], turn: int) -> list[Any]:
    """All cases, of which that of number ``turn`` (round and round) is quick and the others are marked slow."""
    quick = turn % len(cases)
    return [pytest.param(*case, marks=[] if i == quick else [pytest.mark.slow]) for i, case in enumerate(cases)]


def in_turn(first: Iterable[Any], *others: Iterable[Any]) -> list[Any]:
    """All combinations; every value of ``first`` is quick once, and the others' combinations take turns."""
    rest = list(itertools.product(*others))
    return [case for i, value in enumerate(first) for case in one_quick([(value, *more) for more in rest], i)]
