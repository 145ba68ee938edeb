"""What record gives: the tensors that the layer really used, and W only when asked."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from attnlab.adapters import adapter_of, record, swap
from tests.adapters.zoo import ALL, LLAMA, SPECIAL, build, inputs, padding, set_implementation

KEYS = {
    "encoder": ("attentions", "encoder_attentions"),
    "decoder": ("attentions", "decoder_attentions"),
    "cross": ("cross_attentions",),
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["none", "mixed"])
@pytest.mark.parametrize("name", ALL)
def test_weights_are_eager_attentions(name: str, kind: str) -> None:
    model = build(name, implementation="eager")
    given = inputs(model, padding(kind))
    with torch.no_grad():
        expected = model(**given, output_attentions=True)
        set_implementation(model, "sdpa")
        with record(model) as trace:
            model(**given)
    for layer in trace:
        maps = next(expected[key] for key in KEYS[layer.kind] if key in expected)
        rows = torch.ones(layer.call.q.shape[0], layer.call.q.shape[2], dtype=torch.bool)
        # Padded queries see anything in transformers and, where all is hidden, nothing here: only real ones agree.
        if kind == "mixed" and layer.call.q.shape[2] == 11:
            rows = given["attention_mask"].bool()
        assert_close(layer.weights().transpose(1, 2)[rows], maps[layer.layer].transpose(1, 2)[rows])


@pytest.mark.parametrize("name", ALL)
def test_values_output_and_projection_fit_together(name: str) -> None:
    model = build(name)
    seen: dict[str, torch.Tensor] = {}
    for site in adapter_of(model).sites():
        linear = site.output_linear
        linear.register_forward_hook(lambda m, args, out, key=site.name: seen.update({key: out}))
    with torch.no_grad(), record(model) as trace:
        model(**inputs(model))
    for layer in trace:
        assert_close(layer.weights() @ layer.values.repeat_interleave(layer.call.groups, 1), layer.output)
        mixed = layer.output.transpose(1, 2).flatten(2) @ layer.projection.T
        shift = seen[layer.name] - mixed
        # What remains is the bias of the linear: the same at every position.
        assert_close(shift, shift[:1, :1].expand_as(shift))


@pytest.mark.parametrize("name", ALL)
def test_x_is_what_the_keys_are_made_from(name: str) -> None:
    model = build(name)
    sites = {site.name: site for site in adapter_of(model).sites()}
    seen: dict[str, torch.Tensor] = {}
    key_linears = ("k_proj", "key", "k_lin", "k", "c_attn", "query_key_value", "Wqkv")
    for site in sites.values():
        linear = next(getattr(site.module, n) for n in key_linears if hasattr(site.module, n))
        linear.register_forward_pre_hook(lambda m, args, key=site.name: seen.update({key: args[0]}))
    with torch.no_grad(), record(model) as trace:
        model(**inputs(model))
    assert len(trace) == len(sites)
    for layer in trace:
        assert torch.equal(layer.x, seen[layer.name])
        assert layer.x.shape[1] == layer.call.k.shape[2]


def test_grouped_keys_stay_one_per_group_and_are_rotated() -> None:
    model = build("llama")
    given = inputs(model)
    with torch.no_grad(), record(model) as trace:
        model(**given)
    call = trace[0].call
    assert call.q.shape == (3, 4, 11, 6)
    assert call.k.shape == call.v.shape == (3, 2, 11, 6)
    unrotated = model.model.layers[0].self_attn.k_proj(call.x).unflatten(2, (2, 6)).transpose(1, 2)
    # Position 0 is rotated by nothing; later ones are, and keep their length.
    assert_close(call.k[:, :, 0], unrotated[:, :, 0])
    assert not torch.allclose(call.k[:, :, 5], unrotated[:, :, 5], atol=1e-2)
    assert_close(call.k.norm(dim=-1), unrotated.norm(dim=-1))


def test_nothing_is_copied_and_gradients_flow() -> None:
    model = build("bert")
    with record(model) as trace:
        model(**inputs(model))
    layer = trace[2]
    assert layer.projection is model.bert.encoder.layer[2].attention.output.dense.weight
    layer.weights()[..., 0].sum().backward()
    assert model.bert.encoder.layer[2].attention.self.query.weight.grad.abs().sum() > 0
    with torch.inference_mode(), record(model) as silent:
        model(**inputs(model))
    assert not silent[2].weights().requires_grad


def test_keep_last_or_all() -> None:
    model = build("bart")
    given = inputs(model)
    given.pop("decoder_input_ids")
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1}
    with record(model) as last, record(model, keep="all") as every:
        model.generate(**given, **settings)
    assert last["decoder", 0].call.k.shape[2] == 4
    assert len(last.history(("decoder", 0))) == 1
    assert [layer.call.k.shape[2] for layer in every.history(("decoder", 0))] == [1, 2, 3, 4]
    assert len(every.history(("encoder", 0))) == 1
    assert len(last) == len(every) == 2 + 3 + 3
    with pytest.raises(ValueError, match="keep must be 'last' or 'all'"), record(model, keep="first"):
        pass


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_cross_attention_inside_decoders_of_other_families(name: str) -> None:
    if name == "bert":
        config = tf.BertConfig(is_decoder=True, add_cross_attention=True, **LLAMA)
        model = tf.BertLMHeadModel(config).eval()
    else:
        config = tf.GPT2Config(n_embd=24, n_layer=2, n_head=4, n_positions=64, add_cross_attention=True, **SPECIAL)
        model = tf.GPT2LMHeadModel(config).eval()
    states = torch.randn(3, 5, 24)
    ids = inputs(model)["input_ids"]
    seen = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1]])
    given = {"input_ids": ids, "encoder_hidden_states": states, "encoder_attention_mask": seen, "use_cache": False}
    set_implementation(model, "eager")
    with torch.no_grad():
        expected = model(**given).logits
        set_implementation(model, "sdpa")
        with swap(model, "softmax"), record(model) as trace:
            assert_close(model(**given).logits, expected)
    assert trace["cross", 0].x is states
    assert torch.equal(trace["cross", 1].call.key_visible, seen.bool())
    assert trace["decoder", 0].call.causal
    assert not trace["cross", 0].call.causal
    assert len(trace["cross", 0].weights()[0, 0]) == 11


def test_a_shared_module_is_one_layer_with_a_history() -> None:
    model = tf.AlbertModel(tf.AlbertConfig(embedding_size=16, **LLAMA)).eval()
    with torch.no_grad(), record(model, keep="all") as trace:
        model(**inputs(model))
    assert len(trace) == 1
    assert len(trace.history(0)) == 3


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_autocast(name: str) -> None:
    model = build(name)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), swap(model, "softmax"), record(model) as trace:
        model(**inputs(model, padding("left")), use_cache=False)
    layer = next(iter(trace))
    assert layer.values.dtype == torch.bfloat16
    assert layer.call.q.dtype == layer.x.dtype == layer.output.dtype == torch.bfloat16


def test_gemma_scale_is_the_modules() -> None:
    model = build("gemma3")
    with torch.no_grad(), record(model) as trace:
        model(**inputs(model))
    assert trace[1].call.scale == pytest.approx(7**-0.5)
