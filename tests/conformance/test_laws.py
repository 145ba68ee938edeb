"""Every mechanism against every law; a mechanism added in one file is picked up here without a change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnlab as al
from attnlab.attention import hide_unseen, repeat_groups, visible
from attnlab.conformance.calls import accepts
from attnlab.conformance.laws import LAWS
from tests.tolerance import assert_close

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


@st.composite
def calls(draw: st.DrawFn) -> al.AttentionCall:
    """Any shape, grouping, padding, mask and causality."""
    size = st.integers(1, 9)
    b, g, groups, n_q, n_k, d, e = (draw(size) for _ in range(7))
    g, groups = min(g, 3), min(groups, 3)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def coins(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) > 0.3

    causal = draw(st.booleans())
    return al.AttentionCall(
        normal(b, g * groups, n_q, d),
        normal(b, g, n_k, d),
        normal(b, g, n_k, e),
        x=normal(b, n_k, 3),
        key_visible=coins(b, n_k) if draw(st.booleans()) else None,
        causal=causal,
        offset=draw(st.integers(-3, 9)) if causal else 0,
        mask=coins(b, g * groups, n_q, n_k) if draw(st.booleans()) else None,
    )


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(call=calls())
def test_any_shape_and_mask(spec: str, call: al.AttentionCall) -> None:
    mech = al.mechanism(spec)
    if not accepts(mech, call):
        call = replace(call, mask=None)
    if not accepts(mech, call):
        return
    weights, out = mech.weights(call), mech(call)
    assert_close(out, weights @ repeat_groups(hide_unseen(call).v, call.groups), what="W @ v == out")
    seen = visible(call)
    if seen is not None and "hidden_keys_get_no_weight" not in mech.exempt:
        seen = seen.expand_as(weights)
        assert (weights[~seen] == 0).all()
        assert (out[~seen.any(-1)] == 0).all()
