"""generate() of a converted model: a cache of constant size, and the tokens of recomputing the whole prefix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import attnlab as al
from attnlab.adapters.memory_cache import MemoryLayer
from tests.adapters.both_kinds import ours, tokens_of
from tests.adapters.converted import converted
from tests.adapters.zoo import build, inputs, padding
from tests.quick_cases import in_turn
from tests.tolerance import assert_close

WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beam": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
}


def written(model: tf.PreTrainedModel, **settings: Any) -> Tensor:
    given = inputs(model, padding("left"))
    given.pop("decoder_input_ids", None)
    torch.manual_seed(3)
    return model.generate(**given, max_new_tokens=9, min_new_tokens=9, **settings)


@pytest.mark.parametrize(("name", "way"), in_turn(["gpt2", "llama", "qwen3", "bart", "marian", "t5"], WAYS))
def test_the_tokens_of_recomputing(name: str, way: str) -> None:
    model = converted(name)
    assert torch.equal(written(model, **WAYS[way]), written(model, **WAYS[way], use_cache=False))


@pytest.mark.parametrize(
    "mech",
    [
        "abc-mlp:slots=5,gate=true",
        "abc-mlp:slots=5,activation=relu,normalise=write",
        "abc-window:slots=3",
        "abc-dilated:slots=2",
        "abc-hybrid:slots=3,window=2,sinks=1,block=1,control=x",
        "abc-select:slots=3,window=4,sinks=1,block=2",
        "abc-hybrid:slots=3,window=4,sinks=1,block=2,control=x",
        "abc-hybrid:slots=3,window=2,sinks=1,block=2,mass=false",
        "abc-random:slots=3",
        "abc-linformer:slots=3,length=32",
        "abc-global:slots=4",
        "rfa:features=31",
        "rfa:features=31,gate=true",
        "t2r:features=7",
        "kernel:elu",
        "top-r:r=3",
    ],
)
def test_every_member_decodes(mech: str) -> None:
    model = converted("llama", mech)
    for way in ("greedy", "beam"):
        assert torch.equal(written(model, **WAYS[way]), written(model, **WAYS[way], use_cache=False))


@pytest.mark.parametrize("layers", [[0], [1], [0, 2]])
def test_converted_layers_beside_others(layers: list[int]) -> None:
    model = converted("llama", layers=layers)
    assert torch.equal(written(model, **WAYS["beam"]), written(model, **WAYS["beam"], use_cache=False))
    answer = model(**inputs(model), use_cache=True)
    kinds = [isinstance(layer, MemoryLayer) for layer in answer.past_key_values.layers]
    assert kinds == [i in layers for i in range(3)]


@pytest.mark.parametrize("kinds", [("cross",), ("causal",), ("encoder",)])
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_one_kind_of_an_encoder_decoder(name: str, kinds: tuple[str, ...]) -> None:
    model = converted(name, kinds=kinds)
    assert torch.equal(written(model, **WAYS["beam"]), written(model, **WAYS["beam"], use_cache=False))


def numbers(cache: Any) -> int:
    """How many numbers a converted model's cache holds."""
    total = 0
    for layer in cache.layers:
        # Not even behind an empty view.
        assert layer.keys.untyped_storage().nbytes() == layer.values.untyped_storage().nbytes() == 0
        state = layer.past.state
        total += sum(t.numel() for t in (state.k, state.v, state.z, state.count))
    return total


@pytest.mark.parametrize("mech", ["abc-window:slots=3", "abc-mlp:slots=3"])
def test_a_prompt_is_recorded_with_what_its_keys_were_made_from(mech: str) -> None:
    """So that other mechanisms, which may need it, can be compared with the converted layer."""
    model = converted("llama", mech)
    with al.record(model) as trace:
        model(**inputs(model, padding("left")))
    assert trace[1].x is not None
    assert al.approximation_error(trace, "abc-mlp:slots=2").summary()["output"] > 0


