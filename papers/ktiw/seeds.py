"""Training the toy translators: many seeds as one stacked model, or one by one; both start with the same numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attnlab.measure import captured
from attnlab.training import Recipe
from attnlab.training.feed import to_device
from attnlab.training.side_by_side import Clock, Learner, UpdateLog, lanes, train_learners
from papers.ktiw.models.lstm import Translator
from papers.ktiw.models.lstm_config import TranslatorConfig
from papers.ktiw.models.stacked_lstm import StackedTranslator, stack_translators

__all__ = ["Curves", "SeedTraining", "fresh_models", "train_one", "train_seeds"]

KEYS = ("input_ids", "decoder_input_ids", "labels")
# Steps of batches made at once, by threads, ahead of the training.
AHEAD = 10


@dataclass(frozen=True)
class SeedTraining:
    """How the toy tasks are trained (A.8): Adam 1e-3; accuracy on a fresh test batch every ten steps."""

    steps: int = 200
    lr: float = 1e-3
    evaluate_every: int = 10
    # Stop when every member has been above this for three evaluations; None trains all steps.
    enough: float | None = None
    # Replay the update as a CUDA graph; without effect on a CPU.
    graph: bool = True
    # A seed's numbers do not depend, to the last bit, on how many others are trained with it.
    invariant: bool = False


@dataclass(frozen=True, eq=False)
class Curves:
    """Token accuracy (evaluations, members) at ``steps``, losses of each update (steps, members), and the seconds.

    The seconds include the capture of a GPU's graph.
    """

    steps: list[int]
    accuracy: np.ndarray
    losses: np.ndarray
    seconds: float
    model: Any = None


def fresh_models(config: TranslatorConfig, seeds: Sequence[int]) -> list[Translator]:
    """A translator for each seed; the caller's random state is left as it is."""
    models = []
    for seed in seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            models.append(Translator(config))
    return models


def train_seeds(
    models: Sequence[Translator], tasks: Sequence[Any], *, how: SeedTraining, device: torch.device
) -> Curves:
    """Train the models at once, each on its own task (``batch(step)``, and ``split`` for the test)."""
    stacked = stack_translators(models, invariant=how.invariant).to(device)
    return _run(stacked, tasks, how, device, capture=how.graph and device.type == "cuda")


def train_one(model: Translator, task: Any, *, how: SeedTraining, device: torch.device) -> Curves:
    """Train one model alone: the sequential twin of ``train_seeds``."""
    return _run(_Alone(model).to(device), [task], how, device, capture=False)


class _Alone(nn.Module):
    """One translator behind the stacked model's shapes."""

    def __init__(self, model: Translator) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, *, decoder_input_ids: Tensor) -> Tensor:
        return self.model(input_ids[0], decoder_input_ids=decoder_input_ids[0]).logits.unsqueeze(0)


def _run(
    model: StackedTranslator | _Alone, tasks: Sequence[Any], how: SeedTraining, device: torch.device, *, capture: bool
) -> Curves:
    [(stream, pool)] = lanes(1) if device.type == "cuda" else [(None, None)]
    learner = _SeedLearner(model, how, members=len(tasks), stream=stream, pool=pool, capture=capture)
    accuracy_at = _TestAccuracy(model, [replace(task, split="test") for task in tasks], device, capture=capture)
    steps: list[int] = []
    accuracy: list[Tensor] = []

    def evaluate(step: int) -> bool:
        steps.append(step)
        accuracy.append(accuracy_at(step))
        learned = how.enough is not None and len(accuracy) > 2 and torch.stack(accuracy[-3:]).amin() > how.enough
        return bool(learned)

    started = time.perf_counter()
    with ThreadPoolExecutor(4) as threads:
        source = _StackedTasks(tasks, how.steps, threads)
        evaluate_at = range(0, how.steps + 1, how.evaluate_every)
        train_learners([(learner, source)], Clock(how.steps), pauses=evaluate_at, on_pause=evaluate)
    seconds = time.perf_counter() - started
    return Curves(steps, torch.stack(accuracy).cpu().numpy(), learner.log.read().cpu().numpy(), seconds, model)


class _SeedLearner(Learner):
    """The mean loss of each member. Members share no parameters, so the sum of the losses trains each by its own."""

    def __init__(
        self, model: nn.Module, how: SeedTraining, *, members: int, stream: Any, pool: Any, capture: bool
    ) -> None:
        recipe = Recipe(kind="adam", lr=how.lr, weight_decay=0.0, clip=None)
        super().__init__(model, None, recipe, stream=stream, pool=pool, half=False, capture=capture)
        self.loss = torch.zeros(members, device=self.device)
        dtype = next(model.parameters()).dtype
        self.log = UpdateLog(how.steps, members, device=self.device, dtype=dtype)

    def output_loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        nll = cross_entropy(output.flatten(0, -2), labels.flatten(), reduction="none")
        losses = nll.unflatten(0, labels.shape).mean((1, 2))
        self.log.add(losses)
        return losses


class _StackedTasks:
    """The tasks' batches, stacked; threads make the batches of the next steps while the model is trained."""

    def __init__(self, tasks: Sequence[Any], steps: int, threads: ThreadPoolExecutor) -> None:
        self.tasks, self.steps, self.threads = tasks, steps, threads
        self.ahead: dict[int, Future[dict[str, Tensor]]] = {}

    def batch(self, step: int) -> dict[str, Tensor]:
        for later in range(step, min(step + AHEAD, self.steps)):
            if later not in self.ahead:
                self.ahead[later] = self.threads.submit(_batch, self.tasks, later)
        return self.ahead.pop(step).result()


class _TestAccuracy:
    """The token accuracy of each member on the test batch of a step; measured by a CUDA graph if ``capture``."""

    def __init__(self, model: nn.Module, tests: Sequence[Any], device: torch.device, *, capture: bool) -> None:
        self.model, self.tests = model, tests
        self.inputs = to_device(_batch(tests, 0), device)
        self.measure = captured(self._measure) if capture else self._measure

    def __call__(self, step: int) -> Tensor:
        for name, t in _batch(self.tests, step).items():
            self.inputs[name].copy_(t)
        return self.measure().clone()

    @torch.no_grad()
    def _measure(self) -> Tensor:
        logits = self.model(self.inputs["input_ids"], decoder_input_ids=self.inputs["decoder_input_ids"])
        return (logits.argmax(-1) == self.inputs["labels"]).float().mean((1, 2))


def _batch(tasks: Sequence[Any], step: int) -> dict[str, Tensor]:
    batches = [task.batch(step) for task in tasks]
    return {name: torch.stack([batch[name] for batch in batches]) for name in KEYS}
