"""Figure 7 of KTIW: under uniform attention, where does the knowledge about a keyword lie (6.1)?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from attnlab.devices import best_device
from attnlab.training import Recipe
from attnlab.training.feed import to_device
from attnlab.training.side_by_side import Clock, Learner, train_learners
from papers.common.row_store import Part
from papers.ktiw.config import LocalConfig
from papers.ktiw.models.lstm import Classifier
from papers.ktiw.models.lstm_config import ClassifierConfig
from papers.ktiw.synthetic import KeywordDetection

__all__ = ["log_odds", "run_figure_7"]


def run_figure_7(config: LocalConfig, rows: Part) -> None:
    """Rows of ``figure_7``: the four log-odds at a step, mean over positive sequences, for each direction and seed."""
    for bidirectional in (True, False):
        for seed in range(config.seeds):
            _train_and_measure(config, rows, bidirectional=bidirectional, seed=seed)


def _train_and_measure(config: LocalConfig, rows: Part, *, bidirectional: bool, seed: int) -> None:
    device = best_device()
    task = KeywordDetection(batch_size=config.batch, seed=seed)
    test = to_device(replace(task, split="test", batch_size=config.count).batch(0), device)
    torch.manual_seed(seed)
    size: dict[str, Any] = {"embedding": config.embedding, "width": config.width, "bidirectional": bidirectional}
    model = Classifier(ClassifierConfig(vocab=task.vocab_size, attention="uniform", **size)).to(device)
    name = "both ways" if bidirectional else "left to right"
    early, late = config.evaluate_early, config.evaluate_every

    def measure(step: int) -> None:
        rows.row("figure_7", encoder=name, seed=seed, step=step, **log_odds(model, test))

    recipe = Recipe(kind="adam", lr=config.lr, weight_decay=0.0, clip=None)
    learner = _KeywordLearner(model, None, recipe, half=False, capture=False)
    evaluate_at = {step for step in range(config.steps + 1) if step % (early if step < late else late) == 0}
    train_learners([(learner, task)], Clock(config.steps), pauses=evaluate_at, on_pause=measure)


class _KeywordLearner(Learner):
    """-log sigmoid of the right sign. Batches hold the keyword's position too, which is not an input of the model."""

    def objective(self, batch: dict[str, Tensor]) -> Tensor:
        sign = 2 * batch["labels"] - 1
        return softplus(-sign * self.model(batch["input_ids"]).logits).mean()


@torch.no_grad()
def log_odds(model: Classifier, batch: dict[str, Tensor]) -> dict[str, Any]:
    """gamma at the keyword, after it, on average and at the last position (6.1), and the accuracy in per cent."""
    out = model(batch["input_ids"])
    gamma = model.output(out.source.hidden).squeeze(2)
    length = gamma.shape[1]
    # A keyword at the last position has nothing after it.
    chosen = (batch["position"] >= 0) & (batch["position"] < length - 1)
    gamma, at = gamma[chosen], batch["position"][chosen].unsqueeze(1)
    by_place = {
        "keyword": gamma.gather(1, at),
        "after": gamma.gather(1, at + 1),
        "mean": gamma.mean(1),
        "last": gamma[:, -1],
    }
    accuracy = 100 * float(((out.logits > 0) == (batch["labels"] == 1)).float().mean())
    return {name: round(float(values.mean()), 4) for name, values in by_place.items()} | {
        "accuracy": round(accuracy, 2)
    }
