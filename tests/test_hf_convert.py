"""A converted model: which parameters it gains, that it trains, saves and loads, and what it refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import attnlab as al
from attnlab.attention import repeat_groups
from attnlab.hf import reconvert
from attnlab.models import Transformer, TransformerConfig, load_model, save_model
from tests.hf_zoo import PAD, VOCABULARY, build, inputs, padding, real_logits
from tests.test_hf_load import write_tokenizer
from tests.tolerance import assert_close

# (heads of keys and values, slots, width) of what each family gains.
GAINED = {
    "bert": {"encoder.weight": (4, 5, 24)},
    "roberta": {"encoder.weight": (4, 5, 24)},
    "gpt2": {"decoder.weight": (4, 5, 24)},
    "llama": {"decoder.weight": (2, 5, 24)},
    "bart": {"encoder.weight": (3, 5, 24), "decoder.weight": (4, 5, 24), "cross.weight": (4, 5, 24)},
    "marian": {"encoder.weight": (3, 5, 24), "decoder.weight": (4, 5, 24), "cross.weight": (4, 5, 24)},
    "t5": {"encoder.weight": (3, 5, 24), "decoder.weight": (3, 5, 24), "cross.weight": (3, 5, 24)},
}


def converted(name: str, mech: Any = "abc-mlp:slots=5", **settings: Any) -> tf.PreTrainedModel:
    """A converted model of the family whose new parameters are not as they started."""
    model = al.convert(build(name), mech, **{"bias": "drop" if name == "t5" else "refuse", **settings})
    with torch.no_grad():
        for parameter in model.attnlab.parameters():
            parameter.normal_(std=0.3)
    return model


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
    found = model.attnlab.decoder.weight.grad
    plain = converted("llama")
    plain(**inputs(model, padding("left")), use_cache=False).logits.logsumexp(-1).sum().backward()
    assert_close(found, plain.attnlab.decoder.weight.grad)


# Saving and loading


@pytest.mark.parametrize("name", GAINED)
def test_save_and_load(name: str, tmp_path: Path) -> None:
    model = converted(name)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    again = al.load_model(tmp_path).model
    assert al.is_converted(again)
    given = inputs(model, padding("mixed"))
    assert torch.equal(real_logits(again, given), real_logits(model, given))


def test_partial_conversions_and_shards_come_back(tmp_path: Path) -> None:
    model = converted("bart", {"causal": "abc-mlp:slots=3,tied=false", "cross": "rfa:features=7"}, layers=["decoder"])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    write_tokenizer(tmp_path)
    again = al.load_model(tmp_path, dtype=torch.float64).model
    given = inputs(model)
    assert next(again.attnlab.parameters()).dtype == torch.float64
    assert_close(real_logits(again, given).float(), real_logits(model, given))


def test_another_head_on_a_converted_body(tmp_path: Path) -> None:
    model = converted("roberta")
    model.save_pretrained(tmp_path)
    classifier = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=2).eval()
    assert not al.is_converted(classifier)
    reconvert(classifier, tmp_path)
    given = inputs(model, padding("right"))
    bodies = [m.roberta(**given).last_hidden_state for m in (model, classifier)]
    assert_close(*bodies)
    with pytest.raises(ValueError, match="is converted already"):
        reconvert(classifier, tmp_path)
    with pytest.raises(ValueError, match="says nothing of a conversion"):
        reconvert(build("roberta"), tmp_path)


def saved(tmp_path: Path) -> Path:
    converted("bert").save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    return tmp_path


def edit(file: Path, change: Any) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_a_folder_without_the_conversions_section(tmp_path: Path) -> None:
    edit(saved(tmp_path) / "config.json", lambda content: content.pop("attnlab"))
    with pytest.raises(ValueError, match=r"parameters of a conversion \(attnlab.encoder.weight\), but its config.json"):
        al.load_model(tmp_path)


def test_a_folder_without_the_conversions_parameters(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = saved(tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    del tensors["attnlab.encoder.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"parameters do not fit its config: 1 differ, such as attnlab.encoder.weight"):
        al.load_model(tmp_path)


def test_a_section_that_cannot_be_read(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["attnlab"]["groups"]["encoder"]["layers"] = ["encoder 7"]

    edit(saved(tmp_path) / "config.json", change)
    with pytest.raises(ValueError, match="conversion in this model's config cannot be read"):
        al.load_model(tmp_path)


# Training


class Rows(torch.utils.data.Dataset):
    """Eight sentences that repeat two tokens."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.tensor([3 + i, 20 + i] * 8)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@pytest.mark.parametrize("name", ["gpt2", "roberta"])
