"""Memory that is really freed: flat keys against lists, bytes really held, and outputs over the keys that are left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attnlab as al
from attnlab.adapters import adapter_of
from attnlab.adapters.cache_bytes import held_bytes
from attnlab.adapters.evicting_cache import EvictingCache, EvictingLayer
from attnlab.adapters.handed_on import hands_keys_on
from attnlab.attention import AttentionCall, small_chunks
from attnlab.caches import KeptKeys, KVPolicy, Place
from attnlab.caches.ragged import RaggedKeys
from attnlab.mechanisms._device import without_kernels
from attnlab.mechanisms.softmax import Softmax
from tests.adapters.both_kinds import tokens_of
from tests.adapters.test_families import DECODERS, NO_EVICTION
from tests.adapters.zoo import build, inputs
from tests.caches.policies import EXAMPLES
from tests.caches.test_laws import CASES, PADDED, model_of, variants
from tests.tolerance import assert_close

ROWS, GROUPS, HEADS, WIDTH, VALUE = 3, 2, 6, 64, 48
PROMPT, STEPS = 150, 9
MOST = 1.05


class Lists:
    """What ``RaggedKeys`` holds, as a list for each head."""

    def __init__(self, keep: Tensor, t: Tensor) -> None:
        self.heads = [[t[r, g][keep[r, g]] for g in range(keep.shape[1])] for r in range(keep.shape[0])]

    def append(self, new: Tensor) -> None:
        self.heads = [[torch.cat([own, new[r, g]]) for g, own in enumerate(row)] for r, row in enumerate(self.heads)]

    def select(self, rows: Tensor) -> None:
        self.heads = [self.heads[r] for r in rows.tolist()]

    def check(self, held: RaggedKeys, name: str) -> None:
        padded = held.padded(name, 0)
        counts = held.count_by_head().tolist()
        for r, row in enumerate(self.heads):
            for g, own in enumerate(row):
                assert counts[r][g] == len(own)
                assert torch.equal(padded[r, g, padded.shape[2] - len(own) :], own)
                assert not padded[r, g, : padded.shape[2] - len(own)].any()


@pytest.mark.parametrize("even", [False, True])
@torch.no_grad()
def test_flat_keys_are_what_lists_of_keys_are(even: bool) -> None:
    k, v = torch.randn(ROWS, GROUPS, PROMPT, 5), torch.randn(ROWS, GROUPS, PROMPT, 7)
    keep = torch.rand(ROWS, GROUPS, PROMPT) < torch.rand(ROWS, GROUPS, 1) ** 2
    keep = torch.arange(PROMPT).expand(keep.shape) % 3 > 0 if even else keep
    held = RaggedKeys(keep, {"keys": k, "values": v, "other": k[..., 0]})
    lists = {"keys": Lists(keep, k), "values": Lists(keep, v), "other": Lists(keep, k[..., 0])}
    assert held.even == even
    for step in range(5):
        new = {"keys": torch.randn(held.rows, GROUPS, 1, 5), "values": torch.randn(held.rows, GROUPS, 1, 7)}
        if not held.room:
            held.grow()
        held.append(new["keys"], new["values"])
        for name, own in lists.items():
            own.append(new.get(name, torch.zeros(held.rows, GROUPS, 1)))
            own.check(held, name)
        if step == 2:
            rows = torch.tensor([2, 0, 0, 1])
            held.select(rows)
            for name, own in lists.items():
                own.select(rows)
                own.check(held, name)
    other = torch.randn(held.rows, GROUPS, held.longest)
    held.put("other", other)
    padded = held.padded("other", 0)
    assert torch.equal(padded, torch.where(padded == 0, 0, other))
    assert int((padded != 0).sum()) == held.total


@torch.no_grad()
def test_several_keys_are_appended_in_their_order() -> None:
    k, keep = torch.randn(2, 2, 700, 3), torch.rand(2, 2, 700) < 0.9
    columns = torch.arange(700, dtype=torch.int32).expand(2, 2, -1)
    held, lists = RaggedKeys(keep, {"keys": k, "values": k, "columns": columns}), (Lists(keep, k), Lists(keep, columns))
    new, more = torch.randn(2, 2, 3, 3), torch.tensor([700, 701, 702], dtype=torch.int32).expand(2, 2, -1)
    held.append(new, new, more)
    held.append(new[:, :, :1], new[:, :, :1], 703)
    for own, name, parts in zip(
        lists, ("keys", "columns"), ((new, new[:, :, :1]), (more, torch.full((2, 2, 1), 703))), strict=True
    ):
        for part in parts:
            own.append(part)
        own.check(held, name)


@torch.no_grad()
def test_dropped_keys_are_dropped_in_place_where_they_fit() -> None:
    k = torch.randn(2, 2, 400, 8)
    keep = torch.ones(2, 2, 400, dtype=torch.bool)
    keep[0, 0, :100] = False
    held = RaggedKeys(keep, {"keys": k, "values": k})
    address = held.buffers["keys"].data_ptr()
    for _ in range(5):
        held.append(torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 8))
        padded = held.padded("keys")
        keep = torch.arange(held.longest) >= held.longest - held.count_by_head()[..., None] + 1
        held.replace(keep, {"keys": padded, "values": held.padded("values")})
        assert torch.equal(held.padded("keys")[1], padded[1, :, 1:])
    assert held.buffers["keys"].data_ptr() == address
    held.replace(
        keep[..., 1:] & (torch.arange(400) % 4 == 0), {"keys": held.padded("keys"), "values": held.padded("values")}
    )
    assert held.nbytes() <= MOST * held.nominal_bytes()


def random_call(queries: int, keys: Tensor, values: Tensor, **settings: Any) -> AttentionCall:
    q = torch.randn(keys.shape[0], HEADS, queries, WIDTH, dtype=keys.dtype)
    return AttentionCall(q, keys, values, causal=True, offset=keys.shape[2] - queries, **settings)


PLACE = Place(1, 3, torch.randn(7, HEADS * VALUE, generator=torch.Generator().manual_seed(2)))


def new_tokens(count: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(ROWS, GROUPS, count, width, dtype=torch.bfloat16) for width in (WIDTH, VALUE))


def all_variants(spec: str) -> list[KVPolicy]:
    """The policy under every schedule and wrapper that it takes."""
    return [*variants(spec, budget=40), *variants(spec, budget=0.3), *variants(spec, budget=40, layers="pyramid")]


def read_prompt(policy: KVPolicy) -> KeptKeys:
    """A cache after a prompt whose rows have 150, 110 and 149 tokens."""
    kept, shown = KeptKeys(policy, 1), torch.ones(ROWS, PROMPT, dtype=torch.bool)
    shown[1, :40] = shown[2, :1] = False
    padded = "padding" not in policy.score.cannot()
    k, v = kept.extend(*new_tokens(PROMPT))
    kept.cut(random_call(PROMPT, k, v, key_visible=shown if padded else None), PLACE)
    if kept.waits:
        k, v = kept.extend(*new_tokens(PROMPT))
        kept.cut_after_rereading(random_call(PROMPT, k, v), PLACE)
    return kept


@pytest.mark.parametrize("spec", EXAMPLES)
@torch.no_grad()
def test_no_more_bytes_are_held_than_those_of_the_kept_keys(spec: str) -> None:
    """After the prompt, after every step, and when beams are copied; what a policy ranks by is counted apart.

    A key that stands for others has one number more, in float32.
    """
    for policy in all_variants(spec):
        kept = read_prompt(policy)
        for step in range(STEPS):
            assert kept.biased == spec.startswith("compact")
            counted = int(kept.counts().sum()) * ((WIDTH + VALUE) * 2 + 4 * kept.biased)
            assert kept.nominal_bytes() == counted
            assert kept.nbytes() - kept.gathered_bytes() <= MOST * counted, policy
            assert kept.nbytes() == sum(storages(kept).values())
            assert policy.schedule == "step" or kept.gathered_bytes() == 0
            if step == 4:
                kept.select(torch.tensor([2, 0, 0]))
                continue
            k, v = new_tokens(1)
            if kept.steps(k):
                kept.append(k, v)
                kept.attend(torch.randn(ROWS, HEADS, 1, WIDTH, dtype=k.dtype), scale=0.1)
            else:
                k, v = kept.extend(k, v)
                mask = kept.mask(AttentionCall(torch.zeros(ROWS, HEADS, 1, WIDTH, dtype=k.dtype), k, v))
                kept.cut(random_call(1, k, v, mask=mask), PLACE)


def storages(kept: KeptKeys) -> dict[int, int]:
    """The real storage of every tensor that a cache of a layer can reach, each counted once."""
    tensors: list[Tensor] = []

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            tensors.append(value)
        for other in (
            value.values() if isinstance(value, dict) else vars(value).values() if hasattr(value, "__dict__") else ()
        ):
            if not isinstance(other, KVPolicy):
                visit(other)

    visit(kept)
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


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


@pytest.mark.parametrize("spec", EXAMPLES)
@torch.no_grad()
def test_a_step_is_softmax_over_the_kept_keys(spec: str) -> None:
    for policy in all_variants(spec):
        kept = read_prompt(replace(policy, when="prefill"))
        for visible in (None, torch.rand(ROWS, PROMPT + STEPS) < 0.7):
            k, v = new_tokens(1)
            assert kept.steps(k)
            kept.append(k, v)
            q = torch.randn(ROWS, HEADS, 1, WIDTH, dtype=k.dtype)
            out = kept.attend(q, scale=0.2, visible=visible)
            columns = torch.arange(kept.length).expand(ROWS, GROUPS, -1) if kept.columns is None else kept.columns
            seen = columns >= 0
            if visible is not None:
                seen = seen & visible[:, None].expand(-1, GROUPS, -1).gather(2, columns.clamp_min(0).long())
            keys, values = kept.store.padded("keys", 0), kept.store.padded("values", 0)
            mask = seen.repeat_interleave(HEADS // GROUPS, 1).unsqueeze(2)
            bias = kept.store.padded("bias", 0).to(q).repeat_interleave(HEADS // GROUPS, 1) if kept.biased else None
            call = AttentionCall(q, keys, values, mask=mask, bias=None if bias is None else bias[:, :, None], scale=0.2)
            assert_close(out, Softmax()(call), dtype=torch.bfloat16)


# Families whose keys are not read where they lie: scores have a bias, or keys are looked at before attention.
COMPUTED_WHOLE = ("bloom", "falcon_alibi", "mpt", "xglm")


def decoded(model: Any, ids: Tensor, policy: str, **inputs: Any) -> list[Tensor]:
    """The logits of three steps behind a prompt."""
    with torch.no_grad(), al.evicting(model, policy) as cache:
        model(ids[:, :-3], past_key_values=cache, **{name: t[:, :-3] for name, t in inputs.items()})
        steps = range(ids.shape[1] - 3, ids.shape[1])
        return [
            model(
                ids[:, t : t + 1], past_key_values=cache, **{name: x[:, : t + 1] for name, x in inputs.items()}
            ).logits
            for t in steps
        ]


@pytest.fixture
def count_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[int]]:
    """Count, or forbid, the steps in which keys are read where they lie."""

    def begin(allowed: bool) -> list[int]:
        lengths: list[int] = []
        attend = KeptKeys.attend

        def counting(kept: KeptKeys, *args: Any, **settings: Any) -> Tensor:
            lengths.append(kept.length)
            return attend(kept, *args, **settings)

        monkeypatch.setattr(KeptKeys, "attend", counting)
        if not allowed:
            monkeypatch.setattr(KeptKeys, "steps", lambda *_: False)
        return lengths

    return begin


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [name for name in DECODERS if name not in NO_EVICTION])
def test_keys_read_where_they_lie_give_the_models_logits(
    name: str, padded: bool, count_steps: Callable[[bool], list[int]]
) -> None:
    """Over every family: windows, biases and padding are honoured, or the step is computed as others are."""
    # Rounding grows in models that run their layers many times.
    model = build(name).double()
    ids = inputs(model)["input_ids"][:, :10]
    texts = {}
    if padded:
        texts["attention_mask"] = torch.ones_like(ids)
        texts["attention_mask"][0, :2] = 0
    policy = "value-norm:budget=4,when=prefill,heads=shared,recent=1"
    lengths = count_steps(True)
    steps = decoded(model, ids, policy, **texts)
    assert bool(lengths) == (name not in COMPUTED_WHOLE), lengths
    count_steps(False)
    for step, expected in zip(steps, decoded(model, ids, policy, **texts), strict=True):
        assert_close(step, expected)


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


class Largest(TorchDispatchMode):
    """The most elements that a tensor made inside has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // max(1, t.element_size()))
        return out


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("spec", EXAMPLES)
@torch.no_grad()
def test_no_policy_makes_all_of_w(spec: str, padded: bool) -> None:
    """Sums over queries are made chunk by chunk, and rows of the last queries alone where those suffice."""
    if padded and spec not in PADDED:
        pytest.skip("refuses padding")
    n = 600
    q, k, v = torch.randn(1, 1, n, 8), torch.randn(1, 1, n, 8), torch.randn(1, 1, n, 8)
    shown = torch.arange(n)[None] >= 7 if padded else None
    kept = KeptKeys(KVPolicy(64, by=spec, when="prefill"), 1)
    kept.extend(k, v)
    with small_chunks(elements=16 * n, tokens=n), Largest() as largest:
        kept.cut(AttentionCall(q, k, v, causal=True, key_visible=shown), Place(1, 3, torch.randn(7, 8)))
    assert largest.elements <= n * n // 8


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
        assert_close(torch.cat(steps), torch.cat(expected), dtype=torch.bfloat16)


@torch.no_grad()
def test_a_bias_of_keys_is_added_to_their_scores() -> None:
    k, q, bias = torch.randn(2, 2, 9, 8), torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9)
    keep = torch.rand(2, 2, 9) < 0.5
    visible = torch.rand(2, 9) < 0.8
    columns = torch.arange(9, dtype=torch.int32).expand(2, 2, -1)
    held = RaggedKeys(keep, {"keys": k, "values": k, "bias": bias, "columns": columns})
    for seen, rows in ((keep, None), (keep & visible[:, None], visible)):
        mask, added = (t.repeat_interleave(2, 1).unsqueeze(2) for t in (seen, bias))
        expected = Softmax()(AttentionCall(q, k, k, mask=mask, bias=added, scale=0.3))
        assert_close(held.attend(q, scale=0.3, visible=rows), expected)


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
