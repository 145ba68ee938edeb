"""Caches of bounded size under both kinds of model: which keys they keep, beams, other contexts, and what they refuse."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import attnlab as al
from attnlab.adapters import adapter_of
from attnlab.adapters.evict import perplexity
from attnlab.models import beam_search, greedy_search
from tests.adapters.both_kinds import ours, tokens_of
from tests.adapters.zoo import VOCABULARY, build
from tests.caches.policies import RANKINGS
from tests.tolerance import assert_close


@pytest.mark.parametrize("by", RANKINGS)
def test_a_budget_of_all_keys_equals_no_policy(decoder: nn.Module, by: str) -> None:
    whole = perplexity(decoder, tokens_of(13), None)
    assert perplexity(decoder, tokens_of(13), al.KVPolicy(13, by=by))["loss"] == pytest.approx(whole["loss"], abs=1e-4)
    assert perplexity(decoder, tokens_of(13), al.KVPolicy(3, by=by))["loss"] != pytest.approx(whole["loss"], abs=1e-4)


def test_recency_equals_a_mask(decoder: nn.Module) -> None:
    """The last token of one layer sees the sinks and the recent keys only."""
    ids = tokens_of(10)
    with (
        torch.no_grad(),
        al.evicting(decoder, al.KVPolicy(5, by="recency", sinks=2)) as cache,
        al.record(decoder) as trace,
    ):
        for t in range(10):
            adapter_of(decoder).logits(ids[:, t : t + 1], cache=cache)
    with torch.no_grad(), al.record(decoder) as whole:
        adapter_of(decoder).logits(ids)
    assert cache.kept() == [5, 5, 5]
    # A key is evicted after the query that overfills the cache has read it: sinks 0 and 1, then 6 to 9.
    assert_close(trace[0].call.k, whole[0].call.k[:, :, [0, 1, 6, 7, 8, 9]])
    assert_close(trace[0].weights() @ trace[0].values.repeat_interleave(trace[0].call.groups, 1), trace[0].output)


@pytest.mark.parametrize("by", RANKINGS)
def test_beams_evict_as_rows_alone(by: str) -> None:
    """With one beam of several rows, each row keeps the keys that it keeps alone; beams copy rows and rankings."""
    model, ids = ours("decoder"), tokens_of(9)
    settings: dict[str, Any] = {"eos": None, "max_new": 6}
    if by != "random":
        with al.evicting(model, al.KVPolicy(4, by=by)) as cache:
            together = greedy_search(model, ids, cache=cache, **settings)
        assert cache.kept() == [4, 4, 4]
        for row in range(2):
            with al.evicting(model, al.KVPolicy(4, by=by)) as cache:
                assert (
                    greedy_search(model, ids[row : row + 1], cache=cache, **settings)[0].tokens == together[row].tokens
                )
    with al.evicting(model, al.KVPolicy(99, by=by)) as cache:
        searched = beam_search(model, ids, beams=3, cache=cache, **settings)
    assert [h.tokens for (h,) in searched] == [h.tokens for (h,) in beam_search(model, ids, beams=3, **settings)]
    with al.evicting(model, al.KVPolicy(4, by=by)) as cache:
        beam_search(model, ids, beams=3, cache=cache, **settings)
    assert cache.kept() == [4, 4, 4]


def test_beams_of_a_hugging_face_model_carry_their_rankings() -> None:
    model, ids = build("llama"), tokens_of(9)
    settings = {"num_beams": 3, "do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
    with al.evicting(model, al.KVPolicy(4, by="mass")) as cache:
        both = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **settings)
    for row in range(2):
        one = ids[row : row + 1]
        with al.evicting(model, al.KVPolicy(4, by="mass")) as cache:
            alone = model.generate(one, attention_mask=torch.ones_like(one), past_key_values=cache, **settings)
        assert alone[0].tolist() == both[row].tolist()


def test_an_encoder_decoder_evicts_from_its_decoder_only() -> None:
    model, source = ours("encoder-decoder"), tokens_of(9)
    with al.evicting(model, al.KVPolicy(99)) as cache:
        searched = greedy_search(model, source, bos=1, eos=None, max_new=7, cache=cache)
    plain = greedy_search(model, source, bos=1, eos=None, max_new=7)
    assert [found.tokens for found in searched] == [found.tokens for found in plain]
    assert [found.score for found in searched] == pytest.approx([found.score for found in plain])
    with al.evicting(model, al.KVPolicy(2)) as cache, al.record(model) as trace:
        greedy_search(model, source, bos=1, eos=None, max_new=7, cache=cache)
    assert cache.kept() == [2, 2, 2]
    assert trace["cross", 0].call.k.shape[2] == 9


@pytest.mark.parametrize("by", [by for by in RANKINGS if by != "random"])
def test_a_beam_has_the_score_of_its_text_read_alone(by: str) -> None:
    """Each beam evicts by the statistics of its own tokens, although beams change rows at every step."""
    # In float32, equal tokens have values whose ranks differ by rounding, which depends on the size of the batch.
    model, ids = (
        build("llama").double(),
        torch.randint(3, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1)),
    )
    policy = al.KVPolicy(4, by=by, recent=1)
    settings = {"num_beams": 5, "num_return_sequences": 5, "max_new_tokens": 9, "min_new_tokens": 9}
    with al.evicting(model, policy) as cache, al.record(model, keep="all") as trace:
        searched = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
    assert len(trace.history(0)) == 9
    for text, score in zip(searched.sequences, searched.sequences_scores, strict=True):
        with torch.no_grad(), al.evicting(model, policy) as cache:
            parts = [text[None, :9], *text[None, 9:-1].split(1, dim=1)]
            steps = [model(part, past_key_values=cache).logits[:, -1] for part in parts]
        log_p = torch.stack(steps, 1).log_softmax(-1).gather(-1, text[None, 9:, None]).sum()
        # transformers divides by the length.
        assert float(log_p) / 9 == pytest.approx(float(score), abs=1e-5)


@pytest.mark.parametrize("outer", ["record", "softmax", "top-r", "evicting"])
@pytest.mark.parametrize("inner", ["record", "softmax", "top-r", "evicting"])
def test_contexts_around_our_models_compose_in_both_orders(outer: str, inner: str) -> None:
    model, ids = ours("decoder"), tokens_of(9)
    ways = {
        "record": lambda: al.record(model),
        "softmax": lambda: al.swap(model, "softmax"),
        "top-r": lambda: al.swap(model, "top-r:r=2"),
        "evicting": lambda: al.evicting(model, al.KVPolicy(99)),
    }
    mechanism = next((way for way in (inner, outer) if way in ("softmax", "top-r")), "softmax")
    with torch.no_grad(), ways[mechanism]():
        expected = model(ids).logits
    refusal = pytest.raises(ValueError, match="evicted by their softmax")
    with refusal if {outer, inner} == {"evicting", "top-r"} else nullcontext(), torch.no_grad(), ExitStack() as stack:
        opened = {way: stack.enter_context(ways[way]()) for way in (outer, inner)}
        logits = model(ids, cache=opened.get("evicting")).logits
        assert_close(logits, expected)
        if "record" in opened:
            assert len(opened["record"]) == 3


def test_what_evicting_refuses(decoder: nn.Module) -> None:
    ids, policy = tokens_of(4), al.KVPolicy(3)
    other = r"attends by TopR.* evicted by their softmax attention"
    with al.swap(decoder, "top-r:r=2"), pytest.raises(ValueError, match=other), al.evicting(decoder, policy):
        pass
    with al.evicting(decoder, policy) as cache, al.swap(decoder, "top-r:r=2"), pytest.raises(ValueError, match=other):
        adapter_of(decoder).logits(ids, cache=cache)
    with pytest.raises(ValueError, match="attends by AbcMlp"), al.evicting(al.convert(decoder, "abc-mlp"), policy):
        pass


def test_evicting_refuses_models_that_do_not_only_decode() -> None:
    with pytest.raises(ValueError, match="is no decoder-only model"), al.evicting(build("bart"), al.KVPolicy(3)):
        pass
    with pytest.raises(ValueError, match="does not decode"), al.evicting(ours("encoder"), al.KVPolicy(3)):
        pass
    model = build("llama")
    with al.evicting(model, al.KVPolicy(3)), pytest.raises(ValueError, match="pass past_key_values=cache"):
        model(tokens_of(4), use_cache=False)
    with al.evicting(model, al.KVPolicy(3)), pytest.raises(ValueError, match="inside evicting"):
        al.evicting(model, al.KVPolicy(3)).__enter__()


def test_a_search_begins_with_an_empty_cache() -> None:
    model, ids = ours("decoder"), tokens_of(4)
    with al.evicting(model, al.KVPolicy(3)) as cache:
        model(ids, cache=cache)
        with pytest.raises(ValueError, match="holds 4 tokens already"):
            greedy_search(model, ids, eos=None, max_new=2, cache=cache)
    with pytest.raises(ValueError, match="contradict each other"):
        greedy_search(model, ids, eos=None, max_new=2, cache=cache, cached=False)
