"""One checkpoint format: what is trained or saved here, ``load_model`` opens, and every tool takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attnlab as al
from attnlab.adapters.load import max_length
from attnlab.cli import main
from attnlab.data import train_bpe, train_sentencepiece, train_wordpiece, train_words
from attnlab.data.tokenisers import Tokeniser
from attnlab.models import Transformer, TransformerConfig, attentions, save_transformer
from attnlab.pretraining import CorpusConfig, PretrainConfig, train_language_model

TEXTS = ["the old ferry stayed in the harbour until the ice broke in spring", "a captain counted his passengers"] * 9
KINDS = {"encoder": "mlm", "decoder": "causal", "encoder-decoder": "seq2seq"}


@pytest.fixture(scope="module")
def wordpiece() -> Tokeniser:
    return train_wordpiece(TEXTS, vocab_size=60)


@pytest.fixture(scope="module")
def bpe() -> Tokeniser:
    return train_bpe(TEXTS, vocab_size=270)


def saved(folder: Path, tokeniser: Tokeniser, kind: str = "decoder", **fields: object) -> Transformer:
    """A small model whose weights are not as they started, saved with its tokeniser."""
    config = TransformerConfig(
        kind=kind, vocab=tokeniser.vocab_size + 3, width=12, heads=3, layers=2, hidden=19, max_length=31
    )
    model = Transformer(replace(config, **fields)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    save_transformer(model, folder)
    tokeniser.save(folder)
    return model


@pytest.mark.parametrize("spec", al.all_mechanisms())
def test_the_mechanism_travels_with_the_folder(spec: str, tmp_path: Path, wordpiece: Tokeniser) -> None:
    """For every mechanism: the same outputs after loading, the same spec in every layer."""
    field = "causal_attention"
    kind = "decoder"
    if "causal" in al.mechanism(spec).cannot():
        kind, field = "encoder", "self_attention"
    model = saved(tmp_path, wordpiece, kind, **{field: spec})
    loaded = al.load_model(tmp_path)
    specs = [[al.spec_of(layer.mechanism) for layer in attentions(one)] for one in (loaded.model, model)]
    assert specs[0] == specs[1]
    ids = loaded.tokenizer("the ice broke", return_tensors="pt")["input_ids"]
    assert torch.equal(loaded.model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_tools_take_a_loaded_model(kind: str, tmp_path: Path, wordpiece: Tokeniser) -> None:
    saved(tmp_path / "a", wordpiece, kind)
    loaded = al.load_model(tmp_path / "a")
    assert loaded.task == KINDS[kind]
    assert max_length(loaded.model) == 31
    page = tmp_path / "page.html"
    assert main(["explore", str(tmp_path / "a"), "the ice broke", "-o", str(page)]) == 0
    if kind == "encoder-decoder":
        assert main(["explore", str(tmp_path / "a"), "the ice", "--target", "a captain", "-o", str(page)]) == 0
    text = tmp_path / "text.txt"
    text.write_text(" ".join(TEXTS))
    words = ["--tokens", "40", "--length", "16", "-m", "top-r:r=2", "-m", "softmax"]
    assert main(["compare", str(tmp_path / "a"), "--text", str(text), *words, "-o", str(page)]) == 0
    # Converted, it is saved and comes back converted.
    al.convert(loaded.model, {"causal" if kind == "decoder" else "encoder": "kernel:elu"})
    again = al.load_model(al.save_model(loaded, tmp_path / "b"))
    assert al.is_converted(again.model)
    assert again.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()


def test_a_config_of_before_model_types_is_opened(tmp_path: Path, wordpiece: Tokeniser) -> None:
    saved(tmp_path, wordpiece)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("model_type") == "attnlab"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert al.load_model(tmp_path).task == "causal"


def test_loading_takes_the_dtype_asked_for(tmp_path: Path, wordpiece: Tokeniser) -> None:
    save_transformer(saved(tmp_path, wordpiece).bfloat16(), tmp_path)
    assert next(al.load_model(tmp_path).model.parameters()).dtype == torch.float32
    assert next(al.load_model(tmp_path, dtype=None).model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["words", "sentencepiece"])
def test_other_tokenisers_come_back_too(kind: str, tmp_path: Path) -> None:
    if kind == "sentencepiece":
        pytest.importorskip("sentencepiece")
    own: Tokeniser = train_words(TEXTS, min_count=1) if kind == "words" else train_sentencepiece(TEXTS, vocab_size=36)
    saved(tmp_path / "a", own)
    loaded = al.load_model(tmp_path / "a")
    text = "the old ferry stayed"
    assert loaded.tokenizer(text)["input_ids"] == own.encode_batch([text])[0]
    assert al.generate(loaded, text, max_new_tokens=3).startswith(text)
    assert main(["explore", str(tmp_path / "a"), text, "-o", str(tmp_path / "page.html")]) == 0
    assert al.load_model(al.save_model(loaded, tmp_path / "b")).tokenizer(text) == loaded.tokenizer(text)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, wordpiece: Tokeniser, bpe: Tokeniser) -> None:
    saved(tmp_path, wordpiece)
    bpe.save(tmp_path)
    with pytest.raises(ValueError, match=r"270 tokens, and its model reads \d+; they do not belong together"):
        al.load_model(tmp_path)


@pytest.mark.parametrize(
    ("model", "task"),
    [
        ("attnlab-lm", "causal"),
        ("llama-2x32", "causal"),
        pytest.param("attnlab-mlm", "mlm", marks=pytest.mark.slow),
        ("bert-2x32", "mlm"),
    ],
)
def test_what_train_writes_is_opened(model: str, task: str, tmp_path: Path) -> None:
    """Models of either kind, with a mechanism that learns, from training to a page and a text."""
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS * 9))
    config = PretrainConfig(
        model=model, task=task, attention="abc-mlp:slots=3", lengths=(16,), tokens=64, steps=2, warmup=1, lr=1e-2
    )
    corpus = CorpusConfig(str(tmp_path / "text.txt"), vocab=270)
    train_language_model(corpus, config, run_dir=tmp_path / "run")
    loaded = al.load_model(tmp_path / "run" / "model")
    assert loaded.task == task
    conversions = al.adapters.adapter_of(loaded.model).conversions()
    assert {al.spec_of(conversion.mechanism) for conversion in conversions} == {"abc-mlp:slots=3"}
    if task == "causal":
        # A text begins after the end of a document, as in training, and is not ended.
        end = loaded.tokenizer.eos_token_id
        ids = loaded.tokenizer("the old ferry")["input_ids"]
        assert ids[0] == end
        assert end not in ids[1:]
        assert al.generate(loaded, "the old ferry", max_new_tokens=4).startswith("the old ferry")
    assert main(["explore", str(tmp_path / "run" / "model"), "the old", "-o", str(tmp_path / "page.html")]) == 0
    assert type(al.load_model(tmp_path / "run").model) is type(loaded.model)


def test_generating_by_the_mechanisms_own_memory(tmp_path: Path, bpe: Tokeniser) -> None:
    saved(tmp_path, bpe, causal_attention="abc-mlp:slots=3")
    loaded = al.load_model(tmp_path)
    ids = torch.tensor([[5, 9, 7], [8, 5, 6]])
    cached, whole = (loaded.model.generate(ids, max_new_tokens=5, use_cache=use) for use in (True, False))
    assert torch.equal(cached, whole)
    assert torch.equal(cached[:, :3], ids)
    with al.swap(loaded.model, "window:r=2"):
        swapped = loaded.model.generate(ids, max_new_tokens=5)
    assert not torch.equal(swapped, cached)
    drawn = [al.generate(loaded, "the", temperature=1.5, seed=seed, max_new_tokens=6) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_masked_language_model_continues_nothing(tmp_path: Path, wordpiece: Tokeniser) -> None:
    saved(tmp_path, wordpiece, "encoder")
    with pytest.raises(ValueError, match="predicts masked tokens, so it cannot continue a text"):
        al.generate(al.load_model(tmp_path), "the old")
    saved(tmp_path, wordpiece, "decoder")
    loaded = al.load_model(tmp_path)
    with pytest.raises(ValueError, match="max_new_tokens must be an int of at least 1"):
        al.generate(loaded, "the old", max_new_tokens=0)
