"""A prompt that is read once gives every policy the cache that it would have made itself."""

from __future__ import annotations

import pytest
import torch

import attnlab as al
from attnlab.adapters.prefill import cache_of, compressed, even_keys, last_logits, read_prefill
from attnlab.caches.shared_scores import SharedScores
from tests.adapters.test_load import build
from tests.caches.policies import EXAMPLES
from tests.quick_cases import in_turn

WRAPPERS = ("", ",heads=shared", ",layers=pyramid", ",layers=shared")


def policy_of(spec: str, more: str, budget: float = 0.5) -> al.KVPolicy:
    try:
        return al.cache_policy(f"{spec}{',' if ':' in spec else ':'}budget={budget},when=prefill{more}")
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model():
    return build("llama").eval()


@pytest.mark.parametrize(("spec", "more"), in_turn(EXAMPLES, WRAPPERS))
@torch.no_grad()
def test_a_shared_reading_leaves_what_a_policys_own_leaves(model, spec, more):
    policy = policy_of(spec, more)
    ids, question = (torch.randint(0, 7, (3, n), generator=torch.Generator().manual_seed(n)) for n in (17, 5))
    with al.evicting(model, policy) as cache:
        model(ids, past_key_values=cache)
        held, expected = al.held_bytes(cache), model(question, past_key_values=cache).logits
    prefill = read_prefill(model, ids)
    # The second time shows that the first has not changed what is shared.
    for _ in range(2):
        with compressed(model, policy, prefill) as cache:
            assert al.held_bytes(cache) == held
            logits = model(question, past_key_values=cache).logits
        torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("spec", EXAMPLES)
@torch.no_grad()
def test_budgets_that_share_scores_leave_what_each_leaves_alone(model, spec):
    prefill, question = read_prefill(model, torch.randint(0, 7, (2, 17))), torch.randint(0, 7, (2, 3))
    shared = SharedScores()
    for budget in (0.7, 0.4):
        policy, logits = policy_of(spec, "", budget), []
        for scores in (None, shared):
            with compressed(model, policy, prefill, scores) as cache:
                logits.append(last_logits(model, question, cache, count=3))
        torch.testing.assert_close(logits[1], logits[0])
    # A policy that asks for the budget is asked at every budget; one that copies the moment may have asked.
    assert bool(shared.known) == (not spec.startswith(("criticalkv", "compact:queries=sampled")))


@torch.no_grad()
def test_some_rows_of_a_reading_are_those_rows(model):
    ids = torch.randint(0, 7, (3, 17))
    with compressed(
        model, al.cache_policy("h2o:budget=5,when=prefill"), read_prefill(model, ids).rows(slice(1, 3))
    ) as cache:
        few = last_logits(model, ids[1:, :2], cache, count=2)
    with compressed(model, al.cache_policy("h2o:budget=5,when=prefill"), read_prefill(model, ids)) as cache:
        torch.testing.assert_close(few, last_logits(model, ids[:, :2], cache, count=2)[1:])


@torch.no_grad()
def test_joined_caches_answer_as_each_alone(model):
    ids, question = torch.randint(0, 7, (2, 17)), torch.randint(0, 7, (2, 3))
    prefill, alone, parts = read_prefill(model, ids), [], []
    for spec in ("h2o:budget=6,when=prefill", "keydiff:budget=6,when=prefill"):
        with compressed(model, al.cache_policy(spec), prefill) as cache:
            parts.append(even_keys(cache))
            alone.append(last_logits(model, question, cache, count=3))
    positions = torch.arange(17, 20).expand(4, -1)
    together = last_logits(model, question.repeat(2, 1), cache_of(parts), count=3, position_ids=positions)
    torch.testing.assert_close(together, torch.cat(alone))


def test_uneven_heads_are_not_even_keys(model):
    with compressed(
        model,
        al.cache_policy("keydiff:budget=6,when=prefill,layers=pyramid"),
        read_prefill(model, torch.randint(0, 7, (2, 40))),
    ) as cache:
        assert even_keys(cache) is None
