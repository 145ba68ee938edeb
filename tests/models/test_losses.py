from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from attnlab.models import CausalLM, MaskedLM, Translation, token_loss
from tests.models.small import make, some_tokens
from tests.tolerance import assert_close


def test_values_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]))
    labels = torch.tensor([0, 1, -100])
    plain = token_loss(logits, labels)
    assert_close(plain.total, torch.tensor(-math.log(0.5) - math.log(0.8)))
    assert plain.count == 2
    # t = (1 - eps) on the label plus eps / 3 on each of the three tokens, with eps = 0.3.
    smooth = token_loss(logits, labels, label_smoothing=0.3)
    first = -(0.8 * math.log(0.5) + 0.1 * math.log(0.25) + 0.1 * math.log(0.25))
    second = -(0.8 * math.log(0.8) + 2 * 0.1 * math.log(0.1))
    assert_close(smooth.total, torch.tensor(first + second))
    total, count = smooth
    assert (total, count) == (smooth.total, 2)


def test_causal_loss_predicts_the_next_token() -> None:
    model = make("decoder")
    tokens = some_tokens(2, 7)
    output = model(tokens)
    loss = CausalLM()(model, output, {"input_ids": tokens}, 0)
    expected = cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    assert_close(loss.total, expected)
    assert loss.count == 12


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_predicted(side: str) -> None:
    model = make("decoder")
    tokens = some_tokens(1, 5)
    pad = (3, 0) if side == "left" else (0, 3)
    padded = torch.nn.functional.pad(tokens, pad)
    mask = torch.nn.functional.pad(torch.ones_like(tokens), pad)
    alone, batch = {"input_ids": tokens}, {"input_ids": padded, "attention_mask": mask}
    a = CausalLM()(model, model(tokens), alone, 0)
    b = CausalLM()(model, model(padded, attention_mask=mask), batch, 0)
    assert_close(a.total, b.total)
    assert a.count == b.count == CausalLM().count(batch, 0) == 4


def test_masked_loss_scores_only_masked_positions() -> None:
    model = make("encoder", head="mlm")
    tokens = some_tokens(2, 7)
    labels = torch.full_like(tokens, -100)
    labels[0, 2], labels[1, 5] = 3, 11
    output = model(tokens)
    loss = MaskedLM()(model, output, {"labels": labels}, 0)
    expected = -output.logits[0, 2].log_softmax(-1)[3] - output.logits[1, 5].log_softmax(-1)[11]
    assert_close(loss.total, expected)
    assert loss.count == MaskedLM().count({"labels": labels}, 0) == 2
    nothing = MaskedLM()(model, output, {"labels": torch.full_like(tokens, -100)}, 0)
    assert (nothing.total, nothing.count) == (0, 0)


def test_translation_loss() -> None:
    model = make("encoder-decoder")
    source, target, labels = some_tokens(2, 5), some_tokens(2, 7), some_tokens(2, 7)
    labels[1, 4:] = -100
    output = model(source, decoder_input_ids=target)
    loss = Translation(label_smoothing=0.1)(model, output, {"labels": labels}, 0)
    assert loss.count == Translation().count({"labels": labels}, 0) == 11
    expected = cross_entropy(output.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1) * 11
    assert_close(loss.total, expected)


def adaptive() -> torch.nn.Module:
    return make("decoder", cutoffs=(5, 8), adaptive_factor=3)


def test_adaptive_embedding_by_hand() -> None:
    model = adaptive()
    bands, projections = model.tokens.bands, model.tokens.projections
    assert [tuple(b.weight.shape) for b in bands] == [(5, 12), (3, 4), (5, 1)]
    vectors = model.tokens(torch.tensor([[4, 5, 12]]))[0]
    assert_close(vectors[0], projections[0].weight @ bands[0].weight[4])
    assert_close(vectors[1], projections[1].weight @ bands[1].weight[0])
    assert_close(vectors[2], projections[2].weight @ bands[2].weight[4])


def test_adaptive_softmax_by_hand() -> None:
    model = adaptive()
    embedding, head = model.tokens, model.head
    h = torch.randn(12, dtype=torch.float64)
    first = torch.cat([embedding.bands[0].weight @ h, head.clusters.weight @ h]).softmax(0)
    second = (embedding.bands[1].weight @ (embedding.projections[1].weight.T @ h)).softmax(0)
    third = (embedding.bands[2].weight @ (embedding.projections[2].weight.T @ h)).softmax(0)
    p = torch.cat([first[:5], first[5] * second, first[6] * third])
    assert_close(p.sum(), torch.ones((), dtype=torch.float64))
    assert_close(head(h).exp(), p)


def test_adaptive_loss_equals_that_of_all_logits() -> None:
    model = adaptive()
    tokens = torch.cat([torch.arange(13)[None], some_tokens(2, 13)])
    labels = tokens.clone()
    labels[1, 4:7] = -100
    output = model(tokens)
    loss = CausalLM()(model, output, {"input_ids": tokens, "labels": labels}, 0)
    expected = token_loss(output.logits[:, :-1], labels[:, 1:])
    assert_close(loss.total, expected.total)
    assert loss.count == expected.count
    (a,) = torch.autograd.grad(loss.total, model.tokens.bands[2].weight, retain_graph=True)
    (b,) = torch.autograd.grad(expected.total, model.tokens.bands[2].weight)
    assert_close(a, b)


def test_adaptive_loss_of_one_band_reaches_every_parameter() -> None:
    """DDP waits for every gradient: a batch without rare tokens must give them too."""
    model = adaptive()
    tokens = torch.randint(0, 5, (2, 7))
    CausalLM()(model, model(tokens), {"input_ids": tokens}, 0).total.backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_a_model_without_head_has_no_loss() -> None:
    model = make("encoder", head="none")
    tokens = some_tokens(2, 5)
    with pytest.raises(ValueError, match="head='none'"):
        MaskedLM()(model, model(tokens), {"labels": tokens}, 0)
