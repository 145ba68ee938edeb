"""Training the toy translators: many seeds as one stacked model, or one by one, with the same numbers early on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from papers.ktiw.graphs import captured_update
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
    """Token accuracy (evaluations, members) at ``steps``, losses of each update (steps, members), and the seconds."""

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
    return _run(stacked, tasks, how, device, graph=how.graph and device.type == "cuda")


def train_one(model: Translator, task: Any, *, how: SeedTraining, device: torch.device) -> Curves:
    """Train one model alone: the sequential twin of ``train_seeds``."""
    return _run(_Alone(model).to(device), [task], how, device, graph=False)


class _Alone(torch.nn.Module):
    """One translator behind the stacked model's shapes."""

    def __init__(self, model: Translator) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, *, decoder_input_ids: Tensor) -> Tensor:
        return self.model(input_ids[0], decoder_input_ids=decoder_input_ids[0]).logits.unsqueeze(0)


def _run(
    model: StackedTranslator | _Alone, tasks: Sequence[Any], how: SeedTraining, device: torch.device, *, graph: bool
) -> Curves:
    cuda = device.type == "cuda"
    adam = torch.optim.Adam(model.parameters(), lr=how.lr, fused=cuda or None, capturable=graph)
    tests = [replace(task, split="test") for task in tasks]
    held: dict[str, Tensor] = {k: t.to(device) for k, t in _batch(tasks, 0).items()}

    def update() -> Tensor:
        adam.zero_grad(set_to_none=True)
        losses = _losses(model, held)
        losses.sum().backward()
        adam.step()
        return losses.detach()

    def evaluate() -> Tensor:
        with torch.no_grad():
            logits = model(held["input_ids"], decoder_input_ids=held["decoder_input_ids"])
            return (logits.argmax(-1) == held["labels"]).float().mean((1, 2))

    do_update, do_evaluate = (
        (captured_update(model, adam, update), captured_update(model, adam, evaluate)) if graph else (update, evaluate)
    )
    steps, accuracy, losses = [], [], []
    started = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        ahead: dict[tuple[bool, int], Future[dict[str, Tensor]]] = {}

        def fetch(test: bool, step: int) -> None:
            for later in range(step, step + AHEAD):
                if (False, later) not in ahead and later < how.steps:
                    ahead[False, later] = pool.submit(_batch, tasks, later)
            if test:
                ahead.setdefault((True, step), pool.submit(_batch, tests, step))
            made = ahead.pop((test, step)).result()
            for name, t in made.items():
                held[name].copy_(t, non_blocking=True)

        for step in range(how.steps + 1):
            if step % how.evaluate_every == 0:
                fetch(True, step)
                steps.append(step)
                accuracy.append(do_evaluate().clone())
                if (
                    how.enough is not None
                    and len(accuracy) > 2
                    and bool(torch.stack(accuracy[-3:]).amin() > how.enough)
                ):
                    break
            if step < how.steps:
                fetch(False, step)
                losses.append(do_update().clone())
    found = torch.stack(accuracy).cpu().numpy()
    lost = torch.stack(losses).cpu().numpy() if losses else np.zeros((0, len(tasks)))
    return Curves(steps, found, lost, time.perf_counter() - started, model)


def _losses(model: StackedTranslator | _Alone, held: dict[str, Tensor]) -> Tensor:
    """The mean loss of each member; members do not share parameters, so their sum trains each by its own."""
    logits = model(held["input_ids"], decoder_input_ids=held["decoder_input_ids"])
    nll = cross_entropy(logits.flatten(0, -2), held["labels"].flatten(), reduction="none")
    return nll.unflatten(0, held["labels"].shape).mean((1, 2))


def _batch(tasks: Sequence[Any], step: int) -> dict[str, Tensor]:
    made = [task.batch(step) for task in tasks]
    return {name: torch.stack([batch[name] for batch in made]) for name in KEYS}
