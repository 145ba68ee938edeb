"""The same statements on both kinds of model: Hugging Face's, and those with attention layers of attnlab.models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attnlab as al
from attnlab.adapters import adapter_of
from tests.adapters.both_kinds import FAMILIES, Family, batch, first_kind, logits, ours
from tests.adapters.zoo import build
from tests.tolerance import assert_close


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
