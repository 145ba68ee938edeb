"""Specs, settings and budgets of cache policies, policies of a user's own, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import attnlab as al
from attnlab.adapters import adapter_of
from attnlab.adapters.evict import token_losses
from attnlab.adapters.module_state import forward_of
from attnlab.adapters.rotary import rotation_of
from attnlab.attention import AttentionCall
from attnlab.caches import KeptKeys, KVPolicy
from attnlab.caches.kv_policy import policy_spec
from tests.adapters.both_kinds import ours, tokens_of
from tests.adapters.zoo import build
from tests.caches.policies import EXAMPLES, kept_of_scores
from tests.tolerance import assert_close


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("snapkv:window=64,kernel=5,budget=128", KVPolicy(128, by="snapkv:window=64,kernel=5")),
        ("h2o:budget=0.25,sinks=4", KVPolicy(0.25, by="h2o", sinks=4)),
        ("recency:budget=8", KVPolicy(8, by="streaming-llm")),
        ("budget=64,by=mass", KVPolicy(64, by="mass")),
        ("budget=64", KVPolicy(64)),
        ("budget=64,by=snapkv:window=3", KVPolicy(64, by="snapkv:window=3")),
        ("vatp:budget=9,heads=shared,layers=pyramid,when=prefill",
         KVPolicy(9, by="vatp", heads="shared", layers="pyramid", when="prefill")),
    ],
)  # fmt: skip
def test_a_spec_names_a_policy(spec: str, policy: KVPolicy) -> None:
    assert al.cache_policy(spec) == policy
    assert al.cache_policy(policy) is policy


@pytest.mark.parametrize("by", [*EXAMPLES, "mass", "recency"])
def test_a_policy_is_written_as_a_spec_that_names_it_again(by: str) -> None:
    for settings in ({}, {"sinks": 1, "when": "prefill"}, {"budget": 0.25}):
        policy = KVPolicy(**{"budget": 64, "by": by} | settings)
        assert al.cache_policy(policy_spec(policy)) == policy


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("h2o", "needs its budget"),
        ("h3o:budget=4", "did you mean 'h2o'"),
        ("h2o:budget=4,size=3", "no setting 'size'"),
        ("budget=4,size=3", "no setting 'size'"),
        ("snapkv:budget=4", "exceed the budget of 4"),
        ("snapkv:budget=64,kernel=4", "kernel must be odd"),
        ("snapkv:budget=64,recent=3", "always keeps its last 32"),
        ("tova:budget=4,heads=shared", "keep the same keys"),
        ("criticalkv:budget=64,heads=shared", "budget of each head"),
        ("kvzip:budget=4,when=step", "reads a prompt twice"),
        ("h2o:budget=4,when=always", "when must be one of"),
        ("h2o:budget=4,safeguard=2", "share from 0 to 1"),
        ("h2o:budget=1.5", "at least 1, got 1.5"),
        ("h2o:budget=4,budget=5", "twice"),
        ("./nowhere.py:Mine:budget=4", "no file"),
    ],
)
def test_a_wrong_spec_is_refused(spec: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        al.cache_policy(spec)


def test_a_policy_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "oldest.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from attnlab.caches import KeyScore\n"
        "@dataclass(frozen=True)\n"
        "class Oldest(KeyScore):\n"
        "    step: int = 1\n"
        "    def score(self, moment):\n"
        "        n = moment.call.k.shape[2]\n"
        "        return -(moment.call.k.new_ones(moment.held.shape).cumsum(-1) // self.step)\n"
    )
    model, ids = build("llama"), tokens_of(9)
    with torch.no_grad(), al.evicting(model, f"{file}:Oldest:step=2,budget=4,recent=1") as cache:
        model(ids, past_key_values=cache)
    assert cache.layers[0].kept.columns[0, 0].tolist() == [0, 1, 2, 8]
    with pytest.raises(ValueError, match="has no cache policy named 'Other'"):
        al.cache_policy(f"{file}:Other:budget=4")


def test_budgets_are_numbers_or_shares_and_may_fall_with_the_layer() -> None:
    assert KVPolicy(7).budgets([3, 100]) == (7, 7)
    assert KVPolicy(0.25).budgets([3, 100]) == (1, 25)
    pyramid = KVPolicy(20, by="h2o", layers="pyramid")
    by_layer = [pyramid.budgets([1000], layer=i, layers=5)[0] for i in range(5)]
    assert by_layer == [39, 30, 20, 10, 1]
    # No layer keeps more than there is, and the others have the rest.
    assert [pyramid.budgets([30], layer=i, layers=3)[0] for i in range(3)] == [30, 20, 10]
    assert [pyramid.budgets([15], layer=i, layers=3)[0] for i in range(3)] == [20, 20, 20]


def test_heads_that_share_a_budget_keep_the_best_of_all_beyond_their_safeguard() -> None:
    score = torch.tensor([[[9.0, 8.0, 7.0, 6.0, 5.0], [4.0, 3.0, 2.0, 1.0, 0.0]]])
    kept = kept_of_scores(KVPolicy(3, heads="shared", recent=0, safeguard=0.4), score)
    assert kept[0].tolist() == [[True, True, True, True, True], [True, False, False, False, False]]
    kept = kept_of_scores(KVPolicy(3, heads="shared", recent=0, safeguard=0.7), score)
    assert kept[0].tolist() == [[True, True, True, True, False], [True, True, False, False, False]]
    assert int(kept.sum()) == 6


def test_a_policy_that_drops_keys_after_the_prompt_reads_no_text_token_by_token() -> None:
    with pytest.raises(ValueError, match="add when=step"):
        token_losses(build("llama"), tokens_of(5), "snapkv:budget=4,window=2")
    losses = token_losses(build("llama"), tokens_of(5), "snapkv:budget=4,window=2,when=step")
    assert losses.shape == (2, 4)


def read(model: Any, policy: str, **inputs: Any) -> Any:
    with torch.no_grad(), al.evicting(model, policy) as cache:
        model(tokens_of(9), past_key_values=cache, **inputs)
    return cache


def test_expected_attention_refuses_what_it_cannot_foresee() -> None:
    policy = "expected-attention:budget=4,future=3"
    for family, why in (
        ("mistral", "hidden from later tokens"),
        ("modernbert_decoder", "more than one kind of rotation"),
        ("gptj", "in a way of its own"),
        ("gpt_neox", "turns . of . numbers"),
        ("bloom", "position bias"),
    ):
        with pytest.raises(ValueError, match=why):
            read(build(family), policy)
    middle = torch.ones(2, 9, dtype=torch.long)
    middle[0, 4] = 0
    with pytest.raises(ValueError, match="padding stands between"):
        read(build("llama"), policy, attention_mask=middle)
    # Learned positions turn nothing.
    assert read(build("gpt2"), policy).kept() == [4, 4, 4]


@pytest.mark.parametrize("family", ["llama", "qwen3", "granite", "falcon", "gpt_neox_japanese", "hrm_text"])
def test_the_rotation_of_a_model_is_undone(family: str) -> None:
    """The queries of one repeated token differ in the first layer by their rotation only."""
    model = build(family)
    with torch.no_grad(), al.record(model) as trace:
        model(torch.full((1, 9), 7))
    site = adapter_of(model).sites()[0]
    rotate, why = rotation_of(model, site.module, forward_of(site.module))
    assert why is None
    q = trace[0].call.q
    assert not torch.allclose(q[:, :, 0], q[:, :, 5])
    unturned = rotate(q, -torch.arange(9)[None])
    assert_close(unturned, unturned[:, :, :1].expand_as(q))


def test_expected_attention_does_not_depend_on_where_a_text_begins() -> None:
    """Rotations know only distances, so left padding of any length changes nothing."""
    model, ids = build("llama").double(), tokens_of(9)[:1]
    kept = []
    for left in (0, 6):
        padded = torch.cat([torch.ones(1, left, dtype=torch.long), ids], 1)
        mask = (torch.arange(9 + left) >= left).long()[None]
        with torch.no_grad(), al.evicting(model, "expected-attention:budget=4,future=3,sinks=0") as cache:
            model(padded, attention_mask=mask, past_key_values=cache)
        kept.append([layer.kept.columns - left for layer in cache.layers])
    assert all(map(torch.equal, *kept))


def test_kvzip_refuses_what_it_cannot_read_twice() -> None:
    policy = "kvzip:budget=4,sinks=1"
    assert read(build("llama"), policy).kept() == [4, 4, 4]
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="padding"):
        read(build("llama"), policy, attention_mask=mask)
    with pytest.raises(ValueError, match="reads a prompt twice"), al.evicting(ours("decoder"), policy):
        pass
    model = build("llama")
    with torch.no_grad(), al.evicting(model, policy) as cache:
        model.model(tokens_of(9), past_key_values=cache)
        with pytest.raises(ValueError, match="call the model itself"):
            model.model(tokens_of(1), past_key_values=cache)
    with pytest.raises(ValueError, match="the model has 64 positions"), al.evicting(model, policy) as cache:
        model(tokens_of(33), past_key_values=cache)


def test_criticalkv_needs_the_output_projection() -> None:
    keys = KeptKeys(KVPolicy(4, by="criticalkv:window=2"), 0)
    q, k, v = torch.randn(3, 1, 2, 9, 5)
    keys.extend(k, v)
    with pytest.raises(ValueError, match="output projection"):
        keys.cut(AttentionCall(q, k, v, causal=True))


def test_a_token_hidden_from_itself_but_not_from_others_is_refused() -> None:
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    mask[4, 4] = False
    keys = KeptKeys(KVPolicy(4), 0)
    q, k, v = torch.randn(3, 1, 2, 9, 5)
    keys.extend(k, v)
    with pytest.raises(ValueError, match="hides a token from itself"):
        keys.cut(AttentionCall(q, k, v, causal=True, mask=mask[None, None]))
