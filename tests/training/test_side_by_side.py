"""Models trained side by side are what each would be alone, and what the engine would make of them."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attnlab.training import CrossEntropy, Recipe, Schedule
from attnlab.training.side_by_side import Clock, Learner, PinnedBatches, UpdateLog, fit, train_learners
from tests.tolerance import assert_close
from tests.training.jobs import Model, Tokens, assert_same_parameters, job

RECIPE = Recipe(lr=0.03, clip=0.5)


@pytest.fixture
def how() -> dict[str, Any]:
    return {"term": CrossEntropy(), "recipe": RECIPE, "schedule": Schedule("linear", warmup=3)}


def plain(seed: int = 0) -> Model:
    """Without dropout, whose draws depend on the order of the models."""
    return Model(seed=seed, dropout=0.0)


class Counted(Learner):
    """Notes the steps of its updates."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.updates: list[tuple[int, int]] = []

    def advance(self, batch: Mapping[str, Tensor], *, step: int, steps: int) -> None:
        self.updates.append((step, steps))
        super().advance(batch, step=step, steps=steps)


def test_side_by_side_is_one_by_one(how: dict[str, Any]) -> None:
    models = {"a": plain(1), "b": plain(2)}
    pauses: list[int] = []
    together = fit(models, Tokens(), on_pause=pauses.append, steps=6, every=4, **how)
    assert together.steps == 6
    assert pauses == together.logged_at == [4, 6]
    for name, seed in (("a", 1), ("b", 2)):
        alone = plain(seed)
        assert fit({name: alone}, Tokens(), steps=6, every=4, **how).losses[name] == together.losses[name]
        assert_same_parameters(alone.state_dict(), models[name].state_dict())
    assert not models["a"].training


def test_the_updates_are_those_of_the_engine(how: dict[str, Any], tmp_path) -> None:
    options: dict[str, Any] = {"terms": [CrossEntropy()], "evaluate_at": (), "watch": None, "checkpoint_every": None}
    trained, outcome = job(tmp_path / "run", dropout=0.0, **options)
    model = plain()
    fit({"a": model}, Tokens(), steps=outcome.step, **how)
    for name, t in trained.state_dict().items():
        assert_close(model.state_dict()[name], t, what=name)


def test_models_may_learn_from_sources_of_their_own(how: dict[str, Any]) -> None:
    sources = {"a": Tokens(), "b": Tokens(seed=1)}
    together = fit({"a": plain(), "b": plain()}, sources, steps=3, every=1, **how)
    assert together.losses["a"] != together.losses["b"]
    for name, source in sources.items():
        assert fit({name: plain()}, source, steps=3, every=1, **how).losses[name] == together.losses[name]


@pytest.mark.parametrize("steps", [None, 10**6])
def test_time_ends_a_training_and_its_schedule(
    how: dict[str, Any], steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    # On this clock every update takes 10 ms, however busy the machine is.
    clock = types.SimpleNamespace(monotonic=lambda: 0.01 * len(rates))
    monkeypatch.setattr("attnlab.training.side_by_side.time", clock)

    class Recorded(Schedule):
        def factor(self, t: int, *, steps: int) -> float:
            rates.append(super().factor(t, steps=steps))
            return rates[-1]

    how["schedule"] = Recorded("linear", warmup=2)
    fitted = fit({"a": plain()}, Tokens(), **how, steps=steps, seconds=1.0, every=5)
    assert fitted.steps == len(rates) == 100
    assert fitted.seconds == pytest.approx(1.0)
    # The schedule ends where the time is over.
    assert rates[-1] < 0.05


def test_a_training_without_a_limit_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="steps, seconds or both"):
        fit({"a": plain()}, Tokens(), **how)


def test_pauses_come_before_their_update_and_the_models_go_on_in_training_mode() -> None:
    learner = Counted(plain(), CrossEntropy(), RECIPE)
    seen: list[tuple[int, int]] = []

    def evaluate(step: int) -> None:
        learner.model.eval()
        seen.append((step, len(learner.updates)))

    assert train_learners([(learner, Tokens())], Clock(5), pauses={0, 3}, on_pause=evaluate) == 5
    assert seen == [(0, 0), (3, 3)]
    assert learner.updates == [(step, 5) for step in range(5)]
    seen.clear()
    learner.model.train()
    train_learners([(learner, Tokens())], Clock(2), pauses={1}, pause_at_end=True, on_pause=evaluate)
    assert [step for step, _ in seen] == [1, 2]


def test_a_pause_may_end_the_training() -> None:
    learner = Counted(plain(), CrossEntropy(), RECIPE)
    updates = train_learners([(learner, Tokens())], Clock(9), pauses=range(9), on_pause=lambda step: step == 4)
    assert updates == len(learner.updates) == 4


def test_a_limit_of_time_that_is_over_leaves_one_pause() -> None:
    learner = Counted(plain(), CrossEntropy(), RECIPE)
    steps: list[int] = []
    assert train_learners([(learner, Tokens())], Clock(9, -1.0), pause_at_end=True, on_pause=steps.append) == 0
    assert steps == [0]


def test_the_recipe_names_the_optimiser() -> None:
    """Adam and Nesterov's SGD add the decay to the gradient, AdamW to the update."""
    batch = Tokens().batch(0)
    nesterov = partial(torch.optim.SGD, momentum=0.9, nesterov=True)
    for kind, optimizer in (("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("nesterov", nesterov)):
        learner = Learner(plain(), CrossEntropy(), Recipe(kind=kind, weight_decay=0.5, clip=None))
        learner.update(batch, 0.01)
        model = plain()
        decay = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.5}
        rest = {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}
        reference = optimizer([decay, rest], lr=0.01)
        loss = CrossEntropy()(model, model(batch["input_ids"]), batch, 0)
        (loss.total / loss.count).backward()
        reference.step()
        for name, t in model.state_dict().items():
            assert_close(learner.model.state_dict()[name], t, what=name)


def test_a_log_holds_the_rows_that_were_written() -> None:
    log = UpdateLog(4, 2, device=torch.device("cpu"))
    assert log.read().T.tolist() == [[], []]
    for row in ([1.0, 2.0], [3.0, 4.0]):
        log.add(torch.tensor(row, dtype=torch.float64))
    assert log.read().tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_batches_are_pinned_only_for_streams() -> None:
    batches = PinnedBatches([Learner(plain(), CrossEntropy(), RECIPE)])
    batch = Tokens().batch(0)
    assert batches.pin(batch) is batch
    batches.keep([batch])
    assert not batches.in_flight


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adamw", "nesterov"])
def test_captured_updates_are_those_that_are_not_captured(kind: str) -> None:
    trained = []
    for capture in (True, False):
        learner = Learner(plain().cuda(), CrossEntropy(), replace(RECIPE, kind=kind), half=False, capture=capture)
        for step in range(9):
            # Two shapes, so two graphs.
            learner.update(Tokens(rows=12 - step % 2).batch(step), 0.01)
        torch.cuda.synchronize()
        assert len(learner.graphs) == (2 if capture else 0)
        trained.append(learner.model.state_dict())
    for name, t in trained[0].items():
        assert_close(t, trained[1][name], what=name)
