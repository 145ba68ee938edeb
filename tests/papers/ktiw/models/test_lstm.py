"""KTIW's recurrent models: the paper's parameter counts, padding, attention as a mechanism, and the modes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attnlab.adapters import record, swap
from attnlab.dynamics import class_probe, lexical_probe
from papers.ktiw.models.glove import fill_from_glove
from papers.ktiw.models.lstm import Classifier, Translator, attention_parameters, freeze_probe
from papers.ktiw.models.lstm_config import LSTM_CONFIGS, ClassifierConfig, TranslatorConfig
from papers.ktiw.models.search import translate

SMALL = TranslatorConfig(vocab=13, width=6)
LENGTHS = (7, 2, 5)


def batch(lengths: tuple[int, ...] = LENGTHS, vocab: int = 13) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, vocab, (len(lengths), max(lengths)))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return ids * mask, mask


def translator(**changes: object) -> Translator:
    torch.manual_seed(0)
    return Translator(replace(SMALL, **changes)).double().eval()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "without_embeddings", "embeddings"),
    [
        ("ktiw-translation", 6_132_544, 2_048_000),
        ("ktiw-translation-literal", 6_066_240, 2_048_000),
        ("ktiw-classification", 1_274_882, 18_101_400),
    ],
)
def test_as_many_parameters_as_the_paper_counts(name: str, without_embeddings: int, embeddings: int) -> None:
    config = LSTM_CONFIGS[name]
    with torch.device("meta"):
        model = Translator(config) if isinstance(config, TranslatorConfig) else Classifier(config)
    assert model.tokens.weight.numel() == embeddings
    assert sum(p.numel() for p in model.parameters()) - embeddings == without_embeddings


@pytest.mark.parametrize(
    "changes", [{}, {"heads": 3}, {"output": "linear"}, {"literal": True}, {"bidirectional": False}]
)
def test_padding_changes_nothing(changes: dict[str, object]) -> None:
    model = translator(**changes)
    x, mask = batch()
    y = torch.randint(1, 13, (len(x), 4))
    together = model(x, decoder_input_ids=y, attention_mask=mask).logits
    for i, length in enumerate(LENGTHS):
        alone = model(x[i : i + 1, :length], decoder_input_ids=y[i : i + 1]).logits
        torch.testing.assert_close(together[i : i + 1], alone)


def test_padding_changes_nothing_in_a_classifier() -> None:
    torch.manual_seed(0)
    model = Classifier(ClassifierConfig(vocab=13, embedding=5, width=4, attention_width=3)).double()
    x, mask = batch()
    together = model(x, attention_mask=mask).logits
    alone = [model(x[i : i + 1, :n]).logits for i, n in enumerate(LENGTHS)]
    torch.testing.assert_close(together, torch.cat(alone))


@pytest.mark.parametrize(("heads", "contexts"), [(1, "sum"), (3, "sum"), (3, "mean")])
def test_attention_is_a_mechanism_and_its_trace_gives_the_output(heads: int, contexts: str) -> None:
    model = translator(heads=heads, contexts=contexts)
    x, mask = batch()
    y = torch.randint(1, 13, (len(x), 4))
    with record(model) as trace:
        out = model(x, decoder_input_ids=y, attention_mask=mask)
    layer = trace["cross", 0]
    weights = layer.weights()
    assert weights.shape == (3, heads, 4, 7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, heads, 4, dtype=torch.float64))
    assert (weights.masked_select(~mask[:, None, None]) == 0).all()
    torch.testing.assert_close(weights @ layer.values.expand(-1, heads, -1, -1), layer.output)
    # Eq. 21: the contexts are summed, so the projection as (m, h e) applied to all heads is the projected context.
    assert layer.projection is not None
    projected = layer.output.transpose(1, 2).flatten(2) @ layer.projection.T + model.context.bias
    hidden = torch.relu(model.hidden(torch.cat([projected, out.states], -1)))  # type: ignore[misc]
    torch.testing.assert_close(model.output(hidden), out.logits)


def test_the_decoder_starts_from_the_mean_of_both_directions() -> None:
    model = translator(layers=1)
    x = torch.randint(1, 13, (2, 5))
    _, (h, c) = model.encoder(model.tokens(x))
    state = model.encode(model.tokens(x)).state
    torch.testing.assert_close(state[0][0], (h[0] + h[1]) / 2)
    torch.testing.assert_close(state[1][0], (c[0] + c[1]) / 2)


def test_linear_output_is_linear_in_attention() -> None:
    """Eq. 32: the logits are sum_l alpha_l W h_l + W d_t."""
    model = translator(output="linear")
    x, y = torch.randint(1, 13, (2, 5)), torch.randint(1, 13, (2, 3))
    with record(model) as trace:
        out = model(x, decoder_input_ids=y)
    alpha = trace["cross", 0].weights()[:, 0]
    gamma = model.context(out.source.hidden) @ model.output.weight.T
    torch.testing.assert_close(out.logits, alpha @ gamma + model.output(out.states))


def test_the_probe_is_the_probability_under_attention_on_one_position() -> None:
    """Eq. 4 by definition: beta[t, l] is p(y_t) with attention forced to l."""
    model = translator()
    x, y = torch.randint(1, 13, (2, 5)), torch.randint(1, 13, (2, 3))
    out = model(x, decoder_input_ids=y)
    beta = lexical_probe(model.predict, out.source.hidden, out.states, y, vocabulary=13)
    for at in range(5):
        with swap(model, f"position:at={at}", layers="cross"):
            p = model(x, decoder_input_ids=y).logits.softmax(-1).gather(2, y.unsqueeze(2)).squeeze(2)
        torch.testing.assert_close(beta[:, :, at], p.detach())


def test_equation_12() -> None:
    torch.manual_seed(0)
    model = Classifier(ClassifierConfig(vocab=13, embedding=5, width=4, attention_width=3)).double()
    x, labels = torch.randint(1, 13, (3, 7)), torch.tensor([0, 1, 1])
    with torch.no_grad(), record(model) as trace:
        out = model(x)
    alpha = trace["cross", 0].weights()[:, 0, 0]
    beta = class_probe(model.output.weight[0], out.source.hidden, labels, bias=model.output.bias.item())
    correct = torch.sigmoid((2 * labels - 1) * out.logits)
    torch.testing.assert_close(torch.sigmoid((alpha * torch.logit(beta)).sum(1)), correct)


def test_uniform_attention_is_the_mean() -> None:
    model = translator(attention="uniform")
    x, mask = batch()
    with record(model) as trace:
        model(x, decoder_input_ids=x, attention_mask=mask)
    expected = mask.double() / torch.tensor(LENGTHS)[:, None]
    torch.testing.assert_close(trace["cross", 0].weights()[:, 0], expected[:, None].expand(-1, 7, -1))


@pytest.mark.parametrize("kind", ["translator", "classifier"])
def test_frozen_beta_trains_attention_alone(kind: str) -> None:
    torch.manual_seed(0)
    small = ClassifierConfig(vocab=13, embedding=5, width=4, attention_width=3)
    model: Translator | Classifier = Translator(SMALL) if kind == "translator" else Classifier(small)
    freeze_probe(model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    adam = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x = torch.randint(1, 13, (2, 5))
    out = model(x, decoder_input_ids=x) if isinstance(model, Translator) else model(x)
    out.logits.square().sum().backward()
    adam.step()
    moved = {id(p) for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    wanted = {id(p) for p in attention_parameters(model) if p.requires_grad}
    assert moved == wanted != set()


def test_greedy_translation_is_the_argmax_of_its_own_prefix() -> None:
    model = translator()
    x, mask = batch()
    translated = translate(model, x, attention_mask=mask, bos=2, eos=3, max_length=6)
    decoder_ids = torch.cat([torch.full((3, 1), 2), translated[:, :-1]], 1)
    argmax = model(x, decoder_input_ids=decoder_ids, attention_mask=mask).logits.argmax(-1)
    ended = (translated == 3).cumsum(1) > 0
    before_end = ~ended | ((translated == 3).cumsum(1) == 1) & (translated == 3)
    assert torch.equal(translated[before_end], argmax[before_end])
    assert (translated[ended] == 3).all()


def test_backward_reaches_every_parameter() -> None:
    model = Translator(replace(SMALL, heads=2))
    x, mask = batch()
    model(x, decoder_input_ids=x, attention_mask=mask).logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_glove_fills_the_rows_of_known_words(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_text("film 1 2 3\nbad -1 0.5 0\n", encoding="utf-8")
    embedding = nn.Embedding(3, 3)
    kept = embedding.weight[0].clone()
    assert fill_from_glove(embedding, path, words=["<pad>", "bad", "film"]) == 2
    assert embedding.weight[2].tolist() == [1, 2, 3]
    assert embedding.weight[1].tolist() == [-1, 0.5, 0]
    assert torch.equal(embedding.weight[0], kept)
    with pytest.raises(ValueError, match="line 1: 3 numbers after 'film', but the embedding has width 4"):
        fill_from_glove(nn.Embedding(3, 4), path, words=["a", "b", "c"])
    with pytest.raises(ValueError, match="words must name each of the 3 rows, got 2"):
        fill_from_glove(embedding, path, words=["a", "b"])


def test_bad_input_is_refused() -> None:
    model = translator()
    x = torch.randint(1, 13, (2, 3))
    with pytest.raises(ValueError, match="row 1 has no words"):
        model(x, decoder_input_ids=x, attention_mask=torch.tensor([[1, 1, 1], [0, 0, 0]]))
    with pytest.raises(ValueError, match="padding must stand on the right"):
        model(x, decoder_input_ids=x, attention_mask=torch.tensor([[1, 1, 1], [0, 1, 1]]))
    with pytest.raises(ValueError, match=r"attention_mask must be \(batch, length\) = \(2, 3\), got \(2, 2\)"):
        model(x, decoder_input_ids=x, attention_mask=torch.ones(2, 2))
    with pytest.raises(ValueError, match="c_t \\+ d_t"):
        TranslatorConfig(vocab=5, literal=True, output="linear")
    with pytest.raises(ValueError, match="heads must be at least 1, got 0"):
        TranslatorConfig(vocab=5, heads=0)
