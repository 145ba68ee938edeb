"""How a cache may be used, whatever its policy: copied, continued, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import attnlab as al
from attnlab.caches import KVPolicy
from tests.adapters.both_kinds import tokens_of
from tests.adapters.zoo import build
from tests.caches.policies import EXAMPLES
from tests.caches.test_laws import BUDGET, model_of, variants
from tests.tolerance import assert_close

QUESTIONS = ([3, 9, 27, 5], [11])


def answered(model: Any, prompt: Tensor, question: list[int], cache: Any) -> Tensor:
    """The logits behind a question and one step, where the prompt is still to be read, or was."""
    parts = [*([] if cache.get_seq_length() else [prompt]), torch.tensor([question]), torch.tensor([[7]])]
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache).logits for part in parts][-2:], 1)


@pytest.mark.parametrize("spec", EXAMPLES)
def test_a_prompt_compressed_once_answers_many_questions_by_copies(spec: str) -> None:
    """Each as if the prompt had been read for it alone; the cache itself stays as it was."""
    model, prompt = model_of("llama"), tokens_of(12)[:1]
    for policy in variants(spec, budget=BUDGET):
        expected = []
        for question in QUESTIONS:
            with al.evicting(model, policy) as alone:
                expected.append(answered(model, prompt, question, alone))
        with al.evicting(model, policy) as cache:
            with torch.no_grad():
                model(prompt, past_key_values=cache)
            held = cache.nbytes()
            copies = [copy.deepcopy(cache) for _ in QUESTIONS]
            for question, one, logits in zip(QUESTIONS, copies, expected, strict=True):
                assert_close(answered(model, prompt, question, one), logits)
            assert (cache.nbytes(), cache.get_seq_length()) == (held, 12)
            assert_close(answered(model, prompt, QUESTIONS[0], cache), expected[0])


@pytest.mark.parametrize("spec", EXAMPLES)
def test_a_prompt_that_is_read_in_parts_is_refused_or_keeps_to_the_budget(spec: str) -> None:
    """A policy that drops keys once would drop those of the first part only."""
    model, ids = model_of("llama"), tokens_of(12)
    settings = {"max_new_tokens": 2, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    in_parts = {"prefill_chunk_size": 5}
    for policy in variants(spec, budget=BUDGET):
        with al.evicting(model, policy) as cache:
            if policy.schedule == "step":
                model.generate(ids, past_key_values=cache, **settings, **in_parts)
                assert sum(int(counts.sum()) for counts in cache.kept_by_head()) <= BUDGET * 3 * 2 * len(ids)
                continue
            with pytest.raises(ValueError, match="prefill_chunk_size"):
                model.generate(ids, past_key_values=cache, **settings, **in_parts)
            with pytest.raises(ValueError, match="prefill_chunk_size"):
                model.generate(ids, al_config(model, **in_parts), past_key_values=cache, **settings)
            assert cache.get_seq_length() == 0
            model.generate(ids, past_key_values=cache, **settings)
    assert "generate" not in model.__dict__


def al_config(model: Any, **settings: Any) -> Any:
    config = copy.deepcopy(model.generation_config)
    config.update(**settings)
    return config


@pytest.mark.parametrize("spec", EXAMPLES)
def test_a_cache_whose_context_ended_is_refused(spec: str) -> None:
    """The model's own attention would read the new keys alone, or heads that are padded."""
    model, ids = model_of("llama"), tokens_of(12)
    for policy in variants(spec, budget=BUDGET):
        with torch.no_grad(), al.evicting(model, policy) as cache:
            model(ids, past_key_values=cache)
        with torch.no_grad(), pytest.raises(ValueError, match="has ended"):
            model(ids[:, :1], past_key_values=cache)
        with torch.no_grad(), al.evicting(model, policy), pytest.raises(ValueError, match="has ended"):
            model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("family", ["llama", "our decoder"])
@pytest.mark.parametrize("when", ["step", "prefill"])
def test_another_number_of_rows_is_refused(family: str, when: str) -> None:
    model, ids = model_of(family), tokens_of(12)
    name = "past_key_values" if family == "llama" else "cache"
    for before, after in ((2, 1), (1, 2)):
        with torch.no_grad(), al.evicting(model, KVPolicy(BUDGET, by="value-norm", when=when)) as cache:
            model(ids[:before], **{name: cache})
            with pytest.raises(ValueError, match=f"holds {before} rows, and this call brings {after}"):
                model(ids[:after, :1], **{name: cache})
            model(ids[:before, :1], **{name: cache})


@pytest.mark.parametrize("spec", EXAMPLES)
def test_another_model_is_refused(spec: str) -> None:
    """Its own attention would read whatever the cache hands out, and nothing would be evicted."""
    model, other, ids = model_of("llama"), build("llama").double(), tokens_of(12)
    for policy in variants(spec, budget=BUDGET):
        for read in (0, 12):
            with torch.no_grad(), al.evicting(model, policy) as cache:
                if read:
                    model(ids, past_key_values=cache)
                with pytest.raises(ValueError, match="is not the one in"):
                    other(ids[:, :1] if read else ids, past_key_values=cache)
                cache.reset()
                model(ids, past_key_values=cache)
