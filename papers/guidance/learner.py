"""Models with and without guidance side by side on the same batches; on a GPU each update is one captured graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.guidance import GuidanceTerm
from attnlab.training import Recipe, Schedule, Source, Term
from attnlab.training.side_by_side import Clock, Learner, UpdateLog, train_learners

__all__ = ["Curve", "GuidedLearner", "train_guided"]


@dataclass(frozen=True)
class Curve:
    """The task's loss and L_AG at every update."""

    task: list[float]
    guidance: list[float]


class GuidedLearner(Learner):
    """A model with its own learning rate, and terms of guidance, whose weight changes with each update."""

    def __init__(
        self,
        model: nn.Module,
        terms: Sequence[Term],
        *,
        guidance: Sequence[GuidanceTerm] = (),
        recipe: Recipe,
        schedule: Schedule,
        steps: int,
        stream: Any = None,
        pool: Any = None,
    ) -> None:
        super().__init__(model, None, recipe, schedule=schedule, stream=stream, pool=pool)
        self.terms, self.guidance, self.steps = terms, guidance, steps
        # Read by captured updates.
        self.alpha = torch.zeros((), device=self.device)
        self.log = UpdateLog(steps, 2, device=self.device)

    def advance(self, batch: Mapping[str, Tensor], *, step: int, steps: int) -> None:
        """Update number ``step``, counted from 0; the schedule ends at this learner's own number of steps."""
        alpha = self.guidance[0].weight(step) if self.guidance else 0.0
        with torch.cuda.stream(self.stream) if self.cuda else nullcontext():
            self.alpha.fill_(alpha)
        super().advance(batch, step=step, steps=self.steps)

    def curves(self) -> Curve:
        """The losses of the updates so far."""
        task, guidance = self.log.read().T.tolist()
        return Curve(task, guidance)

    def output_loss(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        task, pull = self._sum(self.terms, output, batch), self._sum(self.guidance, output, batch)
        self.log.add(torch.stack([task, pull]))
        return task + self.alpha * pull

    def _sum(self, terms: Sequence[Any], output: Any, batch: dict[str, Tensor]) -> Tensor:
        start = torch.zeros((), device=self.device)
        return sum((self.mean(term, output, batch) for term in terms), start)


def train_guided(
    by_source: Sequence[tuple[Source, Collection[GuidedLearner]]],
    *,
    steps: int,
    seconds: float | None = None,
    evaluate_at: Sequence[int] = (),
    evaluate: Callable[[int], None] | None = None,
) -> tuple[int, float]:
    """Train learners, each on its source's batches, with ``evaluate(step)`` at these steps; (updates, seconds)."""
    clock = Clock(steps, seconds)
    pairs = [(learner, source) for source, learners in by_source for learner in learners]
    updates = train_learners(pairs, clock, pauses=frozenset(evaluate_at), on_pause=evaluate)
    return updates, clock.elapsed()
