import math

import pytest
import torch
from torch import nn

from attnlab.training import Recipe, Schedule, Settings, every, log_spaced
from attnlab.training.settings import make_optimizer, parameter_groups


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule("constant", warmup=2), [0.5, 1, 1, 1, 1, 1]),
        (Schedule("linear", warmup=2), [0.5, 1, 1, 0.75, 0.5, 0.25]),
        (Schedule("linear", warmup=2, final=0.2), [0.5, 1, 1, 0.8, 0.6, 0.4]),
        (Schedule("cosine", warmup=2), [0.5, 1, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        (Schedule("inverse_sqrt", warmup=4), [0.25, 0.5, 0.75, 1, math.sqrt(4 / 5), math.sqrt(4 / 6)]),
    ],
)
def test_schedules_by_hand(schedule, expected):
    assert [schedule.factor(t, steps=6) for t in range(1, 7)] == pytest.approx(expected)


def test_no_update_of_a_decaying_schedule_is_wasted_at_zero():
    assert all(Schedule("linear", warmup=3).factor(t, steps=7) > 0 for t in range(1, 8))


def test_step_lists():
    assert every(5, steps=5) == (0, 5)
    assert log_spaced(1, steps=7) == (0, 1, 7)
    assert log_spaced(7, steps=1_000_000) == (0, 1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
    assert Settings(steps=100, evaluate_at=(100, 0, 10, 50, 10)).evaluate_at == (0, 10, 50, 100)


def test_only_matrices_decay():
    model = nn.Sequential(nn.Embedding(3, 5), nn.Linear(5, 7), nn.LayerNorm(7))
    model[1].weight.requires_grad_(True)
    matrices, vectors = parameter_groups(model, Recipe(weight_decay=0.3))
    assert [tuple(p.shape) for p in matrices["params"]] == [(3, 5), (7, 5)]
    assert [tuple(p.shape) for p in vectors["params"]] == [(7,), (7,), (7,)]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    matrices, vectors = parameter_groups(model, Recipe(no_decay=("0.weight",)))
    assert [tuple(p.shape) for p in matrices["params"]] == [(7, 5)]


def test_the_recipe_reaches_the_optimiser():
    recipe = Recipe(kind="adam", lr=0.25, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.125)
    optimizer = make_optimizer(parameter_groups(nn.Linear(2, 3), recipe), recipe)
    assert type(optimizer) is torch.optim.Adam
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.25, (0.5, 0.75), 1e-3, 0.125)


def test_nesterov_looks_ahead():
    """One weight with gradient 1 at lr 1 and momentum 1/2: buf = 1, 3/2, 7/4 and the steps are 1 + buf / 2."""
    weight = nn.Parameter(torch.zeros(1, 1))
    recipe = Recipe(kind="nesterov", lr=1.0, betas=(0.5, 0.0), weight_decay=0.0)
    optimizer = make_optimizer([{"params": [weight]}], recipe)
    at = []
    for _ in range(3):
        weight.grad = torch.ones(1, 1)
        optimizer.step()
        at.append(-weight.item())
    assert at == [1.5, 1.5 + 1.75, 1.5 + 1.75 + 1.875]
    with pytest.raises(ValueError, match=r"momentum, betas\[0\], must lie between 0 and 1, got 0.0"):
        Recipe(kind="nesterov", betas=(0.0, 0.9))


def test_frozen_models_are_refused():
    with pytest.raises(ValueError, match="nothing can be trained"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), Recipe())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"steps": 0}, "steps must be positive, got 0"),
        ({"steps": 5, "accumulate": 0}, "accumulate must be positive"),
        ({"steps": 5, "evaluate_at": (6,)}, r"evaluate_at must lie in 0\.\.5"),
        ({"steps": 5, "precision": "fp8"}, "precision must be one of auto, bf16, no, got 'fp8'"),
        ({"steps": 5, "patience": 2}, "patience needs watch"),
    ],
)
def test_bad_settings_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        Settings(**bad)


def test_bad_recipes_and_schedules_are_refused():
    with pytest.raises(ValueError, match="kind must be one of adamw, adam, nesterov, got 'sgd'"):
        Recipe(kind="sgd")
    with pytest.raises(ValueError, match="clip must be positive"):
        Recipe(clip=0)
    with pytest.raises(ValueError, match="kind must be one of linear"):
        Schedule("exponential")
    with pytest.raises(ValueError, match="warmup must be at least 0"):
        Schedule(warmup=-1)
