"""Models with and without guidance side by side on the same batches; on a GPU each update is one captured graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.data import Source
from attnlab.guidance import GuidanceTerm
from attnlab.training import Recipe, Schedule, Term
from attnlab.training.side_by_side import Feed, Learner

__all__ = ["Curve", "GuidedLearner", "train_together"]


@dataclass(frozen=True)
class Curve:
    """The task's loss and L_AG at every update."""

    task: list[float]
    guidance: list[float]


class GuidedLearner(Learner):
    """A model with its own learning rate, and terms of guidance, whose weight is given with each update."""

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
        super().__init__(model, terms[0], recipe, stream=stream, pool=pool)
        self.terms, self.guidance, self.schedule, self.steps = terms, guidance, schedule, steps
        self.alpha = torch.zeros((), device=self.device)
        self.curve = torch.zeros(steps, 2, device=self.device)
        self.at = torch.zeros(1, dtype=torch.long, device=self.device)

    def advance(self, batch: Mapping[str, Tensor], step: int) -> None:
        """Update number ``step``, counted from 0."""
        alpha = self.guidance[0].weight(step) if self.guidance else 0.0
        if self.cuda:
            with torch.cuda.stream(self.stream):
                self.alpha.fill_(alpha)
        else:
            self.alpha.fill_(alpha)
        self.update(batch, self.recipe.lr * self.schedule.factor(step + 1, steps=self.steps))

    def curves(self) -> Curve:
        """What was noted so far."""
        done = int(self.at)
        task, guidance = self.curve[:done].T.tolist() if done else ([], [])
        return Curve(task, guidance)

    def _loss(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        task, pull = self._sum(self.terms, output, batch), self._sum(self.guidance, output, batch)
        self.curve.index_copy_(0, self.at, torch.stack([task, pull]).detach()[None].float())
        self.at += 1
        return task + self.alpha * pull

    def _sum(self, terms: Sequence[Any], output: Any, batch: dict[str, Tensor]) -> Tensor:
        start = torch.zeros((), device=self.device)
        return sum((self.mean(term, output, batch) for term in terms), start)


def train_together(
    fed: Sequence[tuple[Source, Collection[GuidedLearner]]],
    *,
    steps: int,
    seconds: float | None = None,
    look_at: Sequence[int] = (),
    look: Callable[[int], None] | None = None,
) -> tuple[int, float]:
    """(updates made, seconds) of learners, each fed by its source; ``look(step)`` at these steps, the device idle."""
    learners = [learner for _, some in fed for learner in some]
    began, feed = time.monotonic(), Feed(learners)
    cuda = learners[0].cuda
    wanted, step = set(look_at), 0
    for step in range(steps + 1):
        if step in wanted and look is not None:
            if cuda:
                torch.cuda.synchronize()
            look(step)
            for learner in learners:
                learner.model.train()
        late = seconds is not None and time.monotonic() - began > seconds
        if step == steps or late:
            break
        for source, some in fed:
            batch = feed.pinned(source.batch(step))
            for learner in some:
                learner.advance(batch, step)
            feed.sent(batch)
    if cuda:
        torch.cuda.synchronize()
    for learner in learners:
        learner.model.eval()
        learner.graphs.clear()
    return step, time.monotonic() - began
