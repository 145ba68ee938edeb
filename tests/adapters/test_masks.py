"""Masks of transformers reach a mechanism as padding and causality wherever they are nothing more."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from attnlab.adapters import record, swap
from attnlab.adapters.masks import carrying_mask, recognise, seen_by, visible_and_bias
from attnlab.attention import visible
from attnlab.reading import effective_attention
from tests.adapters.zoo import DECODERS, ENCODERS, SEQ2SEQ, build, inputs, padding, real_logits
from tests.quick_cases import in_turn
from tests.tolerance import assert_close

SLIDING = {"mistral", "gemma3", "modernbert"}


def traced(model, texts):
    with torch.no_grad(), record(model) as trace:
        model(**texts)
    return trace


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["none", "left", "right", "mixed"])
@pytest.mark.parametrize("name", [n for n in [*ENCODERS, *DECODERS, *SEQ2SEQ] if n not in SLIDING])
def test_padding_and_causality_are_known(name: str, kind: str, implementation: str) -> None:
    model = build(name, implementation=implementation)
    mask = padding(kind)
    for layer in traced(model, inputs(model, mask)):
        call = layer.call
        assert call.mask is None
        assert call.causal == (layer.kind == "decoder")
        assert call.offset == 0
        padded = mask is not None and (layer.kind != "decoder" or name in DECODERS)
        if padded:
            assert torch.equal(call.key_visible, mask.bool())
        else:
            assert call.key_visible is None
        assert (call.bias is not None) == (name == "t5" and layer.kind != "cross")


@pytest.mark.parametrize("name", sorted(SLIDING))
def test_a_window_is_a_mask_only_once_the_text_is_longer(name: str) -> None:
    model = build(name)
    short = traced(model, inputs(model, length=3))
    assert all(layer.call.mask is None for layer in short)
    long = traced(model, inputs(model, padding("left")))
    windowed = {"mistral": [0, 1, 2], "gemma3": [0, 2], "modernbert": [1, 2]}[name]
    for layer in long:
        assert (layer.call.mask is not None) == (layer.layer in windowed)
    call = long[windowed[0]].call
    # Row 10 of the unpadded sentence: five keys back when causal, three either side when not.
    first = 11 - (4 if name == "modernbert" else 5)
    assert visible(call)[2, 0, 10].tolist() == [j >= first for j in range(11)]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_decoding_steps_are_causal_with_the_cache_as_offset(name: str) -> None:
    model = build(name)
    given = inputs(model, padding("left"))
    with swap(model, "softmax"), record(model, keep="all") as trace:
        model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    calls = [layer.call for layer in trace.history(1)]
    assert [(c.causal, c.offset, c.q.shape[2], c.k.shape[2]) for c in calls] == [
        (True, 0, 11, 11),
        (True, 11, 1, 12),
        (True, 12, 1, 13),
        (True, 13, 1, 14),
    ]
    assert calls[-1].key_visible[0].tolist() == [False] * 4 + [True] * 10
    # x covers the keys this step has made; the others lie in the cache.
    assert [c.x.shape[1] for c in calls] == [11, 1, 1, 1]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_prefix_in_the_cache_then_several_tokens(name: str) -> None:
    model = build(name)
    ids = inputs(model)["input_ids"]
    with torch.no_grad():
        whole = model(ids).logits[:, 7:]
        with swap(model, "softmax"), record(model) as trace:
            cache = model(ids[:, :7], use_cache=True).past_key_values
            rest = model(ids[:, 7:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole, rtol=0, atol=1e-5)
    call = trace[0].call
    assert (call.causal, call.offset, call.mask, call.key_visible) == (True, 7, None, None)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_a_linear_mechanism_decodes_with_a_cache_as_without(name: str) -> None:
    model = build(name)
    given = inputs(model, padding("left"))
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with swap(model, "kernel:elu"):
        with_cache = model.generate(**given, **settings)
        without = model.generate(**given, use_cache=False, **settings)
    assert torch.equal(with_cache, without)


def test_packed_sequences_do_not_see_each_other() -> None:
    model = build("llama")
    ids = inputs(model)["input_ids"][:1]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        alone = model(ids[:, 4:]).logits
        with swap(model, "softmax"), record(model) as trace:
            packed = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[:, 4:], alone, rtol=0, atol=1e-5)
    assert trace[0].call.mask is not None


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_four_dimensional_masks_of_the_user(implementation: str) -> None:
    model = build("llama", implementation=implementation)
    given = inputs(model)
    lower = torch.ones(11, 11).tril().bool()[None, None].expand(3, 1, 11, 11)
    odd = lower.clone()
    odd[:, :, 9, 2] = False
    for allowed, structured in ((lower, True), (odd, False)):
        additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
        with torch.no_grad():
            expected = model(**given, attention_mask=additive).logits
        for mask in (additive,) if implementation == "eager" else (additive, allowed):
            with swap(model, "softmax"), record(model) as trace, torch.no_grad():
                torch.testing.assert_close(model(**given, attention_mask=mask).logits, expected, rtol=0, atol=1e-5)
            assert trace[0].call.causal
            assert (trace[0].call.mask is None) == structured


def test_one_mask_for_every_sentence() -> None:
    model = build("bert")
    given = {**inputs(model), "attention_mask": torch.zeros(1, 1, 1, 11)}
    given["attention_mask"][..., 7:] = -torch.inf
    with torch.no_grad():
        expected = model(**given).logits
        with swap(model, "kernel:exp"), record(model) as trace:
            torch.testing.assert_close(model(**given).logits, expected, rtol=0, atol=1e-5)
    assert trace[0].call.key_visible.tolist() == [[True] * 7 + [False] * 4] * 3


def test_a_mask_of_two_dimensions_is_padding() -> None:
    seen = seen_by(torch.tensor([[0, 1, 1]]), shape=(1, 1, 3), causal_module=True, none_is_causal=True)
    assert (seen.key_visible.tolist(), seen.causal, seen.offset) == ([[False, True, True]], True, 2)


def test_an_additive_mask_that_is_more_than_a_mask_is_a_bias() -> None:
    model = build("bert")
    slope = -0.1 * (torch.arange(11.0)[:, None] - torch.arange(11.0)).abs().expand(3, 1, 11, 11)
    given = {**inputs(model), "attention_mask": slope}
    with torch.no_grad():
        expected = model(**given).logits
        with swap(model, "softmax"), record(model) as trace:
            torch.testing.assert_close(model(**given).logits, expected, rtol=0, atol=1e-5)
    assert torch.equal(trace[0].call.bias, slope)


def test_recognise_by_hand() -> None:
    T, F = True, False
    padded = torch.tensor([[[[F, T, T], [F, T, T], [F, T, T]]]])
    assert recognise(padded, offset=0).key_visible.tolist() == [[F, T, T]]
    assert not recognise(padded, offset=0).causal
    causal = torch.tensor([[[[F, F, F], [F, T, F], [F, T, T]]]])
    seen = recognise(causal, offset=0)
    assert (seen.causal, seen.offset, seen.mask) == (True, 0, None)
    assert seen.key_visible.tolist() == [[F, T, T]]
    hole = torch.tensor([[[[T, F, F], [T, T, F], [F, T, T]]]])
    for causal_module in (True, False):
        seen = recognise(hole, offset=0, causal_module=causal_module)
        assert torch.equal(seen.mask, hole)
        assert seen.causal == causal_module
    future = torch.tensor([[[[T, F, F], [T, T, T], [F, T, T]]]])
    assert not recognise(future, offset=0).causal
    full = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    assert recognise(full, offset=2).key_visible is None
    step = recognise(torch.ones(2, 1, 1, 5, dtype=torch.bool), offset=4)
    assert (step.causal, step.offset) == (True, 4)


def test_a_mask_written_to_is_read_again() -> None:
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    make = carrying_mask(sdpa_mask)
    mask = make(batch_size=1, q_length=3, kv_length=3, mask_function=causal_mask_function, allow_is_causal_skip=False)
    ask = {"shape": (1, 3, 3), "causal_module": True, "none_is_causal": True}
    assert seen_by(mask, **ask).causal
    mask[0, 0, 2, 1] = False
    assert torch.equal(seen_by(mask, **ask).mask, mask)


def test_a_mask_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="mask of type dict cannot be read"):
        seen_by({}, shape=(1, 2, 2), causal_module=True, none_is_causal=True)


def test_a_refusal_names_the_layer() -> None:
    model = build("t5")
    refusal = r"encoder.block.0.layer.0.SelfAttention: .* cannot take this call \(bias\)"
    with swap(model, "kernel:elu"), pytest.raises(ValueError, match=refusal):
        real_logits(model, inputs(model))
    # The cross-attention's bias of zeros is none.
    with swap(model, "kernel:elu", layers="cross"):
        real_logits(model, inputs(model))


def test_padding_may_be_anything_finite() -> None:
    model = build("llama")
    mask = padding("left")
    given = inputs(model, mask)
    with swap(model, "kernel:elu"):
        first = real_logits(model, given)
        given["input_ids"] = given["input_ids"].masked_fill(mask == 0, 5)
        torch.testing.assert_close(real_logits(model, given), first, rtol=0, atol=1e-5)


@pytest.mark.parametrize("r", [2, 6])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "llama4", "phi3"])
def test_a_window_counts_back_from_the_query_however_the_mask_came(name: str, r: int) -> None:
    model = build(name)
    texts = inputs(model, length=16)
    with torch.no_grad(), swap(model, f"window:r={r}"), record(model) as trace:
        model(**texts, use_cache=False)
    own = traced(model, texts)
    for layer in trace:
        i, j = torch.arange(16)[:, None], torch.arange(16)
        expected = visible(own[layer.layer].call) & (j > i - r)
        assert torch.equal((layer.weights() > 0), expected.expand(3, layer.call.q.shape[1], 16, 16))
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with swap(model, f"window:r={r}"):
        assert torch.equal(model.generate(**texts, **settings), model.generate(**texts, use_cache=False, **settings))


@pytest.mark.parametrize("mech", ["window:r=3", "kernel:exp", "value-aware:r=2", "uniform"])
def test_packed_sequences_attend_as_alone(mech: str) -> None:
    model = build("llama")
    ids = inputs(model)["input_ids"][:1]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    with torch.no_grad(), swap(model, mech):
        packed = model(ids, position_ids=positions, use_cache=False).logits
        for part in (slice(0, 4), slice(4, 11)):
            assert_close(packed[:, part], model(ids[:, part], use_cache=False).logits)


LOW = {"-1e4": -1e4, "-1e9": -1e9, "finfo.min": torch.finfo(torch.float32).min, "-inf": -torch.inf}


HIDING = ["softmax", "uniform", "value-aware:r=2", "position", "window:r=4", "top-r:r=2"]


@pytest.mark.parametrize(("mech", "low", "slope"), in_turn(HIDING, LOW, [0.0, 0.1]))
def test_what_an_additive_mask_hides_is_hidden_from_every_mechanism(mech: str, low: str, slope: float) -> None:
    model = build("llama")
    texts = inputs(model)
    i, j = torch.arange(11)[:, None], torch.arange(11)
    allowed = ((j <= i) & (j != 3) | (i == j)).expand(3, 4, 11, 11)
    bias = -slope * (i - j).abs().expand(3, 4, 11, 11)
    with torch.no_grad(), swap(model, mech), record(model) as trace:
        model(**texts, attention_mask=torch.where(allowed, bias, LOW[low]))
    layer = trace[0]
    assert layer.call.causal
    assert (layer.call.bias is not None) == (slope > 0)
    assert torch.equal(visible(layer.call), allowed)
    assert (layer.weights()[~allowed] == 0).all()
    assert (effective_attention(layer).weights[~allowed].abs() < 1e-6).all()


def test_half_precision_masks_hide_what_they_hide_in_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        additive = torch.tensor([[[[0.0, -1e4, torch.finfo(dtype).min]]]]).to(dtype)
        seen, bias = visible_and_bias(additive)
        assert seen.tolist() == [[[[True, False, False]]]]
        assert bias is None
    # A mask of two levels hides a whole row; biases of positions are compared within their row.
    padded = torch.tensor([[[[-1e4, -1e4], [-1e4, 0.0]]]])
    assert visible_and_bias(padded)[0].tolist() == [[[[False, False], [False, True]]]]
    far = torch.tensor([[[[-12000.0, -11999.5, -1e9], [-0.5, 0.0, -6000.0]]]])
    assert visible_and_bias(far)[0].tolist() == [[[[True, True, False], [True, True, False]]]]
    with pytest.raises(ValueError, match=r"got torch.int64.*\.bool\(\)"):
        visible_and_bias(torch.ones(1, 1, 2, 2, dtype=torch.long))


@pytest.mark.parametrize("name", [*sorted(SLIDING & DECODERS.keys()), "gpt_neo", "llama4", "gpt2"])
def test_what_a_window_hides_in_a_decoding_step_is_no_padding(name: str) -> None:
    """Also where the cache holds every key, as ``DynamicCache()`` does."""
    model, mask = build(name), padding("left")
    ids, positions = inputs(model)["input_ids"], (mask.cumsum(1) - 1).clamp(min=0)
    past = tf.DynamicCache()
    with torch.no_grad(), record(model) as trace:
        model(ids[:, :10], attention_mask=mask[:, :10], position_ids=positions[:, :10], past_key_values=past)
        model(ids[:, 10:], attention_mask=mask, position_ids=positions[:, 10:], past_key_values=past)
    whole = traced(model, {"input_ids": ids, "attention_mask": mask, "position_ids": positions})
    for step, at_once in zip(trace, whole, strict=True):
        assert torch.equal(step.call.key_visible, mask.bool())
        assert step.call.causal
        assert_close(step.weights(), at_once.weights()[:, :, 10:])


def test_a_mask_of_too_few_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="its mask is of 5 keys, and the text has 7"):
        seen_by(torch.zeros(2, 1, 3, 5), shape=(2, 3, 7), causal_module=True, none_is_causal=True)
