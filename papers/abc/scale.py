"""At which scale ABC's results were made, in words: model, training, data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from papers.abc.tables import trainings_of
from papers.common.cells import Cell, Result
from papers.common.scale import millions, span

__all__ = ["EXACT_LMS", "SCALES", "SECONDS"]

CAPTIONS = "multi30k-en-de"


def _training(result: Result) -> list[dict[str, Any]]:
    return (result.get("tables") or {}).get("training", [])


def _lm(result: Result, wanted: Cell) -> str:
    table = wanted.table
    config = result["config"]
    rows = [row for row in _training(result) if row["setting"] == table]
    layers = config["deep_layers"] if table == "table_2b" else config["layers"]
    return (
        f"{layers} layers x {config['width']}, {millions(row['parameters'] for row in rows)} parameters, "
        f"{millions(row['tokens'] for row in rows)} tokens"
    )


def _translators(config: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    model = f"{config['layers']} + {config['layers']} layers x {config['width']}"
    pairs, steps = (span(row[column] for row in rows) for column in ("pairs", "steps"))
    return f"{model}, {pairs} pairs, {steps} updates of {span(row['tokens_a_step'] for row in rows)} tokens"


def _mt(result: Result, wanted: Cell) -> str:
    data = dict(wanted.where).get("data", CAPTIONS)
    rows = trainings_of(result, "training", wanted.table) or _training(result)
    return _translators(result["config"], [row for row in rows if row["data"] == data])


def _doc(result: Result, _: Cell) -> str:
    return _translators(result["config"]["translation"], _training(result))


def _mlm(result: Result, wanted: Cell) -> str:
    table = wanted.table
    if table in ("speed", "parameters"):
        return "RoBERTa-base's sizes, inference"
    rows = [row for row in _training(result) if row["part"].startswith("continued")]
    tuned = [row["epochs"] for row in _training(result) if row.get("epochs")]
    text = f"the shipped masked LM, continued for {millions(row['tokens'] for row in rows)} tokens"
    return f"{text}, fine-tuned for {span(tuned)} epochs" if table == "table_4" else text


def _decoding(result: Result, _: Cell) -> str:
    config = result["config"]
    return f"{config['model']}'s decoder, batch {config['batch']}, {span(config['lengths'])} tokens"


SCALES: dict[str, Callable[[Result, Cell], str]] = {
    "abc-lm": _lm,
    "abc-mt": _mt,
    "abc-doc-mt": _doc,
    "abc-mlm": _mlm,
    "abc-decoding": _decoding,
}


def _base(result: Result, table: str) -> list[dict[str, Any]]:
    own = table.removesuffix("_means")
    rows = (result.get("tables") or {}).get(own, []) if own in ("table_2a", "table_2b") else []
    return [row for row in rows if row["model"] == "BASE"]


EXACT_LMS: dict[str, Callable[[Result, str], list[dict[str, Any]]]] = {"abc-lm": _base}


def _lm_seconds(result: Result) -> float | None:
    # The models of a seed are trained side by side.
    runs = {(row["setting"], row["seed"]): row["seconds"] for row in _training(result)}
    return sum(runs.values()) or None


def _mt_seconds(result: Result) -> float | None:
    # The seeds of a set are trained as one.
    runs = {(row["data"], row["set"], row["seconds"]) for row in _training(result)}
    return sum(seconds for *_, seconds in runs) or None


def _summed(result: Result) -> float | None:
    return sum(row.get("seconds") or 0.0 for row in _training(result)) or None


SECONDS: dict[str, Callable[[Result], float | None]] = {
    "abc-lm": _lm_seconds,
    "abc-mt": _mt_seconds,
    "abc-mt-longer": _mt_seconds,
    "abc-mt-shorter": _mt_seconds,
    "abc-doc-mt": _mt_seconds,
    "abc-mlm": _summed,
}
