"""Models come from safetensors, and whatever is wrong with a folder is said in one sentence."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
import transformers as tf
from huggingface_hub import constants

from attnlab.adapters import load_model, record
from attnlab.adapters.hub import hub_or_its_cache
from attnlab.adapters.load import check_length, max_length
from tests.adapters.zoo import ALL, LLAMA, build
from tests.tolerance import assert_close


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["[PAD]", "[BOS]", "[EOS]", "[UNK]", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[EOS]"}
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def save(name: str, folder: Path) -> Path:
    build(name).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save("bert", tmp_path / "bert")


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("bert", "mlm"),
        ("modernbert", "mlm"),
        ("gpt2", "causal"),
        ("llama", "causal"),
        ("t5", "seq2seq"),
        ("marian", "seq2seq"),
    ],
)
def test_round_trip_and_task(name: str, task: str, tmp_path: Path) -> None:
    loaded = load_model(save(name, tmp_path))
    assert loaded.task == task
    assert type(loaded.model) is type(ALL[name]())
    assert not loaded.model.training
    assert loaded.tokenizer("a b")["input_ids"][:2] == [4, 5]
    for ours, theirs in zip(loaded.model.parameters(), build(name).parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_headless_and_pretraining_models(tmp_path: Path) -> None:
    config = tf.BertConfig(**LLAMA)
    for cls, task in (
        (tf.BertModel, "encoder"),
        (tf.BertForPreTraining, "mlm"),
        (tf.BertForSequenceClassification, "encoder"),
    ):
        folder = tmp_path / cls.__name__
        cls(config).save_pretrained(folder)
        write_tokenizer(folder)
        assert load_model(folder).task == task


def test_half_precision_is_read_as_float32_unless_asked(tmp_path: Path) -> None:
    build("bert").half().save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    assert load_model(tmp_path).model.dtype == torch.float32
    assert load_model(tmp_path, dtype=None).model.dtype == torch.float16


def one_line(folder: Path) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        load_model(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert folder.name in text
    return text


def test_no_weights(bert: Path) -> None:
    (bert / "model.safetensors").unlink()
    assert "holds no weights: model.safetensors is missing" in one_line(bert)


def test_a_pickle_only(bert: Path) -> None:
    (bert / "model.safetensors").unlink()
    (bert / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    assert "only as a pickle (pytorch_model.bin)" in one_line(bert)


@pytest.mark.parametrize("kept", [0, 5, 200, -7])
def test_truncated_weights(bert: Path, kept: int) -> None:
    weights = bert / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    assert "model.safetensors is truncated or damaged" in one_line(bert)


def remove_tensors(folder: Path, part: str) -> None:
    """Rewrite the weights without the tensors whose name has this part."""
    from safetensors.torch import load_file, save_file

    weights = folder / "model.safetensors"
    tensors = {name: t for name, t in load_file(weights).items() if part not in name}
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet"])
def test_an_encoder_without_a_pooler_or_head(name: str, tmp_path: Path) -> None:
    """Sentence encoders: saved without the pooler, or as the masked language model without its head."""
    masked, ids = build(name), torch.tensor([[4, 5, 6]])
    encoder = type(masked.base_model)(masked.config).eval()
    for model, absent in ((encoder, ["pooler."]), (masked, ["cls.", "lm_head."])):
        folder = tmp_path / absent[0]
        model.save_pretrained(folder)
        write_tokenizer(folder)
        for part in absent:
            remove_tensors(folder, part)
        loaded = load_model(folder)
        assert loaded.task == "encoder"
        with torch.no_grad(), record(loaded.model) as trace:
            output = loaded.model(ids)
            expected = model.base_model(ids).last_hidden_state
        assert output.pooler_output is None
        assert_close(output.last_hidden_state, expected)
        assert len(trace) == 3


def test_a_head_that_is_there_in_part_is_an_error(bert: Path) -> None:
    remove_tensors(bert, "cls.predictions.transform.dense.weight")
    assert "lack 1 tensors, such as cls.predictions.transform.dense.weight" in one_line(bert)


def test_weights_that_lack_a_tensor(bert: Path) -> None:
    remove_tensors(bert, "bert.encoder.layer.1.attention.self.key.weight")
    assert "lack 1 tensors, such as bert.encoder.layer.1.attention.self.key.weight" in one_line(bert)


def test_weights_of_another_shape(bert: Path) -> None:
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps({**config, "intermediate_size": 29}))
    assert "cannot be loaded as BertForMaskedLM" in one_line(bert)


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    model = build("bert")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    write_tokenizer(tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    load_model(tmp_path)
    shards[0].unlink()
    assert f"lacks 1 of its {len(shards)} weight files, such as {shards[0].name}" in one_line(tmp_path)


def test_no_config_or_a_broken_one(bert: Path) -> None:
    (bert / "config.json").write_text('{"model_type": "bert"')
    assert "config.json is not valid JSON" in one_line(bert)
    (bert / "config.json").write_text('{"model_type": "no-such-model"}')
    assert "no usable model config" in one_line(bert)
    (bert / "config.json").unlink()
    assert "holds no config.json" in one_line(bert)


def test_no_tokenizer(bert: Path) -> None:
    for file in bert.glob("tokenizer*"):
        file.unlink()
    assert "holds no tokenizer" in one_line(bert)
    (bert / "tokenizer.json").write_text("{")
    assert "its tokenizer cannot be loaded" in one_line(bert)


def test_neither_a_folder_nor_a_hub_name(tmp_path: Path) -> None:
    assert "there is no such folder" in one_line(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "is a file; give the folder" in one_line(tmp_path / "file")


def test_a_hub_out_of_reach_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unknown(host: str, *args: object, **kwargs: object) -> None:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    said = one_line(Path("nobody/no-such-model"))
    assert "no such folder here, and no usable model config in the cache of the hub, which is out of reach" in said
    assert asked == [urlsplit(constants.ENDPOINT).hostname]
    # A proxy may know names that this machine does not: then the hub is asked.
    monkeypatch.setenv("https_proxy", "http://localhost:9")
    with hub_or_its_cache() as reached:
        assert reached
        assert not constants.is_offline_mode()
    monkeypatch.delenv("https_proxy")
    with hub_or_its_cache() as reached:
        assert not reached
        assert constants.is_offline_mode()
    assert not constants.is_offline_mode()


@pytest.mark.parametrize(
    ("name", "limit"),
    [("bert", 64), ("roberta", 63), ("distilbert", 64), ("gpt2", 64), ("llama", 64), ("t5", None), ("bart", 64)],
)
def test_the_longest_sequence(name: str, limit: int | None) -> None:
    model = build(name)
    assert max_length(model) == limit
    check_length(model, 63)
    if limit is not None:
        model(torch.full((1, limit), 5))
        with pytest.raises(
            ValueError, match=f"a sequence of 65 tokens is longer than the {limit} positions of {type(model).__name__}"
        ):
            check_length(model, 65)
