from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from attnlab.data import TokenStore, load_store, train_wordpiece, write_store
from attnlab.data.tokenisers import Tokeniser
from attnlab.guidance import Guidance
from attnlab.pretraining import PretrainConfig, build_model, pattern_tokens, pretrain
from attnlab.training import read_metrics

TEXTS = ["a red fox runs over the old stone bridge", "the old fox sleeps under a red bridge"] * 9


@pytest.fixture(scope="module")
def tokeniser() -> Tokeniser:
    return train_wordpiece(TEXTS, vocab_size=48)


def written(folder: Path, tokeniser: Tokeniser) -> dict[str, TokenStore]:
    """Both stores of a corpus, of the same texts."""
    for name in ("train", "valid"):
        write_store(folder / name, TEXTS, tokeniser)
    return {name: load_store(folder / name) for name in ("train", "valid")}


@pytest.mark.parametrize(("model", "task"), [("bert-2x32", "mlm"), ("llama-2x32", "causal")])
def test_a_hugging_face_model_learns_and_can_be_saved(
    model: str, task: str, tokeniser: Tokeniser, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    stores = written(tmp_path, tokeniser)
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


@pytest.mark.parametrize(("short", "part"), [("train", "the text to train on"), ("valid", "the held-out text (valid)")])
def test_a_text_too_short_for_a_row_is_named(short: str, part: str, tokeniser: Tokeniser, tmp_path: Path) -> None:
    stores = written(tmp_path, tokeniser)
    write_store(tmp_path / "short", ["a red fox"], tokeniser)
    stores[short] = load_store(tmp_path / "short")
    config = PretrainConfig(model="llama-2x32", task="causal", lengths=(17,), tokens=119, steps=1)
    says = rf"{re.escape(part)}: the store holds \d+ tokens, too few for one row of 17: give more text, or shorter rows"
    with pytest.raises(ValueError, match=says):
        pretrain(config, tokeniser=tokeniser, stores=stores, run_dir=tmp_path / "run")


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


PATTERNS = ("next", "prev", "first", "delim")


@pytest.mark.parametrize(
    ("model", "task"),
    [
        pytest.param("bert-4x64", "mlm", marks=pytest.mark.slow),
        ("llama-3x64", "causal"),
        pytest.param("attnlab-mlm", "mlm", marks=pytest.mark.slow),
        pytest.param("attnlab-lm", "causal", marks=pytest.mark.slow),
    ],
)
def test_a_guided_model(model: str, task: str, tokeniser: Tokeniser, tmp_path: Path) -> None:
    """The guidance loss falls, alpha is 0 at the last step, and the watched value is the task's loss."""
    patterns = PATTERNS if task == "mlm" else PATTERNS[1:]
    guidance = Guidance(fraction=0.5, patterns=patterns, alpha0=10.0, reduction="row")
    config = PretrainConfig(
        model=model, task=task, lengths=(17,), tokens=68, steps=12, lr=3e-3, warmup=2, guidance=guidance
    )
    _, outcome = pretrain(config, tokeniser=tokeniser, stores=written(tmp_path, tokeniser), run_dir=tmp_path / "run")
    evaluated = [line["values"] for line in read_metrics(tmp_path / "run") if line["kind"] == "eval"]
    assert evaluated[-1]["valid/guidance"] < 0.95 * evaluated[0]["valid/guidance"]
    term = {"mlm": "valid/masked-lm", "causal": "valid/causal-lm"}[task]
    assert outcome.metrics["valid/loss"] == pytest.approx(outcome.metrics[term])
    assert outcome.best_value == min(values[term] for values in evaluated)
    assert config.label.endswith(f"guided to {'+'.join(patterns)}")


def test_guidance_that_cannot_be_is_refused(tokeniser: Tokeniser, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not see the next token"):
        PretrainConfig(task="causal", guidance=Guidance(fraction=0.5))
    # The texts have no full stop, and so has the vocabulary.
    assert pattern_tokens(tokeniser).period == ()
    config = PretrainConfig(lengths=(17,), tokens=68, steps=2, guidance=Guidance(fraction=0.5))
    with pytest.raises(ValueError, match="no token for the pattern 'period': name patterns without it"):
        pretrain(config, tokeniser=tokeniser, stores=written(tmp_path, tokeniser), run_dir=tmp_path / "run")


def test_full_stops_and_delimiters_of_our_tokenisers() -> None:
    own = train_wordpiece(["A fox. A bridge."] * 3, vocab_size=40)
    tokens = pattern_tokens(own)
    assert [own.decode([i]) for i in tokens.period] == ["."]
    assert tokens.delimiters == (own.specials.bos, own.specials.eos)


def test_an_unguided_run_keeps_its_settings() -> None:
    """run.json of a run that was begun before guidance was an option says the same as one of today."""
    assert "guidance" not in PretrainConfig().as_dict()
