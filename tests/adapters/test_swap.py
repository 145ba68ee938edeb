"""A model that attends by our softmax is the same model."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import transformers as tf

from attnlab.adapters import record, swap
from attnlab.adapters.protocol import adapter_of
from tests.adapters.both_kinds import FAMILIES
from tests.adapters.zoo import ALL, DECODERS, LLAMA, SEQ2SEQ, build, inputs, padding, real_logits, set_implementation
from tests.quick_cases import in_turn

TOLERANCE = 1e-5


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["none", "left", "right", "mixed"])
@pytest.mark.parametrize("name", ALL)
def test_softmax_swapped_in_equals_eager(name: str, kind: str) -> None:
    eager = build(name, implementation="eager")
    given = inputs(eager, padding(kind))
    expected = real_logits(eager, given)
    for implementation in ("sdpa", "eager"):
        model = build(name, implementation=implementation)
        with swap(model, "softmax"):
            assert_same(real_logits(model, given), expected)
        assert model.config._attn_implementation == implementation


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_softmax_swapped_in_equals_eager_on_a_gpu(name: str) -> None:
    model = build(name, implementation="eager").cuda()
    given = {key: value.cuda() for key, value in inputs(model, padding("mixed")).items()}
    expected = real_logits(model, given)
    set_implementation(model, "sdpa")
    with swap(model, "softmax"), record(model) as trace:
        torch.testing.assert_close(real_logits(model, given), expected, rtol=1e-4, atol=1e-4)
    assert all(layer.x.is_cuda for layer in trace)


@pytest.mark.parametrize(("name", "beams", "kind"), in_turn([*DECODERS, *SEQ2SEQ], [1, 3], ["none", "left"]))
def test_generate_gives_the_same_tokens(name: str, beams: int, kind: str) -> None:
    settings = {"max_new_tokens": 9, "min_new_tokens": 9, "num_beams": beams, "do_sample": False}
    model = build(name, implementation="eager")
    given = {k: v for k, v in inputs(model, padding(kind)).items() if k != "decoder_input_ids"}
    expected = model.generate(**given, **settings)
    set_implementation(model, "sdpa")
    with swap(model, "softmax"), record(model) as trace:
        assert torch.equal(model.generate(**given, **settings), expected)
    # The last step: one query per sentence and beam.
    last = trace["decoder", 0].call
    assert last.q.shape[2] == 1
    assert last.causal
    assert last.mask is None


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_generate_with_a_static_cache(cache: str) -> None:
    model = build("llama", implementation="eager")
    given = inputs(model, padding("left"))
    settings = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    expected = model.generate(**given, **settings)
    with swap(model, "kernel:exp"):
        assert torch.equal(model.generate(**given, **settings), expected)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_gradients_are_the_models_own(name: str) -> None:
    model = build(name, implementation="eager")
    given = inputs(model, padding("right"))
    gradients = []
    for swapped in (False, True):
        model.zero_grad()
        if swapped:
            with swap(model, "softmax"):
                model(**given).logits[:, 0].sum().backward()
        else:
            model(**given).logits[:, 0].sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_another_mechanism_changes_only_the_named_layers() -> None:
    model = build("bert")
    given = inputs(model, padding("mixed"))
    with record(model) as before:
        model(**given)
    with swap(model, "kernel:elu", layers=[1]), record(model) as after:
        model(**given)
    assert_same(after[0].output, before[0].output)
    assert not torch.allclose(after[1].output, before[1].output, atol=1e-3)
    assert [repr(layer.mechanism) for layer in after] == [
        "Softmax()",
        "Kernelized(kernel='elu', degree=2)",
        "Softmax()",
    ]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, {"encoder": [0, 1, 2], "decoder": [0, 1], "cross": [0, 1]}),
        ("cross", {"cross": [0, 1]}),
        (("decoder", -1), {"decoder": [1]}),
        ([("encoder", 0), "decoder"], {"encoder": [0], "decoder": [0, 1]}),
    ],
)
def test_layers_are_named_by_kind_and_number(layers: object, expected: dict) -> None:
    model = build("t5")
    with record(model, layers=layers) as trace:
        real_logits(model, inputs(model))
    layers: dict = {}
    for layer in trace:
        layers.setdefault(layer.kind, []).append(layer.layer)
    assert layers == expected


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (1, "ambiguous"),
        (("cross", 9), r"no layer \('cross', 9\).*'cross': 3"),
        ("middle", "no layer 'middle'"),
        ([], "layers is empty"),
        ([2.5], "a layer is a number, a kind or"),
    ],
)
def test_layers_that_do_not_exist_are_refused(layers: object, message: str) -> None:
    with pytest.raises(ValueError, match=message), swap(build("bart"), "softmax", layers=layers):
        pass


def test_nested_swaps_the_inner_one_counts_and_each_is_undone() -> None:
    model = build("llama")
    with record(model) as trace, swap(model, "kernel:elu"):
        with swap(model, "kernel:exp", layers=[0]), record(model, layers=[0, 1]) as inner:
            real_logits(model, inputs(model))
        assert [m.kernel for m in (inner[0].mechanism, inner[1].mechanism)] == ["exp", "elu"]
        real_logits(model, inputs(model))
        assert trace[0].mechanism.kernel == "elu"
        assert model.config._attn_implementation == "attnlab|sdpa"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["bert", "t5", "gemma3"])
def test_undone_after_an_exception(name: str) -> None:
    model = build(name)
    given = inputs(model)
    before = real_logits(model, given)
    hooks = sum(len(m._forward_pre_hooks) for m in model.modules())
    with (
        pytest.raises(ValueError, match=r"You must specify|You have to specify"),
        swap(model, "kernel:exp"),
        record(model),
    ):
        model(input_ids=None)
    assert torch.equal(real_logits(model, given), before)
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == hooks
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    assert {config._attn_implementation for config in configs.values()} == {"sdpa"}


def test_contexts_may_end_in_any_order() -> None:
    model = build("gpt2")
    first, second = swap(model, "kernel:elu"), swap(model, "softmax")
    given = inputs(model)
    before = real_logits(model, given)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert_same(real_logits(model, given), before)
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_shares_the_config_is_untouched_in_another_thread() -> None:
    config = tf.BertConfig(**LLAMA)
    swapped, untouched = tf.BertForMaskedLM(config).eval(), tf.BertForMaskedLM(config).eval()
    given = inputs(untouched, padding("mixed"))
    before = real_logits(untouched, given)
    results, stop = [], threading.Event()

    def serve() -> None:
        while not stop.is_set():
            results.append(real_logits(untouched, given))

    server = threading.Thread(target=serve)
    server.start()
    try:
        for _ in range(20):
            with swap(swapped, "kernel:elu"), record(swapped):
                real_logits(swapped, given)
    finally:
        stop.set()
        server.join()
    assert results
    assert all(torch.equal(result, before) for result in results)


@pytest.mark.parametrize("name", ["llama", "mpnet", "gptj"])
def test_a_copy_made_inside_attends_as_the_model_does(name: str) -> None:
    model = build(name)
    texts = inputs(model)
    before = real_logits(model, texts)
    with swap(model, "top-r:r=2"), record(model) as trace:
        inside = real_logits(model, texts)
        trace._layers.clear()
        twin = copy.deepcopy(model)
        assert_same(real_logits(twin, texts), inside)
        assert len(trace) == len(adapter_of(model).sites())
        # What is swapped on the copy is not swapped on the model.
        with swap(twin, "softmax"):
            assert_same(real_logits(twin, texts), before)
            assert_same(real_logits(model, texts), inside)
    for each in (model, twin):
        assert_same(real_logits(each, texts), before)
        with swap(each, "softmax"):
            assert_same(real_logits(each, texts), before)


def replicas_of(module: torch.nn.Module) -> torch.nn.Module:
    """What ``nn.DataParallel`` runs on each device, here on the CPU: shallow copies of every module."""
    replica = module._replicate_for_data_parallel()
    replica._is_replica = True
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else replicas_of(child)
    for name, parameter in module._parameters.items():
        setattr(replica, name, parameter)
    return replica


@pytest.mark.parametrize("name", ["bert", "mpnet", "our encoder"])
def test_replicas_of_data_parallel_are_swapped_and_refuse_recorders(name: str) -> None:
    model = FAMILIES[name].make() if name in FAMILIES else build(name)
    texts = {"input_ids": inputs(build("bert"))["input_ids"]}
    with torch.no_grad():
        with swap(model, "top-r:r=2"):
            expected = model(**texts).logits
            assert_same(replicas_of(model)(**texts).logits, expected)
        with record(model), pytest.raises(ValueError, match=r"replica of nn.DataParallel.*recorded"):
            replicas_of(model)(**texts)
        if name == "mpnet":
            # Its position bias passes through no mechanism that learns.
            return
        with swap(model, "abc-mlp:slots=3"):
            model(**texts)
            with pytest.raises(ValueError, match=r"replica of nn.DataParallel.*has parameters"):
                replicas_of(model)(**texts)


def test_a_model_saved_inside_does_not_remember_the_swap(tmp_path: object) -> None:
    model = build("bert")
    with swap(model, "kernel:elu"):
        model.save_pretrained(tmp_path)
    loaded = tf.BertForMaskedLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"


def test_output_attentions_inside_are_the_mechanisms_weights() -> None:
    for name in ("bert", "llama", "t5"):
        model = build(name, implementation="eager")
        given = inputs(model, padding("right"))
        expected = model(**given, output_attentions=True)
        with swap(model, "softmax"):
            actual = model(**given, output_attentions=True)
        key = "cross_attentions" if name == "t5" else "attentions"
        for ours, theirs in zip(actual[key], expected[key], strict=True):
            rows = slice(None) if name == "t5" else given["attention_mask"].bool()
            assert_same(ours.transpose(1, 2)[rows], theirs.transpose(1, 2)[rows])


def test_training_with_attention_dropout() -> None:
    model = build("bert").train()
    given = inputs(model)
    with swap(model, "kernel:elu"), pytest.raises(ValueError, match=r"p=0.1 in training.*model.eval\(\)"):
        model(**given)
    with swap(model, "kernel:elu", dropout="skip"):
        model(**given)
    outputs = []
    for swapped in (False, True):
        torch.manual_seed(3)
        if swapped:
            with swap(model, "softmax"):
                outputs.append(model(**given).logits)
        else:
            outputs.append(model(**given).logits)
    assert torch.equal(*outputs)
    with pytest.raises(ValueError, match="dropout must be 'refuse' or 'skip'"), swap(model, "softmax", dropout="no"):
        pass


def test_classes_that_cannot_be_swapped_are_named() -> None:
    xlm = tf.XLMModel(tf.XLMConfig(emb_dim=24, n_layers=1, n_heads=2, vocab_size=61))
    with pytest.raises(ValueError, match="XLMModel cannot be swapped or recorded"), swap(xlm, "softmax"):
        pass
    with pytest.raises(ValueError, match=r"a model .* was expected, got str"):
        adapter_of("bert-base")
    with pytest.raises(ValueError, match="no mechanism named 'sotfmax'"), swap(build("bert"), "sotfmax"):
        pass


def test_a_model_that_can_be_swapped_in_part_wants_the_part_named() -> None:
    sizes = {"d_model": 24, "d_kv": 7, "num_heads": 3, "num_layers": 1, "d_ff": 31, "vocab_size": 61}
    model = tf.LongT5ForConditionalGeneration(tf.LongT5Config(decoder_start_token_id=0, **sizes)).eval()
    with pytest.raises(ValueError, match=r"only in part: LongT5LayerLocalSelfAttention \(encoder.*layers="):
        swap(model, "softmax").__enter__()
    with swap(model, "softmax", layers=["decoder", "cross"]), record(model) as trace:
        real_logits(model, inputs(model))
    assert len(trace) == 2


def test_scores_that_no_call_can_express_are_refused_by_name() -> None:
    settings = {k: v for k, v in LLAMA.items() if k != "num_attention_heads"}
    capped = tf.Gemma2ForCausalLM(
        tf.Gemma2Config(num_attention_heads=4, num_key_value_heads=2, head_dim=6, **settings)
    ).eval()
    set_implementation(capped, "eager")
    with swap(capped, "softmax"), pytest.raises(ValueError, match=r"Gemma2Attention .*soft-capped scores \(softcap\)"):
        real_logits(capped, inputs(capped))
    sinks = tf.GptOssForCausalLM(
        tf.GptOssConfig(
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=6,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=["full_attention"] * 3,
            **settings,
        )
    ).eval()
    with record(sinks), pytest.raises(ValueError, match=r"attention sinks \(s_aux\)"):
        real_logits(sinks, inputs(sinks))
