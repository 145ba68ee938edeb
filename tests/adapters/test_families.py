"""Laws over families of models: what swap, record and evicting give is what the model gives, or they refuse."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import attnlab as al
from attnlab.adapters import adapter_of
from attnlab.adapters.prefill import cache_of, last_logits, read_prefill
from tests.adapters import zoo
from tests.adapters.zoo import FAMILIES, MORE_DECODERS, MORE_SEQ2SEQ, SEQ2SEQ, build, inputs, padding, real_logits
from tests.tolerance import assert_close

# Beyond every text of this file.
ALL_KEYS = 64
# What a family refuses, and a word of its reason; everything else must be right.
NO_CALL = {"gemma2": "soft-capped scores", "gpt_oss": "attention sinks"}
NO_EVICTION = NO_CALL | {
    "deepseek_v3": "latent attention",
    "diffllama": "attend once to what it caches",
    "doge": "a token sees later tokens",
    "lfm2": "keeps more of a text than keys and values",
}
# Decoders that transformers gives no mask under SDPA, and that do not say that they are causal: they see later tokens.
UNMASKED = {"umt5"}
DECODERS = {**zoo.DECODERS, **MORE_DECODERS}
NO_WINDOW = NO_CALL | dict.fromkeys((*SEQ2SEQ, *MORE_SEQ2SEQ), "no place among the keys of another sequence")

cached_build = functools.cache(build)


@contextmanager
def refused(reason: str | None) -> Iterator[None]:
    """Inside, the refusal for this reason is expected; None: no refusal."""
    if reason is None:
        yield
        return
    with pytest.raises(ValueError, match=reason):
        yield


def decoded(model: tf.PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """Logits of a prompt, of two tokens at once, then of one token at a time."""
    with torch.no_grad():
        parts = [ids[:, :6], ids[:, 6:8], *ids[:, 8:].split(1, dim=1)]
        return torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in parts], 1)


@pytest.mark.parametrize("kind", ["none", "mixed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_swap_with_softmax_gives_the_models_logits(name: str, kind: str) -> None:
    model = cached_build(name)
    texts = inputs(model, padding(kind))
    expected = real_logits(model, texts)
    with refused(NO_CALL.get(name)), al.swap(model, "softmax"):
        assert_close(real_logits(model, texts), expected)
    assert torch.equal(real_logits(model, texts), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_weights_times_values_are_the_output(name: str) -> None:
    model = cached_build(name)
    texts = inputs(model, padding("mixed"))
    expected = real_logits(model, texts)
    with refused(NO_CALL.get(name)):
        with al.record(model) as trace:
            assert_close(real_logits(model, texts), expected)
        assert len(trace) == len(adapter_of(model).sites())
        for layer in trace:
            assert layer.call.causal == (layer.kind == "decoder" and name not in UNMASKED)
            mixed = (layer.weights() @ layer.values.repeat_interleave(layer.call.groups, 1)).transpose(1, 2)
            # A padded query sees nothing here, and anything in transformers.
            rows = torch.ones(mixed.shape[:2], dtype=torch.bool)
            if mixed.shape[1] == 11:
                rows = texts["attention_mask"].bool()
            assert_close(mixed[rows], layer.output.transpose(1, 2)[rows])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_window_wider_than_the_text_is_the_models_attention(name: str) -> None:
    model = cached_build(name)
    texts = inputs(model, padding("mixed"))
    expected = real_logits(model, texts)
    # Rounding grows with the logits, and with every pass of a model that runs its layers several times.
    scale = expected.abs().max()
    with refused(NO_WINDOW.get(name)), al.swap(model, f"window:r={ALL_KEYS}"):
        assert_close(real_logits(model, texts) / scale, expected / scale)


@pytest.mark.parametrize("name", DECODERS)
def test_a_budget_of_all_keys_gives_the_models_logits(name: str) -> None:
    model = cached_build(name)
    ids = inputs(model)["input_ids"]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    with refused(NO_EVICTION.get(name)), al.evicting(model, al.KVPolicy(ALL_KEYS)) as cache:
        assert_close(decoded(model, ids, cache), expected)


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in NO_EVICTION])
def test_a_small_budget_is_kept_to(name: str) -> None:
    """The keys that are left are those of the tokens that the positions name, under the mask of those tokens."""
    model = cached_build(name)
    ids = inputs(model)["input_ids"]
    with al.evicting(model, al.KVPolicy(4, by="recency", sinks=1)) as cache, al.record(model) as trace:
        decoded(model, ids, cache)
    assert set(cache.kept()) - {0} == {4}
    layer = trace[-1]
    assert layer.call.k.shape[2] == 5
    assert_close(layer.weights() @ layer.values.repeat_interleave(layer.call.groups, 1), layer.output)


@pytest.mark.parametrize("name", DECODERS)
def test_the_full_cache_of_a_reading_continues_as_the_model_does(name: str) -> None:
    """Also where the model caches latents, or runs its layers several times."""
    model = cached_build(name)
    ids = inputs(model)["input_ids"]
    with torch.no_grad():
        own = model(ids[:, :8], use_cache=True).past_key_values
        expected = model(ids[:, 8:], past_key_values=own, use_cache=True).logits
    with refused((NO_CALL | {"lfm2": NO_EVICTION["lfm2"]}).get(name)):
        read = read_prefill(model, ids[:, :8])
        assert_close(last_logits(model, ids[:, 8:], cache_of([read.keys_and_values()]), count=3), expected)
        rows = read.rows(slice(1, 3)).keys_and_values()
        assert_close(last_logits(model, ids[1:, 8:], cache_of([rows]), count=3), expected[1:])


# What is refused when the model is converted, not at the first text that is longer, or when it generates.
NO_SLOTS = NO_CALL | {
    **dict.fromkeys(("mistral", "gemma3", "phi3", "cohere2", "modernbert_decoder"), "sees only the last"),
    "llama4": "the tokens of its chunk of 4",
    "gpt_neo": "sees only the last 4 tokens",
    **dict.fromkeys(("diffllama", "hrm_text"), "attends more than once in a forward pass"),
    **dict.fromkeys(("falcon_alibi", "bloom", "mpt", "doge"), r"cannot take this call \(bias\)"),
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_converted_model_generates_alike_with_and_without_a_cache_or_is_refused_at_once(name: str) -> None:
    model = build(name)
    with refused(NO_SLOTS.get(name)):
        al.convert(model, "abc-hybrid:slots=3,window=2,sinks=1,block=1")
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": zoo.PAD}
    if al.is_converted(model):
        prompt = inputs(model, padding("left"))
        tokens = [model.generate(**prompt, **how, use_cache=cached) for cached in (True, False)]
        assert torch.equal(*tokens)


@pytest.mark.parametrize("name", [name for name in (*DECODERS, *SEQ2SEQ, *MORE_SEQ2SEQ) if name not in NO_CALL])
def test_a_decoding_step_stands_after_all_keys_of_its_text(name: str) -> None:
    model = cached_build(name)
    prompt = {key: t for key, t in inputs(model).items() if key != "decoder_input_ids"}
    with al.record(model) as trace:
        how = {"do_sample": False, "use_cache": True, "pad_token_id": zoo.PAD}
        model.generate(**prompt, max_new_tokens=3, min_new_tokens=3, **how)
    steps = [layer.call for layer in trace if layer.kind == "decoder"]
    assert steps
    for call in steps:
        assert (call.causal, call.offset) == (True, call.k.shape[2] - 1)


def test_a_causal_model_has_no_site_that_is_said_to_see_both_ways() -> None:
    kinds = {name: {site.kind for site in adapter_of(cached_build(name)).sites()} for name in FAMILIES}
    for families, expected in ((DECODERS, {"decoder"}), ({**SEQ2SEQ, **MORE_SEQ2SEQ}, {"encoder", "decoder", "cross"})):
        assert {name: kinds.pop(name) for name in families} == dict.fromkeys(families, expected)
    assert set(map(frozenset, kinds.values())) == {frozenset({"encoder"})}


def contexts(model: tf.PreTrainedModel) -> dict[str, Callable[[], Any]]:
    return {
        "record": lambda: al.record(model),
        "softmax": lambda: al.swap(model, "softmax"),
        "top-r": lambda: al.swap(model, "top-r:r=2"),
        "evicting": lambda: al.evicting(model, al.KVPolicy(ALL_KEYS)),
    }


@pytest.mark.parametrize("outer", ["record", "softmax", "top-r", "evicting"])
@pytest.mark.parametrize("inner", ["record", "softmax", "top-r", "evicting"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gptj"])
def test_contexts_compose_in_both_orders(name: str, outer: str, inner: str) -> None:
    model = cached_build(name)
    ids = inputs(model)["input_ids"]
    with ExitStack() as alone, torch.no_grad():
        mechanism = next((way for way in (inner, outer) if way in ("softmax", "top-r")), None)
        if mechanism is not None:
            alone.enter_context(contexts(model)[mechanism]())
        expected = model(ids, use_cache=False).logits
    refusal = {
        frozenset(("evicting", "top-r")): "evicted by their softmax",
        frozenset(("evicting",)): "inside evicting",
    }
    before = model.config._attn_implementation
    with refused(refusal.get(frozenset((outer, inner)))), ExitStack() as stack:
        opened = {way: stack.enter_context(contexts(model)[way]()) for way in (outer, inner)}
        logits = decoded(model, ids, opened.get("evicting"))
        if "evicting" not in opened:
            with torch.no_grad():
                logits = model(ids, use_cache=False).logits
        assert_close(logits, expected)
        if "record" in opened:
            assert len(opened["record"]) == len(adapter_of(model).sites())
        if "evicting" in opened:
            assert set(opened["evicting"].kept()) == {11}
    assert model.config._attn_implementation == before


def test_eviction_inside_a_recorder_evicts() -> None:
    model = cached_build("llama")
    ids = torch.randint(3, 61, (1, 24), generator=torch.Generator().manual_seed(5))
    with al.record(model) as trace, al.evicting(model, al.KVPolicy(8)) as cache:
        decoded(model, ids, cache)
    assert cache.kept() == [8, 8, 8]
    assert trace[0].call.k.shape[2] == 9
