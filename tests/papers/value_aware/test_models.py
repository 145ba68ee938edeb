"""Settings, models, windows and scores of ``python -m papers value-aware``."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from attnlab.adapters import swap
from attnlab.data import IGNORED, TokenStore, load_tokeniser
from papers.value_aware.causal_lm import EXACT, causal_loss, causal_model, kernel_specs, sliding_windows
from papers.value_aware.config import CONFIGS, ValueAwareConfig
from papers.value_aware.masked_lm import continued_model, masked_score
from papers.value_aware.words import articles_of, prepare_words
from tests.papers.value_aware.cases import CONFIG, LINES


def test_the_papers_settings_have_a_name() -> None:
    """Table 4 and A.2: 8 instances of 512 tokens in a batch, two epochs of ten million of them."""
    paper = CONFIGS["paper"]
    assert (paper.seed, paper.mlm_lr, paper.mlm_warmup, paper.mlm_clip, paper.mlm_dropout) == (42, 5e-6, 0.1, 5.0, 0.0)
    assert (paper.mlm_short, paper.mlm_long, paper.mlm_tokens) == (512, 4096, 4096)
    assert paper.mlm_steps == pytest.approx(2 * 10e6 / 8, rel=0.01)
    assert (paper.lm_layers, paper.lm_width, paper.lm_width // paper.lm_heads, paper.lm_length) == (6, 512, 64, 512)
    assert (paper.lm_batch, paper.lm_lr, paper.lm_clip, paper.lm_context) == (128, 5e-4, None, 400)
    assert round(paper.lm_warmup * paper.lm_steps) == 4000


def test_the_papers_causal_models_read_whole_words() -> None:
    """Issue 20, point 12: A.2's 156M parameters need WikiText-103's vocabulary."""
    paper = CONFIGS["paper"]
    assert paper.lm_vocabulary == "words"
    with torch.device("meta"):
        model = causal_model(paper, "exp", vocab=267_744)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(156e6, rel=0.01)


def test_words_are_those_of_the_training_file(words: Path, tmp_path: Path) -> None:
    tokeniser = load_tokeniser(words / "tokenizer")
    path = tmp_path / "wiki.tokens"
    path.write_text("".join(LINES))
    first, second = articles_of(path)
    assert first == "= A title = <eos> The cat <unk> sat . <eos> It @-@ sat ."
    # As published: with its cases, with @-@, and with <unk> as the one unknown word.
    assert tokeniser.decode(tokeniser.encode_batch([second])[0]) == "= Other = <eos> the END"
    [ids] = tokeniser.encode_batch([first])
    assert ids.count(tokeniser.specials.unk) == 1
    assert tokeniser.vocab_size == 4 + len(set((first + " " + second).split()) - {"<unk>"})
    with pytest.raises(ValueError, match=r"holds no wiki.train.tokens"):
        prepare_words(tmp_path / "nowhere", tmp_path / "out")


def test_windows_predict_every_token_once_with_context() -> None:
    store = TokenStore(np.arange(100, 167), np.array([0, 23, 67]))
    tokens, labels = sliding_windows(store, 2, length=17, context=11)
    stream = [*range(100, 123), 2, *range(123, 167), 2]
    assert [int(t) for t in labels[labels != IGNORED]] == stream[1:]
    first = (labels != IGNORED).argmax(1)
    assert first[0] == 1
    assert (first[1:] >= 11).all()
    assert (tokens[:, 1:][labels[:, 1:] != IGNORED] == labels[:, 1:][labels[:, 1:] != IGNORED]).all()


def test_unknown_words_are_context_and_no_labels() -> None:
    store = TokenStore(np.array([5, 1, 6, 7, 1]), np.array([0, 5]))
    tokens, labels = sliding_windows(store, 2, length=4, context=2, unknown=1)
    assert tokens.tolist() == [[5, 1, 6, 7], [6, 7, 1, 2]]
    assert labels.tolist() == [[-100, -100, 6, 7], [-100, -100, -100, 2]]


def test_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="too few for one window of 17"):
        sliding_windows(TokenStore(np.arange(5), np.array([0, 5])), 2, length=17, context=11)


def test_causal_loss_of_a_uniform_model_is_log_of_the_vocabulary() -> None:
    model = causal_model(CONFIG, "exp", vocab=64).eval()
    torch.nn.init.zeros_(model.tokens.weight)
    labels = torch.tensor([[-100, -100, 7, 9, 3]])
    score = causal_loss(model, [{"input_ids": torch.tensor([[5, 6, 7, 9, 3]]), "labels": labels}])
    assert score.tokens == 3
    assert score.loss == pytest.approx(math.log(64))
    # Three tokens that are two words.
    assert score.perplexity(2) == pytest.approx(64**1.5)


@pytest.mark.parametrize("kernel", list(EXACT))
def test_value_aware_with_one_key_more_than_the_width_is_exact_for_each_kernel(kernel: str) -> None:
    model = causal_model(CONFIG, kernel, vocab=64).eval()
    tokens = torch.randint(0, 64, (2, 17))
    windows = [{"input_ids": tokens, "labels": tokens}]
    exact = causal_loss(model, windows).loss
    oblivious, aware = kernel_specs(kernel, 4)
    with swap(model, aware):
        assert causal_loss(model, windows).loss == pytest.approx(exact, rel=1e-5)
    with swap(model, oblivious):
        assert abs(causal_loss(model, windows).loss - exact) > 1e-6


def test_positions_repeat_in_parts_and_the_first_part_is_unchanged(model: Path) -> None:
    from transformers import BertForMaskedLM

    own = BertForMaskedLM.from_pretrained(model).bert.embeddings.position_embeddings.weight.detach()
    short, long = (continued_model(model, positions=n, dropout=0.0) for n in (13, 29))
    places = long.bert.embeddings.position_embeddings.requires_grad_(False)
    assert places.part.shape == (3, 8)
    table = places(torch.arange(29))
    assert torch.equal(table[:13], own)
    torch.testing.assert_close(table[13:26] - own, places.part[1].expand(13, 8))
    torch.testing.assert_close(table[26:] - own[:3], places.part[2].expand(3, 8))
    assert places.part[1:].std() == pytest.approx(float((own - own.mean(0)).std()), rel=0.5)
    tokens = torch.randint(5, 24, (2, 13))
    with torch.no_grad():
        torch.testing.assert_close(short.eval()(tokens).logits, long.eval()(tokens).logits)


def test_masked_score_counts_wrong_answers(model: Path) -> None:
    net = continued_model(model, positions=13, dropout=0.0).eval()
    tokens = torch.randint(5, 24, (2, 13))
    answers = net(tokens).logits.argmax(-1)
    labels = torch.full_like(tokens, IGNORED)
    labels[:, 3:7] = answers[:, 3:7]
    labels[0, 3] = (answers[0, 3] + 1) % 64
    score = masked_score(net, [{"input_ids": tokens, "labels": labels}])
    assert (score["mlm_error"], score["predicted"]) == (12.5, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernels": ("cosine",)}, "exp, poly and elu"),
        ({"lm_context": 512}, "lm_context"),
        ({"mlm_tokens": 100}, "no row of 2048"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ValueAwareConfig(**change)  # type: ignore[arg-type]
