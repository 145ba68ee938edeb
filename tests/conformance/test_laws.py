"""Every mechanism against every law; a mechanism added in one file is picked up here without a change."""

from __future__ import annotations

import pytest

import attnlab as al
from attnlab.conformance.laws import LAWS

SPECS = al.all_mechanisms()


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("spec", SPECS)
def test_law(spec: str, law: str) -> None:
    (result,) = al.check(spec, laws=[law]).results
    assert result.outcome != "failed", result.reason
    if result.outcome != "passed":
        pytest.skip(str(result))


@pytest.mark.parametrize("spec", SPECS)
def test_spec_round_trip(spec: str) -> None:
    mech = al.mechanism(spec)
    assert repr(al.mechanism(al.spec_of(mech))) == repr(mech)
