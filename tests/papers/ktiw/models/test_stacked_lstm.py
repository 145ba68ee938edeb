"""Stacked models compute what each computes alone, forward, backward and over training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from papers.ktiw.models.lstm import Classifier, Translator
from papers.ktiw.models.lstm_config import ClassifierConfig, TranslatorConfig
from papers.ktiw.models.stacked_lstm import stack_classifiers, stack_translators
from papers.ktiw.seeds import SeedTraining, fresh_models, train_one, train_seeds
from papers.ktiw.synthetic import PermutationCopying

CONFIG = TranslatorConfig(vocab=8, width=5, layers=1, bidirectional=False)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heads": 3},
        {"heads": 3, "contexts": "mean"},
        {"literal": True},
        {"literal": True, "heads": 3},
        {"attention": "uniform"},
        {"heads": 2, "attention": "uniform"},
    ],
)
@pytest.mark.parametrize("invariant", [False, True])
def test_outputs_and_gradients_are_the_members(changes: dict[str, object], invariant: bool) -> None:
    models = [m.double() for m in fresh_models(replace(CONFIG, **changes), [0, 1, 2])]  # type: ignore[arg-type]
    stacked = stack_translators(models, invariant=invariant)
    x, y = torch.randint(0, 8, (3, 2, 7)), torch.randint(0, 8, (3, 2, 4))
    out = stacked(x, decoder_input_ids=y)
    alone = [model(x[i], decoder_input_ids=y[i]).logits for i, model in enumerate(models)]
    check_members(stacked, models, out, alone)


# Many words are embedded one by one; of few, each word's part of the gates is looked up in a table.
@pytest.mark.parametrize("vocab", [8, 101])
@pytest.mark.parametrize("output", ["network", "linear"])
def test_translators_of_several_layers_in_both_directions(vocab: int, output: Literal["network", "linear"]) -> None:
    config = TranslatorConfig(vocab=vocab, width=5, layers=2, output=output)
    models = [m.double() for a in ("softmax", "uniform") for m in fresh_models(replace(config, attention=a), [len(a)])]
    stacked = stack_translators(models)
    lengths = torch.tensor([[7, 3, 1], [2, 5, 6]])
    x, y = torch.randint(0, vocab, (2, 3, 7)), torch.randint(0, vocab, (2, 3, 4))
    out = stacked(x, decoder_input_ids=y, lengths=lengths)
    masks = (torch.arange(7) < lengths.unsqueeze(2)).long()
    alone = [m(x[i], decoder_input_ids=y[i], attention_mask=masks[i]).logits for i, m in enumerate(models)]
    check_members(stacked, models, out, alone)


@pytest.mark.parametrize("vocab", [8, 101])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_classifiers(vocab: int, bidirectional: bool) -> None:
    config = ClassifierConfig(vocab=vocab, embedding=3, width=5, attention_width=7, bidirectional=bidirectional)
    models = [Classifier(replace(config, attention=a)).double() for a in ("softmax", "uniform", "softmax")]
    stacked = stack_classifiers(models)
    lengths = torch.tensor([[7, 3], [2, 5], [1, 6]])
    x = torch.randint(0, vocab, (3, 2, 7))
    masks = (torch.arange(7) < lengths.unsqueeze(2)).long()
    alone = [model(x[i], attention_mask=masks[i]).logits for i, model in enumerate(models)]
    check_members(stacked, models, stacked(x, lengths=lengths), alone)


def test_dropout_is_between_the_layers_and_only_in_training() -> None:
    config = TranslatorConfig(vocab=11, width=5, layers=2, dropout=0.5)
    stacked = stack_translators(fresh_models(config, [0, 1]))
    tokens = torch.randint(0, 11, (2, 3, 7))
    first, second = (stacked(tokens, decoder_input_ids=tokens) for _ in range(2))
    assert not torch.equal(first, second)
    stacked.eval()
    first, second = (stacked(tokens, decoder_input_ids=tokens) for _ in range(2))
    assert torch.equal(first, second)


def check_members(stacked: Any, models: Sequence[nn.Module], out: Tensor, alone: Sequence[Tensor]) -> None:
    """The stacked output and its gradients are those of each model alone."""
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    for i, model in enumerate(models):
        torch.testing.assert_close(out[i], alone[i])
        (alone[i] * weight[i]).sum().backward()
        for name, p in model.named_parameters():
            grad = stacked.stacked(name).grad
            if p.grad is not None:
                assert grad is not None
                torch.testing.assert_close(grad[i], p.grad, msg=name)


@pytest.mark.parametrize(("dtype", "steps", "within"), [(torch.float32, 10, 1e-5), (torch.float64, 50, 1e-10)])
def test_each_seed_trains_as_it_would_alone(dtype: torch.dtype, steps: int, within: float) -> None:
    seeds = [3, 4, 5]
    tasks = [PermutationCopying(words=7, length=7, batch_size=5, seed=seed) for seed in seeds]
    how = SeedTraining(steps=steps, lr=1e-2)
    together = train_seeds([m.to(dtype) for m in fresh_models(CONFIG, seeds)], tasks, how=how, device=CPU)
    assert together.accuracy.shape == (steps // 10 + 1, 3)
    for i, (model, task) in enumerate(zip(fresh_models(CONFIG, seeds), tasks, strict=True)):
        alone = train_one(model.to(dtype), task, how=how, device=CPU)
        assert abs(together.losses[:, i] - alone.losses[:, 0]).max() < within
        for name, value in together.model.state_of(i).items():
            torch.testing.assert_close(value, model.get_parameter(name).detach(), atol=within, rtol=0)


@pytest.mark.gpu
def test_a_seed_does_not_depend_on_the_others() -> None:
    seeds = list(range(20))
    tasks = [PermutationCopying(words=40, length=40, seed=seed) for seed in seeds]
    config, cuda = replace(CONFIG, vocab=41, width=256), torch.device("cuda")
    how = SeedTraining(steps=10, invariant=True)
    together = train_seeds(fresh_models(config, seeds), tasks, how=how, device=cuda)
    for i in (0, 3, 19):
        alone = train_seeds(fresh_models(config, [i]), tasks[i : i + 1], how=how, device=cuda)
        assert abs(together.losses[:, i] - alone.losses[:, 0]).max() <= 1e-5


def test_a_seed_determines_the_model() -> None:
    [first], [again] = (fresh_models(CONFIG, [7]) for _ in range(2))
    [other] = fresh_models(CONFIG, [8])
    assert torch.equal(first.output.weight, again.output.weight)
    assert not torch.equal(first.output.weight, other.output.weight)


def test_training_stops_when_all_have_learned() -> None:
    how = SeedTraining(steps=30, evaluate_every=5, enough=-1.0)
    curves = train_seeds(fresh_models(CONFIG, [0]), [PermutationCopying(words=7, length=3)], how=how, device=CPU)
    assert curves.steps == [0, 5, 10]


def test_what_cannot_be_stacked_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to stack"):
        stack_translators([])
    with pytest.raises(ValueError, match="share one config"):
        stack_translators([Translator(CONFIG), Translator(replace(CONFIG, width=6))])
    with pytest.raises(ValueError, match="softmax or uniform, got 'top-r:r=2'"):
        stack_translators([Translator(replace(CONFIG, attention="top-r:r=2"))])
