"""Does an order of readings hold on a model that did not make it? Each model is held out in turn."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from papers.truth.config import ATTENTION
from papers.truth.readings import RANDOM
from papers.truth.scores import kendall

__all__ = ["against_attention", "held_out", "held_out_mean"]

Rows = list[dict[str, Any]]
# {subject: {reading: its row of scores}} of each model.
Subjects = dict[str, dict[str, dict[str, Any]]]
# Orders by chance that the mean of tau is compared with.
SHUFFLES = 2000


def held_out(scores: Rows, kinds: Sequence[str]) -> Rows:
    """For each model: the order of readings on the others, and what the reading that is best there gains here."""
    models = _by_model(scores, kinds)
    if len(models) < 2:
        return []
    names = _shared(models)
    rows = []
    for model, subjects in models.items():
        ranking = _ranking([_means(more, names) for other, more in models.items() if other != model])
        best = _best(ranking)
        voted = _voted([more for other, more in models.items() if other != model], names)
        for subject, one in subjects.items():
            own = {name: one[name]["precision"] for name in names}
            rows.append({
                "of": kinds[0], "held_out": subject, "tau": kendall(ranking, own), "best_on_others": best,
                "more_than_attention": one[best]["precision_more"],
                "interval": one[best]["precision_more_interval"],
                "most_votes_on_others": voted, "voted_more_than_attention": one[voted]["precision_more"],
                "voted_interval": one[voted]["precision_more_interval"], "best_here": _best(own),
            })  # fmt: skip
    return rows


def held_out_mean(scores: Rows, kinds: Sequence[str], *, seed: int = 0) -> Rows:
    """The mean of tau over held-out models, and how often orders by chance agree as well.

    Chance gives the readings of each model other names, at random and for each model anew.
    """
    models = _by_model(scores, kinds)
    if len(models) < 2:
        return []
    names = _shared(models)
    means = [_means(subjects, names) for subjects in models.values()]
    found, draw = _mean_tau(means), random.Random(seed)
    reached = sum(_mean_tau([_renamed(one, draw) for one in means]) >= found - 1e-12 for _ in range(SHUFFLES))
    rows = _rows_of_models(held_out(scores, kinds), models)
    return [{
        "of": kinds[0], "models": len(models), "readings": len(names), "tau": found,
        "p": (reached + 1) / (SHUFFLES + 1),
        "best_more_than_attention": _mean_of_models(rows, "more_than_attention"),
        "best_is_behind_on": sum(any(row["interval"][1] < 0 for row in own) for own in rows),
        "voted_more_than_attention": _mean_of_models(rows, "voted_more_than_attention"),
        "voted_is_behind_on": sum(any(row["voted_interval"][1] < 0 for row in own) for own in rows),
        "order_on_all": " > ".join(sorted(names, key=lambda name: (-_ranking(means)[name], name))),
    }]  # fmt: skip


def against_attention(scores: Rows, kinds: Sequence[str]) -> Rows:
    """In how many tasks a reading is ahead of attention, level or behind: an interval that holds 0 is level."""
    rows: dict[str, dict[str, Any]] = {}
    for row in scores:
        if row["of"] not in kinds or row["reading"] in (ATTENTION, RANDOM):
            continue
        empty = {"of": kinds[0], "reading": row["reading"], "ahead": 0, "level": 0, "behind": 0}
        counts = rows.setdefault(row["reading"], empty | {"worst": float("inf"), "best": -float("inf")})
        counts[("level", "ahead", "behind")[_vote(row)]] += 1
        counts["worst"] = min(counts["worst"], row["precision_more"])
        counts["best"] = max(counts["best"], row["precision_more"])
    return list(rows.values())


def _by_model(scores: Rows, kinds: Sequence[str]) -> dict[str, Subjects]:
    """The scores of each model by task; the seeds of the LM of recall are one model."""
    models: dict[str, Subjects] = {}
    for row in scores:
        if row["of"] in kinds:
            model = "recall" if row["task"] == "recall" else row["model"]
            models.setdefault(model, {}).setdefault(f"{row['task']} {row['model']}", {})[row["reading"]] = row
    return models


def _shared(models: Mapping[str, Subjects]) -> list[str]:
    """The readings that every task has, without the random one."""
    every = [set(one) for subjects in models.values() for one in subjects.values()]
    return sorted(set.intersection(*every) - {RANDOM})


def _means(subjects: Subjects, names: Sequence[str]) -> dict[str, float]:
    """The mean precision of each reading over the tasks of one model, so that every model counts alike."""
    return {name: sum(one[name]["precision"] for one in subjects.values()) / len(subjects) for name in names}


def _ranking(models: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(one[name] for one in models) / len(models) for name in models[0]}


def _best(precision: Mapping[str, float]) -> str:
    return max(sorted(precision), key=lambda name: precision[name])


def _vote(row: Mapping[str, Any]) -> int:
    """1 where a reading is ahead of attention by its interval, -1 where it is behind, 0 where the interval holds 0."""
    low, high = row["precision_more_interval"]
    return (low > 0) - (high < 0)


def _voted(models: Sequence[Subjects], names: Sequence[str]) -> str:
    """The reading with the most votes, the mean of a model's tasks being its vote; attention if none has more."""
    votes = {
        name: sum(sum(_vote(one[name]) for one in subjects.values()) / len(subjects) for subjects in models)
        for name in names
    }
    return max(sorted(votes), key=lambda name: (votes[name], name == ATTENTION))


def _mean_of_models(rows: Sequence[Rows], column: str) -> float:
    return sum(sum(row[column] for row in own) / len(own) for own in rows) / len(rows)


def _mean_tau(models: Sequence[Mapping[str, float]]) -> float:
    """Kendall's tau of each model with the mean of the others."""
    taus = [kendall(_ranking([*models[:i], *models[i + 1 :]]), own) for i, own in enumerate(models)]
    return sum(taus) / len(taus)


def _renamed(precision: Mapping[str, float], draw: random.Random) -> dict[str, float]:
    return dict(zip(precision, draw.sample(list(precision.values()), len(precision)), strict=True))


def _rows_of_models(rows: Rows, models: Mapping[str, Subjects]) -> list[Rows]:
    return [[row for row in rows if row["held_out"] in subjects] for subjects in models.values()]