def test_the_cache_does_not_grow() -> None:
    model, cache, sizes = converted("llama"), tf.DynamicCache(), []
    with torch.no_grad():
        for length in (1, 7, 1, 40):
            model(torch.randint(3, 61, (2, length)), past_key_values=cache, use_cache=True)
            sizes.append(numbers(cache))
            assert cache.get_seq_length() == sum((1, 7, 1, 40)[: len(sizes)])
    # Three layers, batch 2, 2 KV heads, 5 slots of 6 + 6 + 1, and a count for each row.
    assert sizes == [3 * 2 * (2 * 5 * 13 + 1)] * 4


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("cuts", [[11], [1, 10], [4, 4, 3], [7, 1, 1, 1, 1]])
def test_any_cut_of_a_text_gives_the_same(name: str, cuts: list[int]) -> None:
    """Left-padded rows of several lengths; a prefill of one token and of several, then steps of one or more."""
    model = converted(name)
    given = inputs(model, padding("left"))
    mask, ids = given["attention_mask"], given["input_ids"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, parts, lo = tf.DynamicCache(config=model.config), [], 0
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for size in cuts:
            hi = lo + size
            answer = model(
                ids[:, lo:hi], attention_mask=mask[:, :hi], position_ids=positions[:, lo:hi], past_key_values=cache
            )
            parts.append(answer.logits)
            lo = hi
    assert_close(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()])


def test_w_of_a_decoding_step_is_refused_and_that_of_the_prompt_is_not() -> None:
    model = converted("llama")
    with al.record(model, keep="all") as trace:
        written(model, **WAYS["greedy"])
    calls = trace.history(1)
    assert calls[0].weights().shape == (3, 4, 11, 11)
    assert repr(calls[1].mechanism) == repr(calls[0].mechanism)
    with pytest.raises(ValueError, match="read a memory of 11 earlier tokens, whose keys are not kept"):
        calls[1].weights()


def test_caches_that_do_not_fit() -> None:
    model, ids = converted("llama"), torch.randint(3, 61, (2, 5))
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="this cache is for a batch of 2, the call has 1; make a new one"):
        model(ids[:1, :1], past_key_values=cache)
    of_another = build("llama")(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="with keys of another attention"):
        model(ids[:, :1], past_key_values=of_another)
    with pytest.raises(ValueError, match=r"a cache of another kind \(StaticLayer\)"):
        model.generate(ids, max_new_tokens=3, cache_implementation="static")
    with al.swap(model, "softmax"), pytest.raises(ValueError, match="begin with an empty cache inside the swap"):
        model(ids[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match="tokens cannot be taken out of again"):
        cache.layers[0].crop(-1)


def test_rows_are_repeated_chosen_and_forgotten() -> None:
    model, ids = converted("gpt2"), torch.randint(3, 61, (2, 5))
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        step = model(ids[[1, 0], :1], past_key_values=cache).logits
        whole = model(torch.cat([ids, ids[:, :1]], 1)[[1, 0]], use_cache=False).logits[:, -1:]
        assert_close(step, whole)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert_close(model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits)


def test_the_map_of_a_decoding_step_is_refused_where_its_keys_are_gone() -> None:
    model, ids = al.convert(ours("decoder"), "abc-mlp:slots=3"), tokens_of(4)
    cache = model.make_cache(2, 6)
    with torch.no_grad(), al.record(model) as trace:
        model(ids, cache=cache)
        assert trace[0].weights().shape == (2, 4, 4, 4)
        model(ids[:, :1], cache=cache)
    with pytest.raises(ValueError, match="read a memory of 4 earlier tokens"):
        trace[0].weights()


def test_a_bounded_memory_answers_only_the_mechanism_that_made_it() -> None:
    model, ids = al.convert(ours("decoder"), "t2r:features=5"), tokens_of(4)
    cache = model.make_cache(2, 6)
    with torch.no_grad():
        model(ids, cache=cache)
        for mech in ("softmax", "rfa:features=5"):
            with al.swap(model, mech), pytest.raises(ValueError, match="keeps no keys"):
                model(ids[:, :1], cache=cache)
