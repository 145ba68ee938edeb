"""Every mechanism against every law; a mechanism added in one file is picked up here without a change."""

from __future__ import annotations

from typing import Any

import pytest

import attnlab as al
from attnlab.conformance.laws import LAWS

SPECS = al.all_mechanisms()
# A search takes some hundred times as long as other mechanisms; test_numbers.py has more calls of it.
RANDOM_CALLS = {"value-aware:r=2": 10}


def laws_in_turn() -> list[Any]:
    """(spec, law): a mechanism's first spec is quick with every law, each of its other specs with a third of them."""
    seen: set[str] = set()
    cases = []
    for i, spec in enumerate(SPECS):
        name = spec.partition(":")[0]
        for j, law in enumerate(LAWS):
            quick = name not in seen or (i + j) % 3 == 0
            cases.append(pytest.param(spec, law, marks=[] if quick else [pytest.mark.slow]))
        seen.add(name)
    return cases


@pytest.mark.parametrize(("spec", "law"), laws_in_turn())
def test_law(spec: str, law: str) -> None:
    (result,) = al.check(spec, laws=[law], random_calls=RANDOM_CALLS.get(spec, 30)).results
    assert result.outcome != "failed", result.reason
    if result.outcome != "passed":
        pytest.skip(str(result))


@pytest.mark.parametrize("spec", SPECS)
def test_spec_round_trip(spec: str) -> None:
    mech = al.mechanism(spec)
    assert repr(al.mechanism(al.spec_of(mech))) == repr(mech)
