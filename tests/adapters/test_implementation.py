"""``attn_implementation="attnlab:SPEC"``: transformers' own option attends as ``al.swap`` does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers

import attnlab as al
from tests.adapters.test_load import write_tokenizer
from tests.adapters.zoo import build

SPECS = ["softmax", "top-r:r=3", "window:r=4", "value-aware:r=2", "kernel:elu", "abc-window:slots=3",
         "abc-random:slots=4", "orf:features=8", "per-head:heads=softmax/top-r:r=2"]  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    return model, tmp_path


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(24).view(2, 12) % 19 + 1
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("spec", SPECS)
def test_attends_as_swap_does(saved, spec):
    model, folder = saved
    adopted = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=f"attnlab:{spec}").eval()
    with torch.no_grad(), al.swap(model, spec):
        expected = model(**batch()).logits
    with torch.no_grad():
        torch.testing.assert_close(adopted(**batch()).logits, expected, rtol=0, atol=1e-6)
        adopted.set_attn_implementation("sdpa")
        torch.testing.assert_close(adopted(**batch()).logits, model(**batch()).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beam"])
def test_generates_as_swap_does(saved, options):
    model, folder = saved
    adopted = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="attnlab:top-r:r=3").eval()
    settings = {"max_new_tokens": 6, "do_sample": False, **options}
    with al.swap(model, "top-r:r=3"):
        expected = model.generate(**batch(), **settings)
    assert torch.equal(adopted.generate(**batch(), **settings), expected)


def test_contexts_know_the_mechanism(saved):
    model, folder = saved
    adopted = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="attnlab:top-r:r=3").eval()
    with torch.no_grad(), al.record(adopted) as trace:
        expected = adopted(**batch()).logits
    assert al.spec_of(trace[1].mechanism) == al.spec_of(al.mechanism("top-r:r=3"))
    values = trace[1].values.repeat_interleave(2, dim=1)
    torch.testing.assert_close(trace[1].weights() @ values, trace[1].output, rtol=0, atol=1e-5)
    with torch.no_grad(), al.swap(adopted, "softmax"):
        torch.testing.assert_close(adopted(**batch()).logits, model(**batch()).logits, rtol=0, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(adopted(**batch()).logits, expected)
    with pytest.raises(ValueError, match="TopR"), al.evicting(adopted, al.KVPolicy(4)):
        pass


def test_a_pipeline_takes_it(saved):
    model, folder = saved
    write_tokenizer(folder)
    made = transformers.pipeline(
        "text-generation", model=str(folder), model_kwargs={"attn_implementation": "attnlab:top-r:r=2"}
    )
    with al.swap(model, "top-r:r=2"):
        ids = made.tokenizer("a b a", return_tensors="pt").input_ids
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)[0, 3:].tolist()
    assert (
        made("a b a", max_new_tokens=4, do_sample=False, return_tensors=True)[0]["generated_token_ids"][3:] == expected
    )


def test_a_trainer_trains_with_it(saved, tmp_path):
    _, folder = saved
    adopted = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="attnlab:top-r:r=3")
    before = {name: value.clone() for name, value in adopted.named_parameters()}
    rows = [{"input_ids": row, "labels": row} for row in batch()["input_ids"]]
    settings = transformers.TrainingArguments(
        str(tmp_path / "run"), max_steps=2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
    )
    transformers.Trainer(adopted, settings, train_dataset=rows).train()
    moved = [name for name, value in adopted.named_parameters() if not torch.equal(value, before[name])]
    assert any("q_proj" in name for name in moved)


def test_learned_mechanisms_name_convert(saved):
    model, _ = saved
    with pytest.raises(ValueError, match=r"al.convert\(model, 'abc-mlp:slots=4'\)"):
        model.set_attn_implementation("attnlab:abc-mlp:slots=4")
    with pytest.raises(ValueError, match="no mechanism named 'nonsense'"):
        model.set_attn_implementation("attnlab:nonsense")
    assert model.config._attn_implementation == "sdpa"


def test_attention_outside_the_interface_is_refused():
    model = build("mpnet")
    with pytest.raises(ValueError, match=r"does not attend through transformers' AttentionInterface.*al.swap"):
        model.set_attn_implementation("attnlab:top-r:r=2")


def test_dropout_is_refused(saved):
    _, folder = saved
    adopted = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="attnlab:top-r:r=3", attention_dropout=0.5
    ).train()
    with pytest.raises(ValueError, match=r"drops attention weights with p=0.5.*attention dropout to 0"):
        adopted(**batch())


@pytest.mark.parametrize(
    "order",
    [
        "import attnlab, transformers",
        pytest.param("import transformers, attnlab", marks=pytest.mark.slow),
        pytest.param("import transformers.modeling_utils, attnlab", marks=pytest.mark.slow),
    ],
)
def test_the_order_of_imports_does_not_matter(order):
    program = f"""{order}
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
LlamaForCausalLM(config).set_attn_implementation("attnlab:top-r:r=2")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


def test_importing_attnlab_imports_neither_transformers_nor_torch():
    program = "import sys, attnlab; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'lm_eval')))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)
