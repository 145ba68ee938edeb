"""Laws over every cache policy: what must hold whatever the policy ranks keys by."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnlab as al
from attnlab.adapters import adapter_of
from attnlab.attention import AttentionCall
from attnlab.caches import KeptKeys, KVPolicy, Place
from attnlab.caches.registry import key_score
from attnlab.chunks import small_chunks
from attnlab.models import greedy_search
from tests.adapters.both_kinds import FAMILIES
from tests.adapters.zoo import VOCABULARY
from tests.caches.policies import EXAMPLES
from tests.quick_cases import in_turn, one_quick
from tests.tolerance import assert_close

PROMPT, STEPS, BUDGET = 11, 4, 5


def variants(spec: str, **settings: Any) -> list[KVPolicy]:
    """The policy as its paper has it, and where it can under the other schedule with heads that share a budget."""
    score = key_score(spec)
    other = score.when if "step" in score.cannot() else {"step": "prefill", "prefill": "step"}[score.when]
    heads = "each" if "shared" in score.cannot() else "shared"
    ways = {(score.when, "each"), (other, heads)}
    return [KVPolicy(by=spec, when=when, heads=head, **settings) for when, head in sorted(ways)]


PADDED = [spec for spec in EXAMPLES if "padding" not in key_score(spec).cannot()]


def families_in_turn(specs: list[str]) -> list[Any]:
    """(family, policy), of which every policy is quick with one family."""
    families = {spec: ["llama", *(["our decoder"] if not key_score(spec).reads_twice else [])] for spec in specs}
    return [case for i, spec in enumerate(specs) for case in one_quick([(f, spec) for f in families[spec]], i)]


CASES = families_in_turn(list(EXAMPLES))


@functools.cache
def model_of(family: str) -> nn.Module:
    # In float32, equal tokens have scores that differ by rounding, which depends on the size of the batch.
    return FAMILIES[family].make().double()


def tokens(rows: int, length: int = PROMPT + STEPS) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(7))


def different_tokens(length: int) -> Tensor:
    """One text; values of equal tokens are equal in the first layer, and rounding decides which of them is kept."""
    return 3 + torch.randperm(VOCABULARY - 3, generator=torch.Generator().manual_seed(7))[None, :length]


def unused_tokens(_: int, text: Tensor) -> list[int]:
    """The tokens that are not in a text."""
    return sorted(set(range(VOCABULARY)) - set(text.tolist()))


def read(model: nn.Module, ids: Tensor, policy: KVPolicy) -> tuple[Tensor, Any]:
    """The logits of the prompt's last token and of each later one, and the cache after them."""
    adapter, logits = adapter_of(model), []
    with torch.no_grad(), al.evicting(model, policy) as cache:
        for part in (ids[:, :PROMPT], *ids[:, PROMPT:].split(1, 1)):
            logits.append(adapter.logits(part, cache=cache)[:, -1])
    return torch.stack(logits, 1), cache


@pytest.mark.parametrize(("family", "spec"), CASES)
def test_a_budget_of_all_keys_equals_no_policy(family: str, spec: str) -> None:
    model = model_of(family)
    ids = tokens(2)
    with torch.no_grad():
        whole = adapter_of(model).logits(ids)[:, PROMPT - 1 :]
    for policy in variants(spec, budget=PROMPT + STEPS):
        logits, cache = read(model, ids, policy)
        assert_close(logits, whole)
        assert cache.kept() == [PROMPT + STEPS] * 3


@pytest.mark.parametrize(("family", "spec"), CASES)
def test_no_more_keys_are_kept_than_the_budget(family: str, spec: str) -> None:
    model = model_of(family)
    for policy in (*variants(spec, budget=BUDGET, sinks=1), *variants(spec, budget=0.5, layers="pyramid")):
        _, cache = read(model, tokens(2), policy)
        after_step = policy.schedule == "step"
        tokens_read = PROMPT + STEPS if after_step else PROMPT
        if policy.shares_layers:
            held = cache.kept_by_head()
            whole = sum(policy.budgets([tokens_read])[0] * counts.shape[1] for counts in held)
            assert int(sum(counts.sum(-1) - STEPS * counts.shape[1] for counts in held).max()) == whole
            continue
        for layer, counts in enumerate(cache.kept_by_head()):
            (most,) = policy.budgets([tokens_read], layer=layer, layers=3)
            if policy.heads == "shared":
                counts, most = counts.sum(-1), most * counts.shape[-1]
            grown = 0 if after_step else STEPS * (cache.kept_by_head()[layer].shape[-1] if counts.dim() == 1 else 1)
            assert int(counts.max()) <= most + grown
        if policy.budget == BUDGET and policy.heads == "each" and (policy.layers or key_score(spec).layers) == "even":
            assert cache.kept() == [BUDGET + (0 if after_step else STEPS)] * 3


def padded_rows() -> tuple[list[Tensor], Tensor, Tensor]:
    """Prompts of 11, 7 and 9 tokens, alone and padded to one length, with the mask."""
    rows = [row[:length] for row, length in zip(tokens(3, PROMPT), (11, 7, 9), strict=True)]
    ids, mask = torch.full((3, PROMPT), 1), torch.zeros(3, PROMPT, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, PROMPT - len(row) :], mask[i, PROMPT - len(row) :] = row, 1
    return rows, ids, mask


