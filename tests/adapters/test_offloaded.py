"""Models whose parameters are not at hand: offloaded by accelerate, or on the meta device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf

import attnlab as al
from tests.adapters.zoo import GROUPED, build, inputs, real_logits
from tests.tolerance import assert_close


@pytest.mark.parametrize("mech", ["softmax", "abc-mlp:slots=3", "abc-linformer:slots=3"])
def test_an_offloaded_model_is_swapped_where_it_computes(mech: str, tmp_path: Path) -> None:
    from accelerate import disk_offload

    model = build("llama")
    texts = inputs(model)
    with al.swap(model, mech):
        expected = real_logits(model, texts)
    disk_offload(model, str(tmp_path), execution_device="cpu")
    assert next(model.parameters()).is_meta
    with al.swap(model, mech), al.record(model) as trace:
        assert_close(real_logits(model, texts), expected)
    layer = trace[1]
    assert_close(layer.weights() @ layer.values.repeat_interleave(2, 1), layer.output)
    with pytest.raises(ValueError, match=r"are offloaded.*convert it, then offload"):
        al.convert(model, mech)


def test_what_needs_numbers_is_refused_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)).eval()
        ids = torch.zeros(1, 5, dtype=torch.long)
    with torch.no_grad(), al.swap(model, "softmax"):
        assert model(ids).logits.shape == (1, 5, 61)
    with torch.no_grad(), al.swap(model, "top-r:r=2"), pytest.raises(ValueError, match="this attention needs numbers"):
        model(ids)
    with pytest.raises(ValueError, match="is on the meta device and cannot be run there"):
        al.convert(model, "abc-mlp", copy=True)