def test_the_trainer_trains_saves_and_resumes(name: str, tmp_path: Path) -> None:
    # With the family's own dropout of attention weights, which a converted layer leaves out.
    model = converted(name)
    settings = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_steps": 5,
        "logging_steps": 5,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    start = {key: t.clone() for key, t in model.attnlab.state_dict().items()}
    trainer = tf.Trainer(model=model, args=tf.TrainingArguments(**settings, max_steps=10), train_dataset=Rows())
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    for key, t in model.attnlab.state_dict().items():
        assert not torch.equal(t, start[key])
    folder = tmp_path / "checkpoint-10"
    write_tokenizer(folder)
    again = al.load_model(folder).model
    given = inputs(model)
    assert_close(real_logits(again, given), real_logits(model.eval(), given))
    resumed = tf.Trainer(
        model=converted(name), args=tf.TrainingArguments(**settings, max_steps=10), train_dataset=Rows()
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert resumed.state.global_step == 10


def test_our_engine_trains_it(tmp_path: Path) -> None:
    from attnlab.training import CrossEntropy, Recipe, Schedule, Settings, read_metrics, train

    class Source:
        def batch(self, step: int) -> dict[str, Tensor]:
            rows = Rows()
            batch = [rows[(2 * step + i) % 8] for i in range(4)]
            return {key: torch.stack([row[key] for row in batch]) for key in ("input_ids", "labels")}

    model = converted("llama")
    start = model.attnlab.decoder.weight.detach().clone()
    settings = Settings(
        steps=10, recipe=Recipe(lr=0.03), schedule=Schedule("constant"), seed=0, device="cpu", log_every=1
    )
    train(model, Source(), terms=[CrossEntropy()], settings=settings, run_dir=tmp_path)
    losses = [line["values"]["loss"] for line in read_metrics(tmp_path) if line["kind"] == "train"]
    assert losses[-1] < 0.7 * losses[0]
    assert not torch.equal(model.attnlab.decoder.weight, start)


# Refusals


def test_what_convert_refuses() -> None:
    with pytest.raises(ValueError, match="is converted already"):
        al.convert(converted("bert"), "abc-mlp")
    with pytest.raises(ValueError, match=r"no attention of kind cross among the chosen layers; the model has encoder"):
        al.convert(build("bert"), "abc-mlp", kinds=("cross",))
    with pytest.raises(ValueError, match="a kind is encoder, causal"):
        al.convert(build("bert"), "abc-mlp", kinds=("self",))
    with pytest.raises(ValueError, match="slots must be an int of at least 1"):
        al.convert(build("bert"), "abc-mlp:slots=0")
    with pytest.raises(ValueError, match="bias must be 'refuse' or 'drop'"):
        al.convert(build("bert"), "abc-mlp", bias="keep")
    with pytest.raises(ValueError, match="cannot be swapped or recorded"):
        al.convert(nn.Linear(2, 2), "abc-mlp")


@pytest.mark.parametrize(
    ("name", "mech", "message"),
    [
        ("gpt2", "abc-luna", "would leak the future"),
        ("gpt2", "abc-cluster", "later key would move"),
        ("gpt2", "abc-compressive", "give length="),
        ("t5", "abc-mlp", "drop the bias"),
        ("mistral", "abc-mlp", "sees only the last 5 tokens"),
        ("modernbert", "abc-mlp", "sees only the last 4 tokens"),
    ],
)
def test_a_refused_model_is_as_it_was(name: str, mech: str, message: str) -> None:
    model, before = build(name), build(name)
    with pytest.raises(ValueError, match=message):
        al.convert(model, mech)
    assert not al.is_converted(model)
    given = inputs(model)
    assert torch.equal(real_logits(model, given), real_logits(before, given))
    assert model.config._attn_implementation == "sdpa"
    assert list(model.state_dict()) == list(before.state_dict())


def test_t5_is_converted_in_its_cross_attention_or_without_its_bias() -> None:
    model = converted("t5", kinds=("cross",))
    assert list(model.attnlab.state_dict()) == ["cross.weight"]
    # Layer 0 makes the bias that the other layers add.
    with pytest.raises(ValueError, match="makes the position bias of"):
        al.convert(build("t5"), "abc-mlp", layers=[("decoder", 0)], bias="drop")
    assert list(converted("t5", layers=[("decoder", 1)]).attnlab.state_dict()) == ["decoder.weight"]


def test_a_text_longer_than_linformers_n() -> None:
    model = converted("gpt2", "abc-linformer:slots=3,length=8")
    assert model(**inputs(model, length=8)).logits.shape[1] == 8
    with pytest.raises(ValueError, match=r"transformer.h.0.attn: 9 tokens, but this Linformer learned a control for 8"):
        model(**inputs(model, length=9))
    with pytest.raises(ValueError, match="9 tokens, but this Linformer"):
        model.generate(**inputs(model, length=6), max_new_tokens=5, min_new_tokens=5, do_sample=False)


def test_a_mask_of_ones_own_is_refused() -> None:
    model = converted("bert")
    mask = torch.rand(3, 1, 11, 11) > 0.4
    mask[:, :, :, 0] = True
    with pytest.raises(ValueError, match=r"cannot take this call \(mask\)"):
        model(**inputs(model), attention_mask=mask)


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
    again = load_model(save_model(model, tmp_path))
    assert_close(again(ids, **given).logits, expected)
    with pytest.raises(ValueError, match="already; convert a model whose attention is softmax"):
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
