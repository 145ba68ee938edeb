"""Which differences between the models of Table 2 are significant, by their spread over seeds, pooled over a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from attnlab.evaluation.intervals import student_quantile
from papers.abc.tables import Rows

__all__ = ["COMPARISONS", "Place", "differences", "ratio_of"]

# A model, its memory and, in Table 2a, the context it is read with.
Place = tuple[str, int | None, int | None]


def _places(model: str, n: int | None) -> list[Place]:
    return [(model, n, context) for context in (0, 480)]


def _pairs(first: Sequence[Place], *others: Sequence[Place]) -> list[tuple[Place, Place]]:
    return [pair for other in others for pair in zip(first, other, strict=True)]


# For each claim, the pairs of which the first is to have the lower perplexity.
COMPARISONS: dict[str, tuple[str, list[tuple[Place, Place]]]] = {
    "abc-learned-beats-agnostic": (
        "table_2a", _pairs(_places("ABC_MLP", 64), _places("Linformer", 64), _places("ABC_RD", 64)),
    ),
    "abc-half-the-memory": (
        "table_2a", _pairs(_places("ABC_MLP", 32), _places("Linformer", 64), _places("ABC_RD", 64)),
    ),
    "abc-linformer-trails-random": ("table_2a", _pairs(_places("ABC_RD", 64), _places("Linformer", 64))),
    "abc-linformer-worsens-with-context": ("table_2a", [(("Linformer", 64, 0), ("Linformer", 64, 480))]),
    "abc-close-to-base": ("table_2a", [(("BASE", None, 480), ("ABC_MLP", 64, 480))]),
    "abc-beats-kernels": (
        "table_2b",
        [(("ABC_MLP", 64, None), (model, n, None)) for model, n in (("ELU", 128), ("RFA", 64), ("T2R", 64))],
    ),
}  # fmt: skip


def differences(tables: Mapping[str, Rows]) -> Rows:
    """Each pair's perplexities as a ratio, with the 95 % interval that other seeds leave it."""
    rows: Rows = []
    for claim, (table, pairs) in COMPARISONS.items():
        for first, second in pairs:
            ratio = ratio_of(tables.get(table, []), first, second)
            if ratio is not None:
                rows.append({"claim": claim, "first": _name(first), "second": _name(second), **ratio})
    return rows


def ratio_of(rows: Rows, first: Place, second: Place) -> dict[str, float] | None:
    """The perplexity of the first over that of the second with its 95 % interval; None where a table cannot tell.

    log perplexity = model + seed + what is left; the deviation s of the last is pooled over a table's models and
    contexts, since three values alone hardly tell it. The logarithm of a ratio is then known to t s sqrt(2 / seeds),
    with (models - 1) (seeds - 1) degrees of freedom: a model's contexts say nearly the same of a seed.
    """
    values, s, degrees = _pooled(rows)
    if s is None or first not in values or second not in values:
        return None
    gap = fmean(a - b for a, b in zip(values[first], values[second], strict=True))
    seeds = len(values[first])
    reach = student_quantile(degrees) * s * math.sqrt(2 / seeds)
    ahead = sum(a < b for a, b in zip(values[first], values[second], strict=True))
    ends = {"low": math.exp(gap - reach), "high": math.exp(gap + reach)}
    return {"ratio": math.exp(gap), **ends, "seeds": seeds, "first_ahead": ahead}


def _pooled(rows: Rows) -> tuple[dict[Place, list[float]], float | None, int]:
    """(log perplexities by seed, what is left of them beside model and seed, its degrees of freedom)."""
    by_place: dict[Place, dict[Any, float]] = {}
    for row in rows:
        place = row["model"], row["n"], row.get("context")
        by_place.setdefault(place, {})[row.get("seed")] = math.log(row["perplexity"])
    seeds = sorted(set.intersection(*(set(each) for each in by_place.values()))) if by_place else []
    values = {place: [each[seed] for seed in seeds] for place, each in by_place.items()}
    models = {place[:2] for place in values}
    if len(models) < 2 or len(seeds) < 2:
        return values, None, 0
    degrees, cells = ((count - 1) * (len(seeds) - 1) for count in (len(models), len(values)))
    of_seed = [fmean(line[i] for line in values.values()) for i in range(len(seeds))]
    mean = fmean(of_seed)
    left = [(value - fmean(line) - of_seed[i] + mean) ** 2 for line in values.values() for i, value in enumerate(line)]
    return values, math.sqrt(math.fsum(left) / cells), degrees


def _name(place: Place) -> str:
    model, n, context = place
    name = model if n is None else f"{model}-{n}"
    return name if context is None else f"{name}, context {context}"
