"""A converted model: which parameters it gains, what is read of it, and that it computes what its mechanism says."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers as tf

import attnlab as al
from attnlab.attention import repeat_groups
from attnlab.models import Transformer, TransformerConfig, load_transformer, save_transformer
from tests.adapters.converted import GAINED, converted
from tests.adapters.zoo import PAD, VOCABULARY, build, inputs, padding, real_logits
from tests.tolerance import assert_close


@pytest.mark.parametrize("name", GAINED)
def test_one_control_for_all_layers_and_the_rest_as_it_was(name: str) -> None:
    model, before = converted(name), build(name)
    gained = {key: tuple(t.shape) for key, t in model.attnlab.state_dict().items()}
    assert gained == GAINED[name]
    own = {key: t for key, t in model.state_dict().items() if not key.startswith("attnlab.")}
    assert own.keys() == before.state_dict().keys()
    for key, t in before.state_dict().items():
        assert torch.equal(own[key], t)
    given = inputs(model, padding("mixed"))
    assert (real_logits(model, given) - real_logits(before, given)).abs().max() > 0.1
    model.train()
    model(**given).logits.sum().backward()
    for key, parameter in model.attnlab.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().sum() > 0, key


def test_a_roberta_base_grows_by_one_percent() -> None:
    with torch.device("meta"):
        whole = tf.RobertaForMaskedLM(tf.RobertaConfig(vocab_size=50265, max_position_embeddings=514))
    before = sum(p.numel() for p in whole.parameters())
    # Tied: what the layers share does not depend on how many there are.
    config = tf.RobertaConfig(vocab_size=11, max_position_embeddings=14, num_hidden_layers=2, pad_token_id=1)
    model = al.convert(tf.RobertaForMaskedLM(config), "abc-mlp:slots=128")
    extra = sum(p.numel() for p in model.attnlab.parameters())
    assert (before, extra) == (124_698_201, 12 * 128 * 768)
    assert extra <= 0.011 * before


def test_untied_layers_have_their_own() -> None:
    model = converted("llama", "abc-mlp:slots=5,tied=false", layers=[0, 2])
    assert list(model.attnlab.state_dict()) == ["decoder_0.weight", "decoder_2.weight"]
    with al.record(model) as trace:
        model(**inputs(model))
    assert [type(layer.mechanism).__name__ for layer in trace] == ["AbcMlp", "Softmax", "AbcMlp"]
    assert trace[0].mechanism is model.attnlab.decoder_0


def test_a_mechanism_for_each_kind() -> None:
    model = converted("bart", {"causal": "abc-mlp:slots=3", "cross": al.AbcMlp(slots=7)})
    assert {key: t.shape[1] for key, t in model.attnlab.state_dict().items()} == {
        "decoder.weight": 3,
        "cross.weight": 7,
    }
    with al.record(model) as trace:
        model(**inputs(model))
    assert type(trace["encoder", 0].mechanism).__name__ == "Softmax"


@pytest.mark.parametrize("name", ["roberta", "llama", "bart", "t5"])
def test_what_is_read_of_a_converted_model(name: str) -> None:
    model = converted(name)
    given = inputs(model, padding("mixed"))
    with al.record(model) as trace:
        model(**given)
    for layer in trace:
        assert isinstance(layer.mechanism, al.AbcMlp)
        values = repeat_groups(layer.values, layer.call.groups)
        assert_close(layer.weights() @ values, layer.output)
        assert_close(al.effective_attention(layer).weights @ values, layer.output, dtype=torch.float16)
        assert al.approximation_error(layer, layer.mechanism).layers[0].output.max() == 0
        assert al.approximation_error(layer, "softmax").layers[0].output.mean() > 0.02


def test_attentions_are_the_mechanisms_w() -> None:
    model = converted("roberta")
    given = inputs(model, padding("right"))
    with al.record(model) as trace:
        answer = model(**given, output_attentions=True)
    assert_close(answer.attentions[1], trace[1].weights())


def test_a_swap_wins_over_a_conversion() -> None:
    model, before = converted("llama"), build("llama")
    given = inputs(model, padding("left"))
    with al.swap(model, "softmax"):
        assert_close(real_logits(model, given), real_logits(before, given))
        tokens = model.generate(**given, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(tokens, before.generate(**given, max_new_tokens=5, min_new_tokens=5, do_sample=False))
    assert al.is_converted(model)
    assert (real_logits(model, given) - real_logits(before, given)).abs().max() > 0.1


def test_a_copy_is_on_its_own() -> None:
    model = build("gpt2")
    student = al.convert(model, "abc-mlp:slots=5", copy=True)
    assert not al.is_converted(model)
    twin = copy.deepcopy(student)
    given = inputs(model)
    expected = real_logits(student, given)
    assert_close(real_logits(twin, given), expected)
    with torch.no_grad():
        twin.attnlab.decoder.weight.add_(3 * torch.randn_like(twin.attnlab.decoder.weight))
    assert_close(real_logits(student, given), expected)
    assert (real_logits(twin, given) - expected).abs().max() > 1e-3
    # One mechanism object converts two models, each with its own parameters.
    shared = al.AbcMlp(slots=3)
    a, b = (al.convert(build(name), shared) for name in ("gpt2", "llama"))
    assert a.attnlab.decoder is not b.attnlab.decoder
    assert shared.weight is None


def test_luna_hands_its_memory_from_layer_to_layer() -> None:
    model = converted("bert", "abc-luna:slots=5")
    assert list(model.attnlab.state_dict()) == ["encoder_0.first"]
    with al.record(model) as trace:
        model(**inputs(model, padding("right")))
    first, second = trace[0], trace[1]
    assert first.call.memory is None
    # Row 1 has eight tokens.
    x = first.call.x[1, :8]
    over_tokens = (model.attnlab.encoder_0.first @ x.mT * 24**-0.5).softmax(-1)
    assert_close(second.call.memory[1], over_tokens @ x)
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="turn off gradient checkpointing"):
        model(**inputs(model)).logits.sum().backward()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_checkpointing_changes_nothing(checkpointing: bool) -> None:
    model = converted("llama").train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    model(**inputs(model, padding("left")), use_cache=False).logits.logsumexp(-1).sum().backward()
    gradient = model.attnlab.decoder.weight.grad
    plain = converted("llama")
    plain(**inputs(model, padding("left")), use_cache=False).logits.logsumexp(-1).sum().backward()
    assert_close(gradient, plain.attnlab.decoder.weight.grad)


# Saving and loading


def test_t5_is_converted_in_its_cross_attention_or_without_its_bias() -> None:
    model = converted("t5", kinds=("cross",))
    assert list(model.attnlab.state_dict()) == ["cross.weight"]
    # Layer 0 makes the bias that the other layers add.
    with pytest.raises(ValueError, match="makes the position bias of"):
        al.convert(build("t5"), "abc-mlp", layers=[("decoder", 0)], bias="drop")
    assert list(converted("t5", layers=[("decoder", 1)]).attnlab.state_dict()) == ["decoder.weight"]


def test_half_precision_and_mixed() -> None:
    model = converted("llama").to(torch.bfloat16)
    assert model.attnlab.decoder.weight.dtype == torch.bfloat16
    given = inputs(model, padding("left"))
    half = real_logits(model, given)
    exact = real_logits(model.float(), given)
    # Three layers in eight bits.
    assert (half - exact).norm() < 0.03 * exact.norm()
    # Parameters of another dtype than the rest: the control is computed in float32 either way.
    model.to(torch.bfloat16).attnlab.float()
    assert_close(real_logits(model, given), half)


# Our own models


@pytest.mark.parametrize("kind", ["encoder", "decoder", "encoder-decoder"])
def test_our_own_models(kind: str, tmp_path: Path) -> None:
    config = TransformerConfig(kind=kind, vocab=VOCABULARY, width=16, heads=2, layers=3, hidden=17, max_length=32)
    torch.manual_seed(0)
    plain = Transformer(config)
    model = al.convert(plain, {"encoder": "abc-mlp:slots=5", "causal": "abc-mlp:slots=3", "cross": "t2r"}, copy=True)
    assert plain.config == config
    names = [name for name, _ in model.named_parameters() if "mechanism" in name]
    # One control for each kind, and T2R's two tensors in each of three layers.
    assert len(names) == {"encoder": 1, "decoder": 1, "encoder-decoder": 2 + 6}[kind]
    ids = torch.randint(3, VOCABULARY, (2, 9))
    given = {"decoder_input_ids": ids[:, :4]} if kind == "encoder-decoder" else {}
    model.eval()
    expected = model(ids, **given).logits
    assert (expected - plain.eval()(ids, **given).logits).abs().max() > 1e-3
    again = load_transformer(save_transformer(model, tmp_path))
    assert_close(again(ids, **given).logits, expected)
    with pytest.raises(ValueError, match=r"is converted already .* convert a model whose attention is softmax"):
        al.convert(model, "abc-mlp")


def test_our_own_models_in_part() -> None:
    config = TransformerConfig(kind="decoder", vocab=VOCABULARY, width=16, heads=2, layers=3, max_length=32)
    model = al.convert(Transformer(config), "abc-mlp:slots=5,tied=false", layers=[0, 2])
    assert model.config.causal_attention == ("abc-mlp:slots=5,tied=False", "softmax", "abc-mlp:slots=5,tied=False")
    luna = Transformer(config)
    with pytest.raises(ValueError, match="leak the future"):
        al.convert(luna, "abc-luna")
    assert luna.config == config
    assert luna(torch.full((1, 3), PAD)).logits.shape == (1, 3, VOCABULARY)


# Places


@pytest.mark.parametrize("mech", ["abc-linformer:slots=3,length=64", "abc-mlp:slots=3", "t2r:features=5"])
def test_new_parameters_are_where_the_model_is(mech: str) -> None:
    tokens = torch.zeros(1, 5, dtype=torch.long, device="meta")
    model = al.convert(build("bert").to("meta"), mech, example={"input_ids": tokens})
    assert {p.device.type for p in model.attnlab.parameters()} == {"meta"}
    with al.swap(build("bert").to("meta"), mech) as swapped:
        assert swapped(tokens).logits.is_meta
    config = TransformerConfig(kind="encoder", vocab=VOCABULARY, width=16, heads=2, layers=2, max_length=32)
    own = al.convert(Transformer(config).to("meta"), mech)
    assert {p.device.type for p in own.parameters()} == {"meta"}
