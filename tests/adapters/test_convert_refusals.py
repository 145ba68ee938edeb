"""What cannot be converted is refused with a reason, and the model stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import attnlab as al
from tests.adapters.converted import converted
from tests.adapters.zoo import build, inputs, real_logits


def test_what_convert_refuses() -> None:
    with pytest.raises(ValueError, match="is converted already"):
        al.convert(converted("bert"), "abc-mlp")
    with pytest.raises(ValueError, match=r"no attention of kind cross among the chosen layers; the model has encoder"):
        al.convert(build("bert"), "abc-mlp", kinds=("cross",))
    with pytest.raises(ValueError, match="a kind is encoder, causal"):
        al.convert(build("bert"), "abc-mlp", kinds=("self",))
    with pytest.raises(ValueError, match="the mapping is for cross, but kinds says causal"):
        al.convert(build("bart"), {"cross": "abc-mlp"}, kinds=("causal",))
    with pytest.raises(ValueError, match="slots must be an int of at least 1"):
        al.convert(build("bert"), "abc-mlp:slots=0")
    with pytest.raises(ValueError, match="bias must be 'refuse' or 'drop'"):
        al.convert(build("bert"), "abc-mlp", bias="keep")
    with pytest.raises(ValueError, match="cannot be swapped or recorded"):
        al.convert(nn.Linear(2, 2), "abc-mlp")


@pytest.mark.parametrize(
    ("name", "mech", "message"),
    [
        ("gpt2", "abc-luna", "would leak the future"),
        ("gpt2", "abc-cluster", "later key would move"),
        ("gpt2", "abc-compressive", "give length="),
        ("t5", "abc-mlp", "convert has bias='drop'"),
        ("mistral", "abc-mlp", "sees only the last 5 tokens"),
        ("modernbert", "abc-mlp", "sees only the last 4 tokens"),
    ],
)
def test_a_refused_model_is_as_it_was(name: str, mech: str, message: str) -> None:
    model, before = build(name), build(name)
    with pytest.raises(ValueError, match=message):
        al.convert(model, mech)
    assert not al.is_converted(model)
    given = inputs(model)
    assert torch.equal(real_logits(model, given), real_logits(before, given))
    assert model.config._attn_implementation == "sdpa"
    assert list(model.state_dict()) == list(before.state_dict())


def test_a_text_longer_than_linformers_n() -> None:
    model = converted("gpt2", "abc-linformer:slots=3,length=8")
    assert model(**inputs(model, length=8)).logits.shape[1] == 8
    with pytest.raises(ValueError, match=r"transformer.h.0.attn: 9 tokens, but this Linformer learned a control for 8"):
        model(**inputs(model, length=9))
    with pytest.raises(ValueError, match="9 tokens, but this Linformer"):
        model.generate(**inputs(model, length=6), max_new_tokens=5, min_new_tokens=5, do_sample=False)


def test_a_mask_of_ones_own_is_refused() -> None:
    model = converted("bert")
    mask = torch.rand(3, 1, 11, 11) > 0.4
    mask[:, :, :, 0] = True
    with pytest.raises(ValueError, match=r"cannot take this call \(mask\)"):
        model(**inputs(model), attention_mask=mask)
