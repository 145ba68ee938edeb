"""The results file of ``python -m papers truth``: scores of each model, and a ranking tested on held-out models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from papers.truth.config import ATTENTION, SPREAD, TruthConfig
from papers.truth.readings import GRADIENTS, MAPS, RANDOM
from papers.truth.readings import WHOLE as WHOLE_MODEL
from papers.truth.scores import METRICS, choose_heads, compare, kendall

__all__ = ["KEYS", "NOTES", "derived", "tables_of"]

Rows = list[dict[str, Any]]
ONE, ALL, LAST, WHOLE = "one head", "all heads", "last layer", "whole model"
SUBJECT = ["task", "model"]
KEYS = {
    "scores": [*SUBJECT, "reading", "of"],
    "causal": SUBJECT,
    "effective": SUBJECT,
    "spread": [*SUBJECT, "reading"],
    "product": [*SUBJECT, "reading"],
}
NOTES = {
    "scores": "precision: the share of true sources among the k highest positions, k the number of sources; auc: the "
    "area under the ROC curve. one head: the head that is best on the other half of the cases; all heads and last "
    "layer: the mean of maps; whole model: readings without heads. more: the difference to attention of the same "
    "heads (whole model: to the mean of all heads); intervals are of 95 %, by bootstrap over cases.",
    "causal": "The answer's log-probability before and after the sources, or as many other candidates, are replaced.",
    "effective": "removed: the share of the squared weights of a row that cannot reach the output; trivial: the share "
    "of rows that lose nothing, since they see no more keys than the values have dimensions.",
    "spread": "Of the numbers in a prediction's row, as means over heads: over how many keys they lie (one over the "
    "sum of squared shares), the share at the first token and at the sources, and the share at the sources in the "
    "head that has most there.",
    "effective_spread": "keys that a row sees, the width of a head's values, and the share of the squared weights that "
    "is removed; for attention and effective attention, over how many keys the numbers lie, the share at the first "
    "token, and the share at the sources in the head that has most there.",
    "product": "The share of atoms mapped right from the head that rxnmapper reads: by the highest score of a row, of "
    "both directions, and by its own mapping.",
    "held_out": "The ranking of readings by mean precision on the other models, tested on this one: Kendall's tau, and "
    "the difference of the reading chosen there to attention here.",
}


def tables_of(task: str, model: str, scores: Mapping[str, Tensor], config: TruthConfig) -> dict[str, Rows]:
    """The rows of one subject from the scores of its cases."""
    labels = {"task": task, "model": model}
    tables = {
        "scores": [labels | row for row in _score_rows(scores, config)],
        "causal": [labels | _causal(scores)],
        "effective": [labels | _effective(scores)],
        "spread": [labels | {"reading": reading} | _spread(scores, reading) for reading in SPREAD],
    }
    product = _product_rows(scores, config)
    return tables | ({"product": [labels | row for row in product]} if product else {})


def _score_rows(scores: Mapping[str, Tensor], config: TruthConfig) -> Rows:
    names = sorted((name.removesuffix("/precision") for name in scores if name.endswith("/precision")), key=_place)
    values: dict[tuple[str, str], dict[str, Tensor]] = {}
    heads: dict[str, list[str]] = {}
    for name in names:
        reading, _, of = name.rpartition("/")
        for metric in METRICS:
            one = scores[f"{name}/{metric}"]
            of_heads = {"heads": ONE, "whole": WHOLE}.get(of, of)
            if of == "heads":
                one, best = choose_heads(one)
                heads |= {reading: best} if metric == METRICS[0] else {}
            values.setdefault((reading, of_heads), {})[metric] = one
    rows = []
    for (reading, of), by_metric in values.items():
        row: dict[str, Any] = {"reading": reading, "of": of}
        reference = values[ATTENTION, ALL if of == WHOLE else of]
        for metric, one in by_metric.items():
            made = compare(one, reference[metric], resamples=config.resamples, seed=config.seed)
            row |= {
                metric: made["mean"], f"{metric}_interval": made["interval"],
                f"{metric}_more": made["difference"], f"{metric}_more_interval": made["difference_interval"],
            }  # fmt: skip
        if of == ONE:
            row["heads"] = " and ".join(dict.fromkeys(heads[reading]))
        rows.append(row | {"cases": len(one)})
    return rows


def _place(name: str) -> tuple[int, str]:
    """Readings stand in the order in which readings.py lists them."""
    reading, _, of = name.partition("/")
    return (*MAPS, *GRADIENTS, *WHOLE_MODEL).index(reading), of


def _causal(scores: Mapping[str, Tensor]) -> dict[str, Any]:
    before = scores["fact/log_p"]
    lost = {name: before - scores[f"change/{name}"] for name in ("sources", "others")}
    return {
        "log_p": _mean(before),
        "lost_without_sources": _mean(lost["sources"]),
        "lost_without_others": _mean(lost["others"]),
        "sources_matter": _mean((lost["sources"] > 0).float()),
        "sources_matter_more": _mean((lost["sources"] > lost["others"]).float()),
        "cases": len(before),
        "made": int(scores["made"]),
    }


def _effective(scores: Mapping[str, Tensor]) -> dict[str, Any]:
    names = ("removed", "trivial", "rank", "keys", "width")
    return {name: _mean(scores[f"fact/{name}"]) for name in names}


def _spread(scores: Mapping[str, Tensor], reading: str) -> dict[str, float]:
    return {name: _mean(scores[f"spread/{reading}/{name}"]) for name in ("keys", "first", "sources", "head")}


def _product_rows(scores: Mapping[str, Tensor], config: TruthConfig) -> Rows:
    ways = ("row", "both", "mapping")
    readings = [name for name in MAPS if f"product/{name}/row" in scores]
    rows = []
    for reading in readings:
        row: dict[str, Any] = {"reading": reading}
        for way in ways:
            one, shipped = (scores[f"product/{name}/{way}"] for name in (reading, ATTENTION))
            made = compare(one, shipped, resamples=config.resamples, seed=config.seed)
            row |= {
                way: made["mean"],
                f"{way}_more": made["difference"],
                f"{way}_more_interval": made["difference_interval"],
            }
        rows.append(row)
    return rows


def _mean(values: Tensor) -> float:
    return float(torch.nanmean(values.double()))


def derived(tables: Mapping[str, Rows]) -> dict[str, Rows]:
    """What is made from the scores of all subjects: a table for each way of reading, and the held-out models."""
    scores = tables["scores"]
    made: dict[str, Rows] = {}
    for name, kinds in (("one_head", (ONE,)), ("all_heads", (ALL, WHOLE)), ("last_layer", (LAST,))):
        made[name] = _by_subject(scores, kinds, "precision")
        made[f"{name}_more"] = _by_subject(scores, kinds, "precision_more_interval")
        made[f"{name}_auc"] = _by_subject(scores, kinds, "auc")
    made["effective_spread"] = _effective_spread(tables["effective"], tables["spread"])
    made["held_out"] = [row for kinds in ((ONE,), (ALL, WHOLE)) for row in _held_out(scores, kinds)]
    return {name: rows for name, rows in made.items() if rows}


def _by_subject(scores: Rows, kinds: Sequence[str], column: str) -> Rows:
    """One row for each reading, one column for each subject."""
    rows: dict[str, dict[str, Any]] = {}
    for row in scores:
        if row["of"] in kinds:
            subject = f"{row['task']} {row['model']}"
            rows.setdefault(row["reading"], {"reading": row["reading"]})[subject] = row[column]
    return list(rows.values())


def _effective_spread(effective: Rows, spreads: Rows) -> Rows:
    """What effective attention removes, and where the numbers of both lie."""
    rows = []
    for row in effective:
        own = {one["reading"]: one for one in spreads if all(one[key] == row[key] for key in SUBJECT)}
        made = {name: row[name] for name in (*SUBJECT, "keys", "width", "removed")}
        for column, name in (("over", "keys"), ("first", "first"), ("source", "head")):
            made |= {f"{column}_{reading}": own[reading][name] for reading in (ATTENTION, "effective")}
        rows.append(made)
    return rows


def _held_out(scores: Rows, kinds: Sequence[str]) -> Rows:
    """For each model: the ranking on the others, and what its best reading gains here; seeds are one model."""
    by_model: dict[str, dict[str, dict[str, Any]]] = {}
    for row in scores:
        if row["of"] in kinds:
            by_model.setdefault(_group(row), {}).setdefault(f"{row['task']} {row['model']}", {})[row["reading"]] = row
    if len(by_model) < 2:
        return []
    everywhere = set.intersection(*(set(one) for subjects in by_model.values() for one in subjects.values())) - {RANDOM}
    rows = []
    for model, subjects in by_model.items():
        others = [one for name, more in by_model.items() if name != model for one in _means(more, everywhere)]
        ranking = {name: sum(one[name] for one in others) / len(others) for name in everywhere}
        best = max(sorted(ranking), key=lambda name: ranking[name])
        for subject, one in subjects.items():
            own = {name: one[name]["precision"] for name in everywhere}
            rows.append({
                "of": kinds[0], "held_out": subject, "tau": kendall(ranking, own), "best_on_others": best,
                "more_than_attention": one[best]["precision_more"],
                "interval": one[best]["precision_more_interval"],
                "best_here": max(sorted(own), key=lambda name: own[name]),
            })  # fmt: skip
    return rows


def _group(row: Mapping[str, Any]) -> str:
    return "recall" if row["task"] == "recall" else row["model"]


def _means(subjects: Mapping[str, Mapping[str, Any]], names: set[str]) -> Rows:
    """The mean precision of each reading over the subjects of one model, so that every model counts alike."""
    return [{name: sum(one[name]["precision"] for one in subjects.values()) / len(subjects) for name in names}]
