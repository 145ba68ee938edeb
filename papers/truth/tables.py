"""The results file of ``python -m papers truth``: scores of each model, and a ranking tested on held-out models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from papers.truth.config import ATTENTION, SPREAD, TruthConfig
from papers.truth.measure import Measured, Subject
from papers.truth.ranking import against_attention, held_out, held_out_mean
from papers.truth.readings import GRADIENTS, MAPS
from papers.truth.readings import WHOLE as WHOLE_MODEL
from papers.truth.scores import METRICS, choose_heads, compare

__all__ = ["KEYS", "NOTES", "derived", "devices", "tables_of"]

Rows = list[dict[str, Any]]
EFFECTIVE = "effective"
# The readings whose difference to effective attention is in question.
RIVALS = (ATTENTION, "norm", "gradient")
ONE, ALL, LAST, WHOLE = "one head", "all heads", "last layer", "whole model"
SUBJECT = ["task", "model"]
KEYS = {
    "subjects": SUBJECT,
    "scores": [*SUBJECT, "reading", "of"],
    "causal": SUBJECT,
    "effective": SUBJECT,
    "spread": [*SUBJECT, "reading"],
    "product": [*SUBJECT, "reading"],
}
NOTES = {
    "subjects": "cases: those that count, of which the model answers a prediction right; made: those that were tried; "
    "right: their share; device: what read them. Of the translator, its updates, BLEU and -log p of a token on the "
    "test set of 2016.",
    "scores": "precision: the share of true sources among the k highest positions, k the number of sources; auc: the "
    "area under the ROC curve. one head: the head that is best on the other half of the cases; all heads and last "
    "layer: the mean of maps; whole model: readings without heads. more: the difference to attention of the same "
    "heads (whole model: to the mean of all heads); over_effective: the same difference to effective attention; "
    "intervals are of 95 %, by bootstrap over cases.",
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
    "over_effective": "removed: the share of the squared weights that effective attention removes; then the paired "
    "difference in precision of attention, norm and gradient to effective attention, of the same heads.",
    "held_out": "The ranking of readings by mean precision on the other models, tested on this one: Kendall's tau, and "
    "the difference of the reading chosen there to attention here, chosen by precision or by votes (ahead of attention "
    "less behind, by intervals). Only readings that every task has.",
    "held_out_mean": "The mean of tau over held-out models, each counting once, and p: how often readings with names "
    "by chance agree as well. best: the reading of the highest precision on the others; voted: the one that is ahead "
    "of attention by its interval on the most of the others, less those where it is behind. Each with its mean gain, "
    "and with the models on which it is behind attention in a task by its interval.",
    "against_attention": "In how many tasks a reading is ahead of attention by its interval, level or behind, and the "
    "lowest and the highest difference.",
}


def tables_of(subject: Subject, measured: Measured, config: TruthConfig) -> dict[str, Rows]:
    """The rows of one subject from the scores of its cases."""
    labels, scores = {"task": subject.task, "model": subject.name}, measured.scores
    cases = len(scores["case"])
    about: dict[str, Any] = {"cases": cases, "made": measured.made, "right": cases / measured.made}
    tables: dict[str, Rows] = {
        "subjects": [labels | about | {"device": " and ".join(measured.devices)} | subject.quality],
        "scores": [labels | row for row in _score_rows(scores, config)],
        "causal": [labels | _causal(scores) | {"cases": cases, "made": measured.made}],
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
        own = values[EFFECTIVE, ALL if of == WHOLE else of]
        made = compare(by_metric["precision"], own["precision"], resamples=config.resamples, seed=config.seed)
        row |= {"over_effective": made["difference"], "over_effective_interval": made["difference_interval"]}
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
    made["over_effective"] = [row for of in (ONE, ALL) for row in _over_effective(tables["effective"], scores, of)]
    for name, of_kinds in (
        ("held_out", held_out),
        ("held_out_mean", held_out_mean),
        ("against_attention", against_attention),
    ):
        made[name] = [row for kinds in ((ONE,), (ALL, WHOLE)) for row in of_kinds(scores, kinds)]
    return {name: rows for name, rows in made.items() if rows}


def _by_subject(scores: Rows, kinds: Sequence[str], column: str) -> Rows:
    """One row for each reading, one column for each subject."""
    rows: dict[str, dict[str, Any]] = {}
    for row in scores:
        if row["of"] in kinds:
            subject = f"{row['task']} {row['model']}"
            rows.setdefault(row["reading"], {"reading": row["reading"]})[subject] = row[column]
    return list(rows.values())


def devices(subjects: Rows) -> str:
    """What measured the subjects, each device with its subjects."""
    by_device: dict[str, list[str]] = {}
    for row in subjects:
        by_device.setdefault(row["device"], []).append(f"{row['task']} {row['model']}")
    return "; ".join(f"{device} ({', '.join(names)})" for device, names in by_device.items())


def _over_effective(effective: Rows, scores: Rows, of: str) -> Rows:
    """The difference of each rival to effective attention, where it was measured case by case."""
    rows = []
    for row in sorted(effective, key=lambda row: row["removed"]):
        own = {
            one["reading"]: one
            for one in scores
            if one["of"] == of and "over_effective_interval" in one and all(one[key] == row[key] for key in SUBJECT)
        }
        if own:
            made = {"of": of} | {name: row[name] for name in (*SUBJECT, "keys", "width", "removed")}
            rows.append(made | {name: own[name]["over_effective_interval"] for name in RIVALS})
    return rows


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
