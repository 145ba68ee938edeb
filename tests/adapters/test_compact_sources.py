"""What ``al.compact`` takes: every kind of cache gives what the same keys in a trace give, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import attnlab as al
from attnlab.trace import Trace
from tests.adapters.both_kinds import tokens_of
from tests.adapters.zoo import build
from tests.caches.test_laws import model_of
from tests.tolerance import assert_close

KEYS = 4
POLICIES = {
    "evicting": "value-norm:budget=99",
    "compressed": "value-norm:budget=99,when=prefill",
    "our decoder": "value-norm:budget=99",
}


def read(model: Any, cache: Any, ids: torch.Tensor, **inputs: Any) -> Trace:
    with torch.no_grad(), al.record(model) as trace:
        model(ids, past_key_values=cache, **inputs)
    return trace


@pytest.mark.parametrize("kind", ["dynamic", "static", *POLICIES])
@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_is_compacted_as_the_trace_of_its_keys(kind: str, padded: bool) -> None:
    """Free places of a static cache are no keys, and neither is padding."""
    ids, inputs = tokens_of(12), {}
    if padded:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, :5] = 0
    model = model_of("our decoder" if kind == "our decoder" else "llama")
    trace = read_whole(model, ids, inputs)
    if kind in POLICIES:
        with torch.no_grad(), al.evicting(model, POLICIES[kind]) as cache:
            model(ids, **{"cache" if kind == "our decoder" else "past_key_values": cache}, **inputs)
    else:
        cache = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=30)
        trace = read(model, cache, ids, **inputs)
    made, expected = al.compact(cache, keys=KEYS, queries=trace), al.compact(trace, keys=KEYS, queries=trace)
    assert expected.before == made.before == ids.shape[1]
    for layer, other in zip(made.layers, expected.layers, strict=True):
        # A policy's cache holds no padding, so the places of a row's keys are others.
        assert torch.equal(layer.columns, other.columns) or (padded and kind in POLICIES)
        assert int(layer.columns.max()) < ids.shape[1]
        for name in ("k", "v", "bias"):
            assert_close(getattr(layer, name), getattr(other, name))


def read_whole(model: Any, ids: torch.Tensor, inputs: Any) -> Trace:
    with torch.no_grad(), al.record(model) as trace:
        model(ids, **inputs)
    return trace


def test_heads_of_different_numbers_of_keys_are_compacted_by_what_each_holds() -> None:
    model, ids = model_of("llama"), tokens_of(12)
    with al.evicting(model, "value-norm:budget=7,heads=shared,when=prefill,recent=1") as cache:
        trace = read(model, cache, ids)
    counts = cache.kept_by_head()
    assert any(len(set(one.flatten().tolist())) > 1 for one in counts)
    made = al.compact(cache, keys=99, queries=trace)
    for layer, held, kept in zip(made.layers, counts, cache.kept_keys(), strict=True):
        assert torch.equal((layer.columns >= 0).sum(-1), held)
        # All keys: the outputs of the queries are those over what each head holds.
        padded = kept.padded("keys")
        assert padded is not None
        there = layer.columns >= 0
        assert_close(layer.k.masked_fill(~there.unsqueeze(-1), 0), padded.masked_fill(~there.unsqueeze(-1), 0))
    with pytest.raises(ValueError, match="as many keys"):
        al.compact(cache, keys=3, queries=trace, layers="shared")


def test_a_cache_of_which_keys_are_missing_or_stand_for_others_is_refused() -> None:
    model, ids = model_of("llama"), tokens_of(12)
    with al.evicting(model, "compact:queries=prompt,budget=6") as cache:
        trace = read(model, cache, ids)
    with pytest.raises(ValueError, match="stand for others already"):
        al.compact(cache, keys=3, queries=trace)
    window = build("mistral")
    held = DynamicCache(config=window.config)
    with pytest.raises(ValueError, match="sliding window"):
        al.compact(held, keys=3, queries=read(window, held, ids))
    whole = DynamicCache()
    read(model, whole, ids)
    one = read(model, DynamicCache(), ids[:1])
    with pytest.raises(ValueError, match="those of 2 rows, and the queries those of 1"):
        al.compact(whole, keys=3, queries=one)
