"""W = P Phi^T of every member of the family and of the linear baselines, read from models that were converted."""

from __future__ import annotations

import pytest
import torch

import attnlab as al
from attnlab.attention import repeat_groups
from attnlab.registry import all_mechanisms
from tests.adapters.zoo import build, inputs, padding
from tests.quick_cases import in_turn
from tests.tolerance import assert_close

MEMBERS = [spec for spec in all_mechanisms() if spec.partition(":")[0].startswith(("abc-", "rfa", "t2r"))]


@pytest.mark.parametrize(("mech", "name"), in_turn(MEMBERS, ["bert", "llama"]))
def test_record_effective_attention_and_approximation_error(mech: str, name: str) -> None:
    if name == "llama" and "causal" in al.mechanism(mech).cannot():
        pytest.skip("this member is never causal")
    model = al.convert(build(name), mech)
    with al.record(model) as trace:
        model(**inputs(model, padding("left")))
    for layer in trace:
        values = repeat_groups(layer.values, layer.call.groups)
        W = layer.weights()
        assert_close(W @ values, layer.output)
        assert_close(al.effective_attention(layer).weights @ values, layer.output, dtype=torch.float16)
        assert al.approximation_error(layer, layer.mechanism).layers[0].output.max() == 0
        # A real approximation: not what softmax gives, and not nothing.
        assert 0 < al.approximation_error(layer, "softmax").layers[0].output.mean() < 100
