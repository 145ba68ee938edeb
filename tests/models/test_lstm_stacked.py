"""Stacked translators compute what each computes alone, forward, backward and over training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnlab.data import PermutationCopying
from attnlab.experiments.ktiw.seeds import SeedTraining, fresh_models, train_one, train_seeds
from attnlab.models.lstm import Translator
from attnlab.models.lstm_config import TranslatorConfig
from attnlab.models.lstm_stacked import stack_translators

CONFIG = TranslatorConfig(vocab=8, width=5, layers=1, bidirectional=False)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heads": 3},
        {"heads": 3, "contexts": "mean"},
        {"attention": "uniform"},
        {"heads": 2, "attention": "uniform"},
    ],
)
def test_outputs_and_gradients_are_the_members(changes: dict[str, object]) -> None:
    models = [m.double() for m in fresh_models(replace(CONFIG, **changes), [0, 1, 2])]  # type: ignore[arg-type]
    stacked = stack_translators(models)
    x, y = torch.randint(0, 8, (3, 2, 7)), torch.randint(0, 8, (3, 2, 4))
    out = stacked(x, decoder_input_ids=y)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    for i, model in enumerate(models):
        alone = model(x[i], decoder_input_ids=y[i]).logits
        torch.testing.assert_close(out[i], alone)
        (alone * weight[i]).sum().backward()
        for name, p in model.named_parameters():
            grad = stacked.get_parameter(name.replace(".", "_")).grad
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


def test_a_seed_is_a_seed() -> None:
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
    with pytest.raises(ValueError, match="only one layer in one direction"):
        stack_translators([Translator(replace(CONFIG, bidirectional=True))])
    with pytest.raises(ValueError, match="softmax or uniform, got 'top-r:r=2'"):
        stack_translators([Translator(replace(CONFIG, attention="top-r:r=2"))])