@pytest.mark.parametrize(("family", "spec"), families_in_turn(PADDED))
def test_uneven_prompts_in_a_batch_give_what_each_gives_alone(family: str, spec: str) -> None:
    model = model_of(family)
    rows, ids, mask = padded_rows()
    first, *others = variants(spec, budget=BUDGET)
    for policy in (first, *(replace(other, budget=0.5, sinks=1) for other in others)):
        with al.evicting(model, policy) as cache:
            together = continued(model, ids, mask, cache)
        held = cache.kept_by_head()
        for i, row in enumerate(rows):
            with al.evicting(model, policy) as alone:
                assert continued(model, row[None], torch.ones_like(row[None]), alone)[0] == together[i], policy
            assert all(torch.equal(mine[i], one[0]) for mine, one in zip(held, alone.kept_by_head(), strict=True))


def continued(model: Any, ids: Tensor, mask: Tensor, cache: Any) -> list[list[int]]:
    """Greedy continuations."""
    if hasattr(model, "generate") and not hasattr(model, "decode"):
        out = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False
        )
        return out[:, ids.shape[1] :].tolist()
    found = greedy_search(model, ids, attention_mask=mask, eos=None, max_new=STEPS, cache=cache)
    return [list(hypothesis.tokens) for hypothesis in found]


def random_call(rows: int = 2, queries: int = 9, **settings: Any) -> AttentionCall:
    torch.manual_seed(5)
    q, k, v = torch.randn(rows, 4, queries, 8), torch.randn(rows, 2, queries, 8), torch.randn(rows, 2, queries, 6)
    return AttentionCall(q, k, v, causal=True, **settings)


PLACE = Place(1, 3, torch.randn(7, 24, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize("spec", PADDED)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, 1e30])
def test_hidden_keys_change_nothing(spec: str, number: float) -> None:
    shown = torch.ones(2, 9, dtype=torch.bool)
    shown[0, :3] = shown[1, 7:] = False
    call = random_call(key_visible=shown)
    hidden = ~shown[:, None, :, None]
    other = replace(call, k=call.k.masked_fill(hidden, number), v=call.v.masked_fill(hidden, number))
    for policy in variants(spec, budget=4):
        kept = []
        for each in (call, other):
            keys = KeptKeys(policy, 1)
            keys.extend(each.k, each.v)
            keys.cut(each, PLACE)
            kept.append(keys.columns)
        assert torch.equal(*kept)
        assert not set(kept[0][0].flatten().tolist()) & {0, 1, 2}
        assert not set(kept[0][1].flatten().tolist()) & {7, 8}


@pytest.mark.parametrize("spec", EXAMPLES)
def test_chunks_of_queries_change_nothing(spec: str) -> None:
    model, ids = model_of("llama"), tokens(2)
    for policy in variants(spec, budget=BUDGET):
        expected, _ = read(model, ids, policy)
        with small_chunks(elements=60, tokens=3):
            actual, _ = read(model, ids, policy)
        assert_close(actual, expected)


@pytest.mark.parametrize("spec", PADDED)
def test_no_gradient_is_kept(spec: str) -> None:
    call = random_call()
    for t in (call.q, call.k, call.v):
        t.requires_grad_()
    for policy in variants(spec, budget=4):
        keys = KeptKeys(policy, 1)
        keys.extend(call.k, call.v)
        keys.cut(call, PLACE)
        assert keys.columns is not None
        buffers = {name: t for name, t in keys.store.buffers.items() if name not in ("keys", "values")}
        assert not any(t.requires_grad for t in (*buffers.values(), *keys.gathered.per_row.values()))


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 3},
    "sampling": {"do_sample": True, "top_k": 0, "num_return_sequences": 2},
}


@pytest.mark.parametrize(("spec", "way"), in_turn(EXAMPLES, WAYS))
def test_generated_text_has_the_score_it_has_when_read(spec: str, way: str) -> None:
    """Each sequence is scored by the keys of its own tokens, although beams change rows at every step."""
    model, ids = model_of("llama"), different_tokens(PROMPT)
    for policy in variants(spec, budget=BUDGET):
        with al.evicting(model, policy) as cache:
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=STEPS,
                min_new_tokens=STEPS,
                return_dict_in_generate=True,
                output_scores=True,
                prefix_allowed_tokens_fn=unused_tokens,
                **WAYS[way],
            )
        scores = model.compute_transition_scores(
            found.sequences, found.scores, getattr(found, "beam_indices", None), normalize_logits=way != "beams"
        )
        for text, score in zip(found.sequences, scores, strict=True):
            logits, _ = read(model, text[None, : PROMPT + STEPS - 1], policy)
            if way != "beams":
                # generate forbids the end of the text and used tokens; for beams it does so after the softmax.
                logits[..., model.config.eos_token_id] = -torch.inf
                for i in range(STEPS):
                    logits[0, i, text[: PROMPT + i]] = -torch.inf
            log_p = logits.log_softmax(-1)
            assert_close(log_p[0].gather(-1, text[PROMPT:, None])[:, 0], score.to(log_p), dtype=torch.float32)
