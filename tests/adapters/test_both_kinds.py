"""The same statements on both kinds of model: Hugging Face's, and those with attention layers of attnlab.models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import attnlab as al
from attnlab.adapters import adapter_of
from attnlab.adapters.evict import RANKINGS, perplexity
from attnlab.models import (
    Transformer,
    TransformerConfig,
    beam_search,
    greedy_search,
    load_transformer,
    save_transformer,
)
from tests.adapters.test_load import write_tokenizer
from tests.adapters.zoo import VOCABULARY, build, inputs, padding
from tests.tolerance import assert_close

# Large enough for attention to matter.
STD = 0.3


def ours(kind: str) -> Transformer:
    """A transformer of this package with the vocabulary of the zoo."""
    torch.manual_seed(3)
    config = TransformerConfig(kind=kind, vocab=VOCABULARY, width=24, heads=4, layers=3, hidden=37, max_length=64)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=STD)
    return model


def save_and_load_hf(model: tf.PreTrainedModel, folder: Path) -> nn.Module:
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return al.load_model(folder).model


def save_and_load_ours(model: Transformer, folder: Path) -> nn.Module:
    return load_transformer(save_transformer(model, folder))


@dataclass(frozen=True)
class Family:
    """How a kind of model is made, and how it goes through files."""

    make: Callable[[], Any]
    save_and_load: Callable[[Any, Path], nn.Module]


FAMILIES = {
    "bert": Family(lambda: build("bert"), save_and_load_hf),
    "llama": Family(lambda: build("llama"), save_and_load_hf),
    "bart": Family(lambda: build("bart"), save_and_load_hf),
    "our encoder": Family(lambda: ours("encoder"), save_and_load_ours),
    "our decoder": Family(lambda: ours("decoder"), save_and_load_ours),
    "our encoder-decoder": Family(lambda: ours("encoder-decoder"), save_and_load_ours),
}
DECODERS = ("llama", "our decoder")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(params=DECODERS)
def decoder(request: pytest.FixtureRequest) -> nn.Module:
    return FAMILIES[request.param].make()


def batch(model: Any, kind: str = "right") -> dict[str, Tensor]:
    if not isinstance(model, Transformer):
        return inputs(model, padding(kind))
    tokens = torch.randint(3, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(11))
    texts = {"input_ids": tokens} | ({} if kind == "none" else {"attention_mask": padding(kind)})
    return texts | ({"decoder_input_ids": tokens[:, :7]} if model.config.kind == "encoder-decoder" else {})


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**batch(model)).logits


def first_kind(model: nn.Module) -> str:
    return adapter_of(model).sites()[0].kind


def test_a_swap_changes_the_output_and_is_undone(family: Family) -> None:
    model = family.make()
    before = logits(model)
    with al.swap(model, "kernel:elu"):
        assert (logits(model) - before).abs().max() > 1e-3
    assert torch.equal(logits(model), before)
    with pytest.raises(RuntimeError, match="inside"), al.swap(model, "kernel:elu"), al.record(model):
        raise RuntimeError("inside")
    assert torch.equal(logits(model), before)
    with al.swap(model, "softmax"):
        assert_close(logits(model), before)


def test_contexts_nest_and_end_in_any_order(family: Family) -> None:
    model = family.make()
    before = logits(model)
    first, second = al.swap(model, "kernel:elu"), al.swap(model, "softmax")
    first.__enter__()
    second.__enter__()
    assert_close(logits(model), before)
    first.__exit__(None, None, None)
    assert_close(logits(model), before)
    second.__exit__(None, None, None)
    assert torch.equal(logits(model), before)


def test_layers_are_chosen_alike(family: Family) -> None:
    model = family.make()
    kind = first_kind(model)
    mechanisms: dict[Any, list[str]] = {}
    for key in ((kind, 1), [(kind, 0), (kind, -1)], kind, f"{kind} 1"):
        with torch.no_grad(), al.swap(model, "kernel:elu", layers=key), al.record(model) as trace:
            model(**batch(model))
        swapped = [layer.layer for layer in trace if layer.kind == kind and al.spec_of(layer.mechanism) == "kernel"]
        assert not any(al.spec_of(layer.mechanism) == "kernel" for layer in trace if layer.kind != kind)
        mechanisms[str(key)] = swapped
    layers = sum(site.kind == kind for site in adapter_of(model).sites())
    assert list(mechanisms.values()) == [[1], [0, layers - 1], list(range(layers)), [1]]
    with pytest.raises(ValueError, match="no layer"), al.swap(model, "kernel:elu", layers=(kind, 9)):
        pass
    with pytest.raises(ValueError, match="dropout must be"), al.swap(model, "kernel:elu", dropout="no"):
        pass


def test_a_plain_number_is_ambiguous_in_an_encoder_decoder() -> None:
    for name in ("bart", "our encoder-decoder"):
        model = FAMILIES[name].make()
        with pytest.raises(ValueError, match="layer 0 is ambiguous"), al.swap(model, "softmax", layers=0):
            pass
        with pytest.raises(ValueError, match="layer 0 is ambiguous"):
            al.convert(model, "abc-mlp", layers=[0])


def test_a_plan_is_swapped_in(family: Family) -> None:
    model = family.make()
    kind = first_kind(model)
    plan = al.Plan({(kind, 0): "kernel:elu", (kind, 1): "top-r:r=2"})
    with torch.no_grad(), al.swap_plan(model, plan), al.record(model) as trace:
        model(**batch(model))
    assert [al.spec_of(trace[kind, i].mechanism).split(":")[0] for i in (0, 1)] == ["kernel", "top-r"]


@pytest.mark.parametrize("mech", [None, "kernel:elu", "value-aware:r=1"])
def test_recorded_weights_give_the_recorded_output(family: Family, mech: str | None) -> None:
    model = family.make()
    with torch.no_grad(), al.swap(model, mech or "softmax"), al.record(model) as trace:
        model(**batch(model))
    assert len(trace) == len(adapter_of(model).sites())
    for layer in trace:
        assert repr(layer.mechanism) == repr(al.mechanism(mech or "softmax"))
        assert_close(layer.weights() @ layer.values.repeat_interleave(layer.call.groups, 1), layer.output)
        width = layer.output.shape[1] * layer.output.shape[3]
        assert layer.projection is not None
        assert layer.projection.shape[1] == width


def test_every_call_is_kept_when_asked(family: Family) -> None:
    model = family.make()
    with torch.no_grad(), al.record(model, keep="all") as every, al.record(model) as last:
        model(**batch(model))
        model(**batch(model, "none"))
    key = (first_kind(model), 0)
    assert [layer.call.key_visible is None for layer in every.history(key)] == [False, True]
    assert len(last.history(key)) == 1


def test_a_copy_made_inside_a_swap_is_swapped_while_it_lasts(family: Family) -> None:
    model = family.make()
    before = logits(model)
    with al.swap(model, "kernel:elu"), al.record(model) as trace:
        twin = copy.deepcopy(model)
        inside = logits(twin)
        assert len(trace) == len(adapter_of(model).sites())
        assert torch.equal(logits(model), inside)
        with al.swap(twin, "softmax"):
            assert_close(logits(twin), before)
            assert torch.equal(logits(model), inside)
    assert_close(logits(twin), before)


def test_a_swap_is_not_saved(family: Family, tmp_path: Path) -> None:
    model = family.make()
    before = logits(model)
    with al.swap(model, "abc-mlp:slots=3"):
        again = family.save_and_load(model, tmp_path)
    assert not al.is_converted(again)
    assert_close(logits(again), before)


def test_a_converted_model_goes_through_files(family: Family, tmp_path: Path) -> None:
    model = family.make()
    before, parameters = logits(model), sum(p.numel() for p in model.parameters())
    converted = al.convert(model, "abc-mlp:slots=5", copy=True)
    assert al.is_converted(converted)
    assert not al.is_converted(model)
    assert sum(p.numel() for p in converted.parameters()) > parameters
    assert (logits(converted) - before).abs().max() > 1e-3
    again = family.save_and_load(converted, tmp_path)
    assert al.is_converted(again)
    assert_close(logits(again), logits(converted))
    # A swap on top is the attention from before.
    with al.swap(again, "softmax"):
        assert_close(logits(again), before)
    with pytest.raises(ValueError, match="is converted already"):
        al.convert(again, "abc-mlp")
    with al.record(converted) as trace, torch.no_grad():
        converted(**batch(model))
    assert {type(layer.mechanism) for layer in trace} == {al.AbcMlp}


def test_conversion_is_refused_alike_and_leaves_the_model_as_it_was(decoder: nn.Module) -> None:
    before, names = logits(decoder), list(decoder.state_dict())
    decoder.train()
    with pytest.raises(ValueError, match="would leak the future"):
        al.convert(decoder, "abc-luna")
    with pytest.raises(ValueError, match="no attention of kind cross among the chosen layers; the model has decoder"):
        al.convert(decoder, "abc-mlp", kinds=("cross",))
    assert decoder.training
    assert not al.is_converted(decoder)
    assert list(decoder.state_dict()) == names
    assert torch.equal(logits(decoder.eval()), before)


def test_guidance_gives_a_loss_with_a_gradient(family: Family) -> None:
    model = family.make()
    plain = logits(model)
    kind = first_kind(model)
    guidance = al.Guidance(heads={"prev": 1}, reduction="row", kind=kind)
    texts = batch(model, "none")
    with al.guide(model, guidance) as term:
        output = model(**texts)
        loss = term(model, output, texts, 0)
        # A layer that another mechanism answers is guided by that mechanism's map.
        with al.swap(model, "kernel:elu"):
            model(**texts)
            other = term.total()
    assert loss.total > 0
    assert abs(other - loss.total) > 1e-3
    loss.total.backward()
    assert sum(p.grad.abs().sum() for p in model.parameters() if p.grad is not None) > 0
    assert torch.equal(logits(model), plain)


def test_the_readings_take_both(family: Family) -> None:
    model = family.make()
    texts = batch(model)
    before = logits(model)
    with torch.no_grad(), al.read_effective(model) as maps:
        assert_close(model(**texts).logits, before)
    with torch.no_grad(), al.record(model) as trace:
        model(**texts)
    assert len(maps) == len(trace)
    key = (first_kind(model), 0)
    sites = [(site.kind, site.layer) for site in adapter_of(model).sites()]
    if len({kind for kind, _ in sites}) == 1:
        assert_close(maps[sites.index(key)].weights, al.effective_attention(trace[key]).weights)


def test_models_without_attention_are_refused() -> None:
    for use, what in ((al.swap, "softmax"), (al.evicting, al.KVPolicy(4))):
        with pytest.raises(ValueError, match="cannot be swapped or recorded"), use(nn.Linear(2, 2), what):
            pass
    with (
        pytest.raises(ValueError, match="holds both layers"),
        al.record(nn.ModuleList([build("bert"), ours("encoder")])),
    ):
        pass
    assert not al.is_converted(nn.Linear(2, 2))


# Caches of bounded size


def tokens_of(length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(5))


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
    assert searched == greedy_search(model, source, bos=1, eos=None, max_new=7)
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
    name = "cache" if isinstance(decoder, Transformer) else "past_key_values"
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with al.evicting(decoder, policy) as cache, pytest.raises(ValueError, match="takes no padding"):
        decoder(ids, attention_mask=mask, **{name: cache})
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


# Bounded memories under our own caches


def test_the_map_of_a_decoding_step_is_refused_where_its_keys_are_gone() -> None:
    model, ids = al.convert(ours("decoder"), "abc-mlp:slots=3"), tokens_of(4)
    cache = model.make_cache(2, 6)
    with torch.no_grad(), al.record(model) as trace:
        model(ids, cache=cache)
        assert trace[0].weights().shape == (2, 4, 4, 4)
        model(ids[:, :1], cache=cache)
    with pytest.raises(ValueError, match="read a memory of 4 earlier tokens"):
        trace[0].weights()


def test_a_bounded_memory_answers_only_the_mechanism_that_made_it() -> None:
    model, ids = al.convert(ours("decoder"), "t2r:features=5"), tokens_of(4)
    cache = model.make_cache(2, 6)
    with torch.no_grad():
        model(ids, cache=cache)
        for mech in ("softmax", "rfa:features=5"):
            with al.swap(model, mech), pytest.raises(ValueError, match="keeps no keys"):
                model(ids[:, :1], cache=cache)
