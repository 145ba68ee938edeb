"""Figures 3 and 6 and section 6.2 of KTIW: toy copying tasks on which attention is, or is not, learned.

All seeds of a setting train as one stacked model. A seed has learned when its test accuracy ends above ``LEARNED``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from attnlab.devices import best_device
from papers.common.row_store import Part
from papers.ktiw.config import PermutationsConfig
from papers.ktiw.models.lstm import Translator
from papers.ktiw.seeds import Curves, SeedTraining, fresh_models, train_seeds
from papers.ktiw.synthetic import FixedPermutation, MixtureOfPermutations, PermutationCopying

__all__ = [
    "LEARNED",
    "figure_3_tasks",
    "final_accuracy",
    "judge_heads",
    "run_figure_3",
    "run_figure_6",
    "run_section_6_2",
    "seed_training",
    "with_heads",
]

LEARNED = 0.95
FAILED = 0.6


def figure_3_tasks(config: PermutationsConfig) -> dict[tuple[str, str], Any]:
    """Each panel's hard distribution, and a control in which the words of an example vary."""
    n = config.length
    shape: dict[str, Any] = {"length": n, "batch_size": config.batch}
    return {
        ("permutations", "hard"): PermutationCopying(words=n, **shape),
        ("permutations", "control"): PermutationCopying(words=3 * n // 2, **shape),
        ("mixture", "hard"): MixtureOfPermutations(**shape),
        ("mixture", "control"): PermutationCopying(words=2 * n, **shape),
    }


def run_figure_3(config: PermutationsConfig, part: Part) -> None:
    """Rows of ``figure_3`` (a seed each) and ``figure_3_curves`` (a step each, all seeds)."""
    for (panel, data), task in figure_3_tasks(config).items():
        curves = _train(config, task, steps=config.steps)
        _rows(part, "figure_3", curves, panel=panel, data=data)


def run_section_6_2(config: PermutationsConfig, part: Part) -> None:
    """Copying and permuting by one fixed permutation, on the same inputs (Eq. 25)."""
    shape: dict[str, Any] = {"words": 3 * config.length // 2, "length": config.length, "batch_size": config.batch}
    tasks: dict[str, tuple[Any, int]] = {
        "copy": (PermutationCopying(**shape), config.steps),
        "permute": (FixedPermutation(**shape), config.permute_steps),
    }
    for name, (task, steps) in tasks.items():
        curves = _train(config, task, steps=steps)
        _rows(part, "section_6_2", curves, task=name)


def run_figure_6(
    config: PermutationsConfig, part: Part, *, judged: tuple[Sequence[int], Sequence[int]] | None = None
) -> None:
    """Train models whose head initialisations are all bad, all but one bad, or random, and that are else the same.

    The paper sums the heads' contexts. We also try their mean, which is no larger than one head's context.
    ``judged`` are (good, bad) heads of an earlier ``judge_heads`` with this config.
    """
    good, bad = judged or judge_heads(config, part)
    task = figure_3_tasks(config)["permutations", "hard"]
    # Other data than the heads were judged on.
    tasks = [replace(task, seed=100 + i) for i in range(config.seeds)]
    for contexts in config.contexts:
        for name, seeds in _chosen_heads(config, good, bad).items():
            models = [with_heads(config, task, heads, contexts=contexts) for heads in seeds]
            how = seed_training(config, config.figure_6_steps)
            curves = train_seeds(models, tasks, how=how, device=best_device())
            _rows(part, "figure_6", curves, judged_at=config.head_steps, heads=name, contexts=contexts)


def _chosen_heads(config: PermutationsConfig, good: Sequence[int], bad: Sequence[int]) -> dict[str, list[list[int]]]:
    """The heads of each seed in each scenario for which there are enough heads."""
    rng = np.random.default_rng(config.seed)
    fresh = iter(range(10_000, 10_000 + config.seeds * config.heads))
    chosen = {"random": [[next(fresh) for _ in range(config.heads)] for _ in range(config.seeds)]}
    if len(bad) >= config.heads:
        chosen["all bad"] = [_draw(rng, bad, config.heads) for _ in range(config.seeds)]
        if good:
            others = config.heads - 1
            chosen["one good"] = [[*_draw(rng, bad, others), *_draw(rng, good, 1)] for _ in range(config.seeds)]
    return chosen


def judge_heads(config: PermutationsConfig, part: Part) -> tuple[list[int], list[int]]:
    """(good, bad) head initialisations by rejection: each is trained alone on several data seeds.

    Good means accuracy above 0.95 on all of them, bad below 0.6 on all of them; others are discarded.
    """
    task = figure_3_tasks(config)["permutations", "hard"]
    good: list[int] = []
    bad: list[int] = []
    for candidates in _groups(range(config.candidates), 16):
        pairs = [(head, data) for head in candidates for data in range(config.data_seeds)]
        models = [with_heads(config, task, [head]) for head, _ in pairs]
        tasks = [replace(task, seed=data) for _, data in pairs]
        curves = train_seeds(models, tasks, how=seed_training(config, config.head_steps), device=best_device())
        final = final_accuracy(curves).reshape(len(candidates), config.data_seeds)
        for head, accuracy in zip(candidates, final, strict=True):
            verdict = "good" if accuracy.min() > LEARNED else "bad" if accuracy.max() < FAILED else "discarded"
            {"good": good, "bad": bad}.get(verdict, []).append(head)
            part.row("heads", head=head, verdict=verdict, accuracy=[round(float(a), 4) for a in accuracy])
        if len(good) >= config.pool and len(bad) >= config.pool:
            break
    return good, bad


def _train(config: PermutationsConfig, task: Any, *, steps: int) -> Curves:
    seeds = range(config.seed, config.seed + config.seeds)
    models = fresh_models(config.model(task), seeds)
    tasks = [replace(task, seed=seed) for seed in seeds]
    return train_seeds(models, tasks, how=seed_training(config, steps), device=best_device())


def seed_training(config: PermutationsConfig, steps: int) -> SeedTraining:
    """How the models of a config are trained for so many updates."""
    return SeedTraining(steps=steps, lr=config.lr)


def with_heads(
    config: PermutationsConfig, task: Any, heads: Sequence[int], *, contexts: Literal["sum", "mean"] = "sum"
) -> Translator:
    """The one base model with attention heads drawn from these seeds, each as it would be alone."""
    alone = config.model(task)
    [model] = fresh_models(replace(alone, heads=len(heads), contexts=contexts), [config.base])
    [base] = fresh_models(alone, [config.base])
    state = {name: t for name, t in base.state_dict().items() if not name.startswith("attention.query")}
    drawn = [fresh_models(alone, [1_000_000 + head])[0].attention.query for head in heads]
    for name in dict(model.attention.query.named_parameters()):
        state[f"attention.query.{name}"] = torch.cat([query.get_parameter(name).detach() for query in drawn])
    model.load_state_dict(state, strict=len(heads) == 1)
    return model


def _rows(part: Part, table: str, curves: Curves, *, judged_at: int | None = None, **labels: str) -> None:
    """A row for each seed, and for each evaluation; a seed is judged at the end, or after ``judged_at`` updates."""
    final = final_accuracy(curves, judged_at)
    rows, points = [], []
    for seed, (accuracy, end) in enumerate(zip(final, final_accuracy(curves), strict=True)):
        above = np.flatnonzero(curves.accuracy[:, seed] > LEARNED)
        row = {"accuracy": round(float(accuracy), 4), "learned": bool(accuracy > LEARNED)}
        row |= {} if judged_at is None else {"accuracy_at_the_end": round(float(end), 4)}
        rows.append({**labels, "seed": seed, **row, "steps": curves.steps[above[0]] if len(above) else None})
    for step, accuracies in zip(curves.steps, curves.accuracy, strict=True):
        points.append({**labels, "step": step, "accuracy": [round(float(a), 3) for a in accuracies]})
    part.add_tables({table: rows, f"{table}_curves": points})
    part.fact(f"seconds {table} {' '.join(labels.values())}", round(curves.seconds, 2))


def final_accuracy(curves: Curves, at: int | None = None) -> np.ndarray:
    """The mean of the last three evaluations of each seed, those of the first ``at`` updates."""
    until = len(curves.steps) if at is None else sum(step <= at for step in curves.steps)
    return curves.accuracy[max(0, until - 3) : until].mean(0)


def _draw(rng: np.random.Generator, pool: Sequence[int], n: int) -> list[int]:
    return [int(i) for i in rng.choice(pool, n, replace=False)]


def _groups(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
