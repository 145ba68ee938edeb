"""Effective attention of any mechanism, and as a mechanism."""

from __future__ import annotations

import pytest
import torch

import attnlab as al
from attnlab.attention import AttentionCall
from attnlab.reading.effective import effective_attention, effective_from_output
from attnlab.trace import LayerTrace
from tests.reading.effective_cases import padding, seen_by


def _call(**masks) -> AttentionCall:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 23, 11), torch.randn(2, 2, 23, 11)
    return AttentionCall(q, k, torch.randn(2, 2, 23, 3), **masks)


@pytest.mark.parametrize("masks", [{}, {"causal": True, "key_visible": padding(2, 23)}])
def test_any_mechanism_with_the_same_output_has_the_same_effective_attention(masks: dict) -> None:
    call = _call(**masks)
    exact, sparse = al.mechanism("softmax"), al.mechanism("value-aware:r=4")
    maps = [effective_attention(m.weights(call), call.v, **masks).weights for m in (exact, sparse)]
    assert (exact.weights(call) - sparse.weights(call)).abs().max() > 0.1
    torch.testing.assert_close(maps[0], maps[1], atol=2e-5, rtol=0)


@pytest.mark.parametrize("spec", ["top-r:r=3", "kernel:elu", "window:4", "abc-random:slots=5", "abc-window:slots=6"])
@pytest.mark.parametrize("masks", [{}, {"causal": True, "key_visible": padding(2, 23)}])
def test_every_mechanism_s_weights_have_an_effective_part(spec: str, masks: dict) -> None:
    call, mech = _call(**masks), al.mechanism(spec)
    effective = effective_attention(LayerTrace(call, mech, mech(call), None, "encoder", 0, "a"))
    assert effective.residual.max() < 1e-5
    assert not effective.weights[~seen_by(effective.weights.shape, **masks)].any()
    # Another way to the same map: from the output alone.
    again = effective_from_output(mech(call), call.v, **masks).weights()
    torch.testing.assert_close(again, effective.weights, atol=2e-4, rtol=0)


def test_as_a_mechanism_it_has_softmax_s_output_and_the_effective_weights() -> None:
    call = _call(causal=True)
    soft, mech = al.mechanism("softmax"), al.mechanism("effective-softmax")
    torch.testing.assert_close(mech(call), soft(call))
    torch.testing.assert_close(mech.weights(call), effective_attention(soft.weights(call), call.v, causal=True).weights)
