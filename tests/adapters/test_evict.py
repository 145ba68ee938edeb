from __future__ import annotations

import pytest
import torch

from attnlab.adapters.evict import evicting, perplexity
from attnlab.caches import KeptKeys, KVPolicy
from tests.caches.policies import RANKINGS, kept_of_scores


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=29,
        hidden_size=24,
        intermediate_size=31,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def test_the_budget_is_split_into_sinks_recent_and_ranked() -> None:
    rank = torch.tensor([[[9.0, 1.0, 5.0, 8.0, 2.0, 0.0, 0.0]]])
    assert KVPolicy(4, sinks=1, recent=2).split() == (1, 2, 1)
    kept = kept_of_scores(KVPolicy(4, sinks=1, recent=2), rank)
    assert kept[0, 0].tolist() == [True, False, False, True, False, True, True]
    assert kept_of_scores(KVPolicy(7), rank).all()
    assert KVPolicy(8, by="recency").split() == (4, 4, 0)


def test_equal_ranks_keep_the_later_key() -> None:
    kept = kept_of_scores(KVPolicy(2, recent=1), torch.zeros(1, 1, 5))
    assert kept[0, 0].tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("by", RANKINGS)
def test_a_budget_that_is_never_reached_changes_nothing(model: torch.nn.Module, by: str) -> None:
    ids = torch.randint(29, (3, 11))
    whole = perplexity(model, ids, None)
    assert perplexity(model, ids, KVPolicy(99, by=by))["loss"] == pytest.approx(whole["loss"], abs=1e-5)
    assert whole["tokens"] == 30


@pytest.mark.parametrize("by", RANKINGS)
def test_generation_with_a_budget_holds_no_more_keys(model: torch.nn.Module, by: str) -> None:
    ids = torch.randint(29, (2, 9))
    with evicting(model, KVPolicy(5, by=by)) as cache:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
        )
    assert out.shape == (2, 15)
    assert cache.kept() == [5, 5]
    assert cache.get_seq_length() == 14
    assert model.config._attn_implementation == "sdpa"


def test_recency_equals_attention_with_a_mask(model: torch.nn.Module) -> None:
    """With one layer's worth of context gone, the last token sees the sinks and the recent keys only."""
    ids = torch.randint(29, (1, 10))
    policy = KVPolicy(5, by="recency", sinks=2)
    with evicting(model, policy) as cache:
        for t in range(10):
            logits = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits
    # A key is evicted after the query that overfills the cache has read it.
    i, j = torch.arange(10)[:, None], torch.arange(10)
    mask = (j <= i) & ((j < 2) | (j > i - 4))
    expected = model(ids, attention_mask=mask[None, None]).logits[:, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_value_aware_keeps_the_values_nearest_to_the_mean_output(model: torch.nn.Module) -> None:
    from attnlab.attention import AttentionCall

    q, k = torch.zeros(1, 1, 1, 3), torch.randn(1, 1, 4, 3)
    v = torch.tensor([[0.0, 0.0], [4.0, 0.0], [1.0, 1.0], [-1.0, 3.0]]).view(1, 1, 4, 2)
    # Zero queries attend uniformly: o = (1, 1), nearest to the third value, then to the first.
    # Leaving one out moves the output by |v_i - o| / 3: most for the fourth and the second.
    for by, columns in (("value-aware", [0, 2]), ("leave-one-out", [1, 3])):
        kept = KeptKeys(KVPolicy(2, by=by, recent=0), 0)
        kept.extend(k, v)
        kept.cut(AttentionCall(q, k, v))
        assert kept.columns.tolist() == [[columns]]


def test_a_mask_of_all_tokens_is_honoured_after_evictions(model: torch.nn.Module) -> None:
    """Key 0 is hidden from every other token: by a 4D mask over all tokens, also where keys were evicted."""
    ids = torch.randint(29, (2, 10), generator=torch.Generator().manual_seed(3))
    i, j = torch.arange(10)[:, None], torch.arange(10)
    allowed = (j <= i) & ((j > 0) | (i == 0))
    recent = allowed & ((j < 2) | (j > i - 4))
    for policy, kept in ((KVPolicy(99), allowed), (KVPolicy(5, by="recency", sinks=2), recent)):
        with torch.no_grad(), evicting(model, policy) as cache:
            steps = [
                model(ids[:, t : t + 1], attention_mask=allowed[None, None, t : t + 1, : t + 1], past_key_values=cache)
                for t in range(10)
            ]
        logits = torch.cat([step.logits for step in steps], 1)
        with torch.no_grad():
            whole = model(ids, attention_mask=kept[None, None]).logits
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


def test_a_mask_that_shows_the_future_is_refused(model: torch.nn.Module) -> None:
    ids = torch.randint(29, (2, 4))
    everything = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with evicting(model, KVPolicy(3)) as cache, pytest.raises(ValueError, match="causal mask only"):
        model(ids, attention_mask=everything, past_key_values=cache)


@pytest.mark.parametrize("by", RANKINGS)
def test_what_ranks_keys_is_reordered_with_them(model: torch.nn.Module, by: str) -> None:
    ids = torch.randint(29, (3, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), evicting(model, KVPolicy(5, by=by)) as cache:
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    rows = torch.tensor([2, 0, 0])
    layer = cache.layers[1]

    def state() -> list[torch.Tensor]:
        store = layer.kept.store
        return [*(store.padded(name) for name in store.buffers), *layer.kept.gathered.per_row.values()]

    expected = [t[rows] for t in state()]
    cache.reorder_cache(rows)
    assert len(state()) == (3 if by == "recency" else 4)
    assert all(map(torch.equal, state(), expected))


def test_cropping_is_refused(model: torch.nn.Module) -> None:
    with evicting(model, KVPolicy(3)) as cache, pytest.raises(ValueError, match="cannot be cropped"):
        cache.layers[0].crop(-1)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"budget": 0}, "at least 1"),
        ({"budget": 4, "by": "size"}, "must be one of"),
        ({"budget": 4, "recent": -1}, "at least 0"),
        ({"budget": 4, "recent": 3, "sinks": 2}, "exceed"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        KVPolicy(**settings)
