from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from attnlab.data import load_store, train_wordpiece, write_store
from attnlab.data.tokenisers import Tokeniser
from attnlab.pretraining import PretrainConfig, build_model, pretrain

TEXTS = ["a red fox runs over the old stone bridge", "the old fox sleeps under a red bridge"] * 9


@pytest.fixture(scope="module")
def tokeniser() -> Tokeniser:
    return train_wordpiece(TEXTS, vocab_size=48)


@pytest.mark.parametrize(("model", "task"), [("bert-2x32", "mlm"), ("llama-2x32", "causal")])
def test_a_hugging_face_model_learns_and_can_be_saved(
    model: str, task: str, tokeniser: Tokeniser, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    for name in ("train", "valid"):
        write_store(tmp_path / name, TEXTS, tokeniser)
    stores = {name: load_store(tmp_path / name) for name in ("train", "valid")}
    config = PretrainConfig(model=model, task=task, lengths=(17,), tokens=119, steps=40, lr=1e-2, warmup=5)
    trained, outcome = pretrain(config, tokeniser=tokeniser, stores=stores, run_dir=tmp_path / "run")
    # A guess among 64 entries costs log 64.
    assert outcome.metrics["valid/loss"] < 0.8 * math.log(64)
    trained.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    loader = AutoModelForMaskedLM if task == "mlm" else AutoModelForCausalLM
    tokens = torch.randint(5, 40, (2, 11))
    with torch.no_grad():
        again = loader.from_pretrained(tmp_path / "model").eval()(tokens).logits
        torch.testing.assert_close(again, trained.eval()(tokens).logits)


def test_a_llama_begins_with_the_end_of_a_document(tokeniser: Tokeniser) -> None:
    llama = build_model(PretrainConfig(model="llama-3x64", task="causal", lengths=(29,)), tokeniser)
    config = llama.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (3, 64, 2)
    # 3 x 64 x 176 parameters in a feed-forward layer, 2 x 64 x 256 in a BERT's: a twentieth more.
    assert config.intermediate_size == 176
    assert config.bos_token_id == config.eos_token_id == tokeniser.specials.eos


@pytest.mark.parametrize(
    ("model", "task", "message"),
    [
        ("bert-large", "mlm", "bert-LAYERSxWIDTH, such as bert-6x256, got 'bert-large'"),
        ("llama-3", "causal", "llama-LAYERSxWIDTH"),
        ("llama-2x32", "mlm", "trained as a causal language model"),
        ("bert-2x32", "causal", "trained as a masked language model"),
        ("bert-2x33", "mlm", "multiple of 32"),
        ("bert-0x32", "mlm", "must have layers"),
        ("llama-2x0", "causal", "multiple of 32"),
    ],
)
def test_a_model_that_cannot_be_is_refused(model: str, task: str, message: str, tokeniser: Tokeniser) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(PretrainConfig(model=model, task=task), tokeniser)
