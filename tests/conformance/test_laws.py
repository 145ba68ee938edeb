"""Every mechanism against every law; a mechanism added in one file is picked up here without a change."""

from __future__ import annotations

import pytest

import attnlab as al
from attnlab.conformance.laws import LAWS

SPECS = al.all_mechanisms()
# A search takes some hundred times as long as other mechanisms; test_numbers.py has more calls of it.
RANDOM_CALLS = {"value-aware:r=2": 10}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("spec", SPECS)
def test_law(spec: str, law: str) -> None:
    (result,) = al.check(spec, laws=[law], random_calls=RANDOM_CALLS.get(spec, 30)).results
    assert result.outcome != "failed", result.reason
    if result.outcome != "passed":
        pytest.skip(str(result))


@pytest.mark.parametrize("spec", SPECS)
def test_spec_round_trip(spec: str) -> None:
    mech = al.mechanism(spec)
    assert repr(al.mechanism(al.spec_of(mech))) == repr(mech)
