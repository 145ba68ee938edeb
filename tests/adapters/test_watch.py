"""Watched statistics are those of the recorded W, over models and mechanisms; watching changes no output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attnlab as al
from attnlab.chunks import small_chunks
from attnlab.models import Transformer
from tests.adapters.both_kinds import batch as batch_of
from tests.adapters.both_kinds import ours, tokens_of
from tests.adapters.watching import assert_same_statistics, dense_statistics
from tests.adapters.zoo import FAMILIES, build, inputs, padding, real_logits
from tests.quick_cases import in_turn
from tests.tolerance import assert_close

SETTINGS = {"largest": 3, "sinks": 2, "recent": 3}
# What these families do to scores is in no attention call, so ``record`` refuses them as well.
REFUSED = {"gemma2": "soft-capped", "gpt_oss": "attention sinks"}
NAMES = sorted(FAMILIES.keys() - REFUSED.keys())


def members_of(n: int) -> dict[str, Tensor]:
    """A set of tokens shared by all texts, and one that differs."""
    every_third = torch.arange(n) % 3 == 0
    return {"third": every_third, "own": torch.stack([every_third.roll(i) for i in range(3)])}


def stacked(sets: dict[str, Tensor], n: int) -> Tensor:
    """The sets as (b, n, m)."""
    return torch.stack([m.expand(3, -1)[:, :n] for m in sets.values()], -1)


def check_against_record(model: Any, batch: dict[str, Tensor], **how: Any) -> None:
    sets = members_of(11)
    with torch.no_grad(), al.watch(model, sets=sets, **SETTINGS) as statistics, al.record(model) as trace:
        model(**batch)
    assert len(statistics) == len(trace) > 0
    has_cross = any(layer.kind == "cross" for layer in trace)
    for recorded in trace:
        watched = statistics[recorded.kind, recorded.layer]
        assert watched.name == recorded.name
        assert list(watched.sets) == ([] if has_cross and recorded.kind == "decoder" else list(sets))
        members = stacked(sets, recorded.call.k.shape[2])
        dense = dense_statistics(recorded, sinks=2, recent=3, members=members)
        assert_same_statistics(watched, dense, **how)


@pytest.mark.parametrize(("name", "kind"), in_turn(NAMES, ["none", "mixed"]))
def test_statistics_are_those_of_the_recorded_map(name: str, kind: str) -> None:
    model = build(name)
    check_against_record(model, inputs(model, padding(kind)))


@pytest.mark.parametrize("kind", ["encoder", "decoder", "encoder-decoder"])
def test_our_models(kind: str) -> None:
    model = ours(kind)
    check_against_record(model, batch_of(model, "mixed"))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_scores_that_no_call_holds_are_refused(name: str) -> None:
    model = build(name)
    with pytest.raises(ValueError, match=REFUSED[name]), torch.no_grad(), al.watch(model):
        model(**inputs(model))


@pytest.mark.parametrize(("spec", "name"), in_turn(al.mechanism_names(), ["bert", "llama"]))
def test_every_mechanism(spec: str, name: str) -> None:
    """One whose rows cannot be made in blocks says so; those that the model refuses are refused without watch too."""
    model = build(name)
    batch = inputs(model, padding("right"))
    try:
        with torch.no_grad(), al.swap(model, spec):
            model(**batch)
    except ValueError:
        return
    with al.swap(model, spec):
        if al.mechanism(spec).whole_queries and spec not in ("window",):
            with pytest.raises(ValueError, match="not a block of rows"), torch.no_grad(), al.watch(model):
                model(**batch)
        else:
            check_against_record(model, batch)


@pytest.mark.parametrize("name", ["llama", "bert", "mistral"])
def test_sizes_beyond_every_block(name: str) -> None:
    model = build(name)
    batch = inputs(model, padding("mixed"))
    with small_chunks(elements=50, tokens=3):
        check_against_record(model, batch)
        check_against_record(model, inputs(model))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "bart", "mistral", "bloom"])
@pytest.mark.parametrize("kind", ["none", "mixed"])
def test_watching_changes_no_output(name: str, kind: str) -> None:
    model = build(name)
    batch = inputs(model, padding(kind))
    before = real_logits(model, batch)
    with al.watch(model):
        torch.testing.assert_close(real_logits(model, batch), before, rtol=0, atol=2e-5)
    assert torch.equal(real_logits(model, batch), before)


@pytest.mark.parametrize("name", ["llama", "mistral", "our decoder", "bert"])
def test_padding_changes_nothing(name: str) -> None:
    """A text padded on the left has the statistics that it has alone, at other places."""
    model = ours("decoder") if name == "our decoder" else build(name)
    ids, n, added = tokens_of(11), 11, 4
    longer = torch.cat([torch.ones(2, added, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(2, added, dtype=torch.long), torch.ones(2, n, dtype=torch.long)], 1)
    # A model that counts positions from the first column is told them.
    counted = {} if name == "our decoder" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad(), al.watch(model, **SETTINGS) as alone:
        model(ids)
    with torch.no_grad(), al.watch(model, **SETTINGS) as padded:
        model(longer, attention_mask=mask, **counted)
    for one, other in zip(alone, padded, strict=True):
        for field in ("entropy", "sinks", "recent", "distance", "norm", "largest", "norm_largest", "removed"):
            if getattr(one, field) is not None:
                assert_close(getattr(other, field)[:, :, added:], getattr(one, field))
        real = padded_rows(other.places[:, :, added:], added)
        assert torch.equal(real, one.places)
        kept = other.received[..., added:]
        # Padded queries of an encoder see the text too.
        if name != "bert":
            assert_close(kept, one.received)
        assert float(other.received[..., :added].abs().max()) == 0


def padded_rows(places: Tensor, added: int) -> Tensor:
    return torch.where(places < 0, places, places - added)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3", "llama4", "gpt_neo", "bart", "t5"])
def test_steps_of_generation_are_the_rows_of_one_pass(name: str) -> None:
    model = build(name)
    prompt = inputs(model, padding("left"))
    prompt.pop("decoder_input_ids", None)
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "num_beams": 1}
    with torch.no_grad(), al.watch(model, **SETTINGS) as stepwise:
        ids = model.generate(**prompt, **settings)
    whole = {"decoder_input_ids": ids[:, :-1]} if model.config.is_encoder_decoder else {"input_ids": ids[:, :-1]}
    if "attention_mask" in prompt:
        mask = prompt["attention_mask"]
        if not model.config.is_encoder_decoder:
            mask = torch.cat([mask, torch.ones(3, 4, dtype=torch.long)], 1)
            whole["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        whole["attention_mask"] = mask
    if model.config.is_encoder_decoder:
        whole["input_ids"] = prompt["input_ids"]
    with torch.no_grad(), al.watch(model, **SETTINGS) as at_once:
        model(**whole)
    assert len(stepwise) == len(at_once)
    for watched, expected in zip(stepwise, at_once, strict=True):
        expected = at_once[watched.kind, watched.layer]
        for field in ("entropy", "sinks", "recent", "distance", "norm", "largest", "received", "blocks"):
            one, other = getattr(watched, field), getattr(expected, field)
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5, msg=lambda m, f=field: f"{f}: {m}")


def test_a_watch_may_begin_with_a_filled_cache() -> None:
    model = build("llama")
    ids = inputs(model)["input_ids"]
    with torch.no_grad():
        past = model(ids[:, :7], use_cache=True).past_key_values
        with al.watch(model) as late:
            model(ids[:, 7:9], past_key_values=past, use_cache=True)
            model(ids[:, 9:], past_key_values=past, use_cache=True)
        with al.watch(model) as whole:
            model(ids)
    assert late[0].first == 7
    assert_close(late[1].entropy, whole[1].entropy[:, :, 7:])
    assert late[1].received.shape == whole[1].received.shape
    with torch.no_grad(), al.watch(model):
        model(ids[:, :3], past_key_values=past, use_cache=True)
        past.crop(5)
        with pytest.raises(ValueError, match="lost keys or was used outside"):
            model(ids[:, :3], past_key_values=past, use_cache=True)


def test_an_evicting_cache_is_refused() -> None:
    for model in (build("llama"), ours("decoder")):
        ids = tokens_of(9)
        with torch.no_grad(), al.evicting(model, "h2o:budget=4") as cache, al.watch(model):
            how = {"cache": cache} if isinstance(model, Transformer) else {"past_key_values": cache}
            model(ids, **how)
            with pytest.raises(ValueError, match="lost keys"):
                model(ids[:, :1], **how)


def test_a_training_step_keeps_its_gradients() -> None:
    model = build("llama")
    batch = inputs(model)
    model(**batch).logits.sum().backward()
    expected = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    with al.watch(model) as statistics:
        model(**batch).logits.sum().backward()
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight.grad, expected)
    assert not statistics[0].entropy.requires_grad


def test_saved_statistics_come_back(tmp_path: Path) -> None:
    model = build("mistral")
    with torch.no_grad(), al.watch(model, sets=members_of(11)) as statistics:
        model(**inputs(model))
    loaded = al.AttentionStatistics.load(statistics.save(tmp_path / "statistics"))
    assert repr(loaded) == repr(statistics)
    assert "3 decoder; 3 x 4 heads x 11 queries" in repr(loaded)
    assert loaded.measures == statistics.measures
    assert loaded.metadata == {"model": "MistralForCausalLM"}
    for one, other in zip(loaded, statistics, strict=True):
        assert torch.equal(one.places, other.places)
        assert torch.equal(one.sets["own"], other.sets["own"])
        assert one.removed is other.removed is None
        assert "keys of its own" in one.missing["removed"]
    (tmp_path / "statistics" / "statistics.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged statistics"):
        al.AttentionStatistics.load(tmp_path / "statistics")
    with pytest.raises(ValueError, match="holds no saved statistics"):
        al.AttentionStatistics.load(tmp_path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"largest": 0}, "largest must be an int of at least 1"),
        ({"sinks": -1}, "sinks must be"),
        ({"recent": 2.5}, "recent must be"),
        ({"block": 100}, "multiple of 64"),
        ({"sets": {"needle": torch.arange(3)}}, "'needle' must be a boolean mask"),
        ({"layers": 9}, "no layer"),
    ],
)
def test_wrong_settings_are_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), al.watch(build("llama"), **how):
        pass


def test_sets_for_another_number_of_texts_are_refused() -> None:
    model = build("llama")
    sets = {"needle": torch.zeros(2, 11, dtype=torch.bool)}
    with torch.no_grad(), pytest.raises(ValueError, match="masks for 2 texts"), al.watch(model, sets=sets):
        model(**inputs(model))


def test_what_is_not_asked_for_is_left_out() -> None:
    model = build("llama")
    with torch.no_grad(), al.watch(model, norm=False, removed=False, received=False, block=0, layers=[1]) as statistics:
        assert repr(statistics) == "AttentionStatistics(nothing watched)"
        model(**inputs(model))
    assert len(statistics) == 1
    layer = statistics[1]
    assert layer.norm is layer.norm_largest is layer.removed is layer.received is layer.blocks is None
    with pytest.raises(ValueError, match="no layer"):
        statistics[0]
