"""Models whose caches hold each head's own number of keys: bytes, logits, gradients and beams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attnlab as al
from attnlab.adapters import adapter_of
from attnlab.adapters.cache_bytes import held_bytes
from attnlab.adapters.evicting_cache import EvictingCache, EvictingLayer
from attnlab.adapters.handed_on import hands_keys_on
from attnlab.caches import KeptKeys
from attnlab.mechanisms._device import without_kernels
from tests.adapters.both_kinds import tokens_of
from tests.adapters.test_families import DECODERS, NO_EVICTION
from tests.adapters.zoo import build, inputs
from tests.caches.test_laws import CASES, model_of, variants
from tests.caches.test_ragged import MOST
from tests.tolerance import RELATIVE, assert_close


@pytest.mark.parametrize(("family", "spec"), CASES)
def test_models_hold_no_more_bytes_than_those_of_the_kept_keys(family: str, spec: str) -> None:
    model, ids = model_of(family), torch.randint(3, 61, (2, 34), generator=torch.Generator().manual_seed(1))
    for policy in variants(spec, budget=20):
        with torch.no_grad(), al.evicting(model, policy) as cache:
            for part in (ids[:, :30], *ids[:, 30:].split(1, 1)):
                adapter_of(model).logits(part, cache=cache)
                certificates = [t for one in cache.certificates() if one is not None for t in vars(one).values()]
                other = cache.gathered_bytes() + sum(t.nbytes for t in certificates)
                assert cache.nbytes() - other <= MOST * cache.nominal_bytes()
        if isinstance(cache, EvictingCache):
            assert held_bytes(cache) == cache.nbytes()


# Families whose keys are not read where they lie: scores have a bias, or keys are looked at before attention.
COMPUTED_WHOLE = ("bloom", "falcon_alibi", "mpt", "xglm")


def decoded(model: Any, ids: Tensor, policy: str, **inputs: Any) -> list[Tensor]:
    """The logits of a question of three tokens behind a prompt, and of two steps."""
    logits, read = [], ids.shape[1] - 5
    with torch.no_grad(), al.evicting(model, policy) as cache:
        model(ids[:, :read], past_key_values=cache, **{name: t[:, :read] for name, t in inputs.items()})
        for new in (3, 1, 1):
            part, read = ids[:, read : read + new], read + new
            texts = {name: t[:, :read] for name, t in inputs.items()}
            logits.append(model(part, past_key_values=cache, **texts).logits)
    return logits


@pytest.fixture
def count_tokens(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], set[int]]:
    """How many tokens came in calls in which keys are read where they lie, which may be forbidden."""

    def begin(allowed: bool) -> set[int]:
        counts: set[int] = set()
        attend = KeptKeys.attend

        def counting(kept: KeptKeys, q: Tensor, **settings: Any) -> Tensor:
            counts.add(q.shape[2])
            return attend(kept, q, **settings)

        monkeypatch.setattr(KeptKeys, "attend", counting)
        if not allowed:
            monkeypatch.setattr(KeptKeys, "steps", lambda *_: False)
        return counts

    return begin


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [name for name in DECODERS if name not in NO_EVICTION])
def test_keys_read_where_they_lie_give_the_models_logits(
    name: str, padded: bool, count_tokens: Callable[[bool], set[int]]
) -> None:
    """Over every family: windows, biases and padding are honoured, or the call is computed as others are."""
    # Rounding grows in models that run their layers many times.
    model = build(name).double()
    ids = inputs(model)["input_ids"][:, :10]
    texts = {}
    if padded:
        texts["attention_mask"] = torch.ones_like(ids)
        texts["attention_mask"][0, :2] = 0
    policy = "value-norm:budget=4,when=prefill,heads=shared,recent=1"
    counts = count_tokens(True)
    steps = decoded(model, ids, policy, **texts)
    assert counts == (set() if name in COMPUTED_WHOLE else {1, 3})
    count_tokens(False)
    for step, expected in zip(steps, decoded(model, ids, policy, **texts), strict=True):
        assert_close(step, expected)


def test_several_tokens_are_read_where_keys_lie_by_our_decoder(count_tokens: Callable[[bool], set[int]]) -> None:
    model, ids = model_of("our decoder"), tokens_of(12)
    texts = []
    for allowed in (True, False):
        counts = count_tokens(allowed)
        with torch.no_grad(), al.evicting(model, "value-norm:budget=4,when=prefill,heads=shared,recent=1") as cache:
            texts.append([model(part, cache=cache).logits for part in ids.split([6, 4, 1, 1], 1)])
        assert counts == ({1, 4} if allowed else set())
    for part, expected in zip(*texts, strict=True):
        assert_close(part, expected)


def test_a_question_with_padding_is_read_as_alone() -> None:
    """Padding behind the prompt is dropped, too."""
    model, ids = build("llama").double(), tokens_of(12)[:1]
    for policy in ("value-norm:budget=4,when=prefill,heads=shared,recent=1", "compact:queries=prompt,budget=4"):
        with torch.no_grad(), al.evicting(model, policy) as alone:
            model(ids[:, :7], past_key_values=alone)
            expected = model(ids[:, 7:], past_key_values=alone).logits
        padded = torch.cat([ids[:, :7], ids.new_full((1, 2), 1), ids[:, 7:]], 1)
        mask = torch.ones_like(padded)
        mask[:, 7:9] = 0
        with torch.no_grad(), al.evicting(model, policy) as cache:
            model(padded[:, :7], past_key_values=cache, attention_mask=mask[:, :7])
            positions = torch.arange(5, 12)[None].clamp_min(7)
            logits = model(padded[:, 7:], past_key_values=cache, attention_mask=mask, position_ids=positions).logits
        assert_close(logits[:, 2:], expected)
        assert cache.kept() == alone.kept()


def test_a_step_gives_attentions_where_they_are_asked_for() -> None:
    model, ids = build("llama"), tokens_of(9)
    with torch.no_grad(), al.evicting(model, "value-norm:budget=4,when=prefill") as cache:
        model(ids, past_key_values=cache)
        answer = model(ids[:, :1], past_key_values=cache, output_attentions=True)
        assert answer.attentions[0].shape[-1] == 5
        assert cache.kept() == [5, 5, 5]
        model(ids[:, :1], past_key_values=cache)
    assert cache.kept() == [6, 6, 6]


def test_recorded_calls_keep_their_keys() -> None:
    """Later steps write into other places, or other buffers."""
    model, ids = build("llama"), tokens_of(12)
    for policy in ("h2o:budget=5", "value-norm:budget=5,when=prefill", "value-norm:budget=5,heads=shared,when=prefill"):
        with torch.no_grad(), al.evicting(model, policy) as cache, al.record(model, keep="all") as trace:
            for part in (ids[:, :8], *ids[:, 8:].split(1, 1)):
                model(part, past_key_values=cache)
        assert len(trace.history(0)) == 5
        for layer in trace.history(0):
            values = layer.values.repeat_interleave(layer.call.groups, 1)
            assert_close(layer.weights() @ values, layer.output)


def test_gradients_flow_through_the_cache() -> None:
    model, ids = build("llama").double(), tokens_of(9)

    def gradient(cache: Any) -> Tensor:
        model.zero_grad()
        cuts = [9] if cache is None else [6, 1, 2]
        settings = {} if cache is None else {"past_key_values": cache}
        logits = torch.cat([model(part, **settings).logits for part in ids.split(cuts, 1)], 1)
        logits.square().sum().backward()
        return model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    whole = gradient(None)
    for policy in ("h2o:budget=99", "value-norm:budget=99,when=prefill"):
        with al.evicting(model, policy) as cache:
            assert_close(gradient(cache), whole)


def test_a_prompt_read_in_inference_mode_is_continued_outside() -> None:
    model, ids = build("llama"), tokens_of(9)
    for policy in ("h2o:budget=5", "value-norm:budget=5,when=prefill,heads=shared"):
        with al.evicting(model, policy) as cache:
            with torch.inference_mode():
                model(ids, past_key_values=cache)
            with torch.no_grad():
                steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(2)]
        with al.evicting(model, policy) as other, torch.no_grad():
            model(ids, past_key_values=other)
            assert_close(steps[0], model(ids[:, :1], past_key_values=other).logits)


def test_a_layer_that_looks_at_its_keys_gets_all_of_them() -> None:
    """Doge makes a mask of the values of all tokens."""
    from transformers.models.doge.modeling_doge import DogeAttention
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    assert hands_keys_on(Qwen3Attention.forward)
    assert not hands_keys_on(DogeAttention.forward)
    assert not hands_keys_on(len)


def test_beams_of_uneven_heads_are_those_of_a_cache_that_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build("llama").double(), tokens_of(9)
    settings = {"num_beams": 3, "do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
    texts = []
    for _ in range(2):
        with al.evicting(model, "value-norm:budget=4,heads=shared,when=prefill,recent=1") as cache:
            texts.append(model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **settings))
        assert any(layer.kept.ragged for layer in cache.layers)
        monkeypatch.setattr(KeptKeys, "steps", lambda *_: False)
    assert torch.equal(*texts)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "policy", ["value-norm:budget=4,heads=shared,when=prefill,recent=1", "compact:queries=prompt,budget=4"]
)
def test_a_step_on_a_gpu_is_that_of_padded_keys(policy: str, dtype: torch.dtype) -> None:
    """The kernel is used by itself; without kernels the keys are padded."""
    model, ids = build("llama").to("cuda", dtype), tokens_of(12).cuda()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for texts in ({}, {"attention_mask": mask}):
        steps = decoded(model, ids, policy, **texts)
        with without_kernels():
            expected = decoded(model, ids, policy, **texts)
        # Half precision rounds every layer's states on the way to the logits.
        own, other = torch.cat(steps, 1).float(), torch.cat(expected, 1).float()
        assert (own - other).norm() <= RELATIVE[torch.bfloat16] * other.norm()


def test_a_reset_cache_is_empty() -> None:
    model, ids = build("llama"), tokens_of(9)
    with torch.no_grad(), al.evicting(model, "value-norm:budget=4,when=prefill") as cache:
        first = model(ids, past_key_values=cache).logits
        assert cache.layers[0].keys.shape == (2, 2, 4, 6)
        with pytest.raises(ValueError, match="cannot be set"):
            cache.layers[0].values = cache.layers[0].keys
        cache.reset()
        assert cache.nbytes() == 0
        assert cache.layers[0].keys is cache.layers[0].values is None
        assert all(isinstance(layer, EvictingLayer) for layer in cache.layers)
        assert torch.equal(model(ids, past_key_values=cache).logits, first)
