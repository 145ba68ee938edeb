"""A swapped mechanism that reads hidden states decodes with a cache as it reads the whole text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

import attnlab as al
from tests.adapters.converted import converted
from tests.adapters.zoo import build
from tests.quick_cases import in_turn

READS_X = [
    spec
    for spec in al.all_mechanisms()
    # Three specs are for three key/value heads, which these models do not have.
    if spec.count("/") < 2 and {"no-x"} == al.mechanism(spec).cannot().keys() & {"no-x", "causal"}
]
PROMPT = torch.tensor([[3, 5, 4, 7], [6, 3, 8, 4]])


def generated(model: Any, **settings: Any) -> torch.Tensor:
    return model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=5, do_sample=False, pad_token_id=0, **settings
    )


def test_there_are_such_mechanisms() -> None:
    assert {spec.partition(":")[0] for spec in READS_X} >= {"abc-mlp", "rfa"}


@pytest.mark.parametrize(("spec", "model_and_beams"), in_turn(READS_X, [("llama", 1), ("gpt2", 3), ("bart", 3)]))
def test_generating_inside_a_swap(spec: str, model_and_beams: tuple[str, int]) -> None:
    name, beams = model_and_beams
    model = build(name)
    with al.swap(model, spec, layers="decoder"):
        cached, whole = (generated(model, use_cache=use, num_beams=beams) for use in (True, False))
    assert torch.equal(cached, whole)


def test_a_converted_model_that_is_swapped() -> None:
    model = converted("llama", "kernel:elu")
    with al.swap(model, "abc-mlp:slots=3"):
        cached, whole = (generated(model, use_cache=use) for use in (True, False))
    assert torch.equal(cached, whole)


def test_a_cache_without_hidden_states_is_refused() -> None:
    model = build("llama")
    cache = tf.DynamicCache(config=model.config)
    model(PROMPT, past_key_values=cache)
    with al.swap(model, "abc-mlp:slots=3"), pytest.raises(ValueError, match="has not kept them; begin with an empty"):
        model(PROMPT[:, :1], past_key_values=cache)
    # The other way round nothing is lost: the keys are all there.
    cache = tf.DynamicCache(config=model.config)
    with al.swap(model, "abc-mlp:slots=3"):
        model(PROMPT, past_key_values=cache)
    assert cache.get_seq_length() == 4
    after = model(PROMPT[:, :1], past_key_values=cache)
    assert after.logits.shape[1] == 1
    with al.swap(model, "abc-mlp:slots=3"), pytest.raises(ValueError, match="has not kept them"):
        model(PROMPT[:, :1], past_key_values=cache)


def test_tokens_taken_out_of_the_cache() -> None:
    model = build("llama").double()
    with al.swap(model, "abc-mlp:slots=3"):
        cache = tf.DynamicCache(config=model.config)
        model(PROMPT, past_key_values=cache)
        cache.crop(-2)
        step = model(PROMPT[:, 2:], past_key_values=cache).logits
        whole = model(PROMPT).logits[:, 2:]
    torch.testing.assert_close(step, whole)
