"""W = P Phi^T of every member, on converted models: recorded, its effective attention, its error against softmax."""

from __future__ import annotations

import pytest
import torch

import attnlab as al
from attnlab.attention import repeat_groups
from tests.adapters.converted import converted
from tests.adapters.zoo import inputs, padding
from tests.tolerance import assert_close

# (model, spec, the most slots that a query reads)
MEMBERS = [
    ("llama", "abc-mlp:slots=3", 3),
    ("llama", "abc-mlp:slots=3,activation=relu", 3),
    ("llama", "abc-mlp:slots=3,activation=sigmoid,gate=true", 3),
    ("llama", "abc-linformer:slots=3,length=16", 3),
    ("llama", "abc-hybrid:slots=3,window=2,sinks=1,block=2", 6),
    ("llama", "abc-select:slots=2,window=2,sinks=1,block=2", 5),
    ("llama", "abc-random:slots=3", 3),
    ("llama", "abc-compressive:slots=3,length=16", 3),
    ("llama", "abc-window:slots=3", 3),
    ("llama", "abc-dilated:slots=2", 2),
    ("llama", "abc-global:slots=3", 3),
    ("roberta", "abc-cluster:slots=3", 3),
    ("roberta", "abc-luna:slots=3", 3),
    ("roberta", "abc-workspace:slots=3,top=2", 3),
]


@pytest.mark.parametrize(("name", "spec", "slots"), MEMBERS)
def test_every_member_is_read(name: str, spec: str, slots: int) -> None:
    model = converted(name, spec)
    with al.record(model) as trace:
        model(**inputs(model, padding("left")))
    for layer in trace:
        W, values = layer.weights(), repeat_groups(layer.values, layer.call.groups)
        assert_close(W @ values, layer.output)
        if not layer.call.causal:
            # All queries read the same slots, so W has no more than that many independent rows.
            assert int(torch.linalg.matrix_rank(W.double(), rtol=1e-5).max()) <= slots
        assert_close(al.effective_attention(layer).weights @ values, layer.output, dtype=torch.float16)
        assert al.approximation_error(layer, layer.mechanism).layers[0].output.max() == 0
        assert al.approximation_error(layer, "softmax").layers[0].output.mean() > 0.01


def test_the_members_are_all_there() -> None:
    family = {spec.partition(":")[0] for spec in al.all_mechanisms() if spec.startswith("abc-")}
    assert {spec.partition(":")[0] for _, spec, _ in MEMBERS} == family
