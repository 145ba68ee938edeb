"""Agreements between the runs of one data set: the reference's alpha and Delta, the proxies, and every checkpoint.

Each run gets ``agreements.jsonl`` beside its metrics: per cent, and Kendall's tau times 100, at each evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.devices import best_device
from attnlab.dynamics import LogisticProxy, agreement, kendall_tau, logistic_proxy, random_agreement, train_proxy
from attnlab.progress import each, note
from attnlab.provenance import write_atomic, write_json
from attnlab.training import load_weights
from papers.ktiw.config import StudyConfig, study_config
from papers.ktiw.corpora import Corpus
from papers.ktiw.optimal import optimal_agreement
from papers.ktiw.readings import Examples, as_read, proxy_rows, read, saliency
from papers.ktiw.stacked import run_stacked
from papers.ktiw.study import (
    READINGS,
    check_glove,
    chosen_runs,
    make_model,
    measured_on,
    run_study,
    shortened,
)

__all__ = ["compare_runs", "run_chosen"]

# The runs of a data set have seeds that follow one another; those of the next seed begin after so many.
SEEDS_APART = 10
# {split: {reading: rows}}: what the runs are compared with.
Gold = dict[str, dict[str, Tensor]]


def run_chosen(
    corpora: Sequence[Corpus],
    work: Path | str,
    *,
    runs: tuple[str, ...],
    steps: int | None,
    batch: int | None,
    seed: int = 0,
    stacked: bool = False,
    glove: Path | None = None,
) -> None:
    """Train and compare several data sets; ``steps`` and ``batch`` replace the paper's where they are not None.

    ``stacked`` trains the runs of a data set at once. ``glove`` is a file of word vectors that the embeddings of
    classifiers start from (A.8).
    """
    for corpus in each(corpora, lambda corpus: corpus.name):
        config = study_config(corpus)
        config = replace(config, steps=steps or config.steps, batch=batch or config.batch, seed=SEEDS_APART * seed)
        config = replace(config, glove=None if glove is None else str(glove))
        folder = Path(work) / corpus.name
        check_glove(corpus, config, folder)
        missing = tuple(run for run in chosen_runs(corpus, config, runs) if not (folder / run / "result.json").exists())
        if missing:
            _train_missing(corpus, work, config, missing, stacked=stacked)
            compare_runs(corpus, folder, config=config)
        if "linear" in runs and corpus.kind == "translation" and not (folder / "optimal.json").exists():
            optimal_agreement(corpus, folder, width=config.width)


def _train_missing(
    corpus: Corpus, work: Path | str, config: StudyConfig, missing: tuple[str, ...], *, stacked: bool
) -> None:
    """Train runs one after the other, or stacked; the run with a linear output layer is never stacked with others."""
    if not stacked:
        run_study(corpus, work, config=config, runs=missing)
        return
    for together in (("linear",), tuple(run for run in missing if run != "linear")):
        if set(together) & set(missing):
            run_stacked(corpus, work, config=config, runs=together)


def compare_runs(corpus: Corpus, folder: Path, *, config: StudyConfig) -> None:
    """Compare the readings at each checkpoint of ``folder``'s runs with the reference's best checkpoint."""
    if not (folder / "reference" / "run.json").exists():
        raise ValueError(
            f"{folder} has no reference run; train it first: its attention is what others are compared with"
        )
    corpus = shortened(corpus, config.longest)
    on = measured_on(corpus, config)
    device = best_device()
    note(f"{corpus.name}: comparing the runs")
    gold = _gold(corpus, config, folder, on, device)
    write_json(folder / "chance.json", _chance(gold, on, config))
    if (folder / "uniform" / READINGS).exists():
        _add_proxies(corpus, config, folder, on, gold, device)
    for run in ("second", "uniform", "frozen"):
        lines = []
        for path in sorted((folder / run / READINGS).glob("step-*.safetensors")):
            values = _agreements(run, path, gold, on, tau_rows=config.tau_rows, device=device)
            lines.append(json.dumps({"step": int(path.stem[5:]), "kind": "eval", "values": values}))
        if lines:
            write_atomic(folder / run / "agreements.jsonl", "\n".join(lines) + "\n")


def _agreements(
    run: str, path: Path, gold: Gold, on: Mapping[str, Examples], *, tau_rows: int, device: torch.device
) -> dict[str, float]:
    """A checkpoint's agreements on both splits, and Kendall's tau on the first ``tau_rows`` validation rows."""
    from safetensors.torch import load_file

    readings = load_file(path, device=str(device))
    values = {}
    for split, examples in on.items():
        of_split = {name.removeprefix(f"{split}."): t for name, t in readings.items() if name.startswith(split)}
        for name, (u, v) in _pairs(run, of_split, gold[split]).items():
            values[f"{split}/{name}"] = 100 * float(agreement(u, v, lengths=examples.lengths).nanmean())
            if split == "valid":
                tau = kendall_tau(u[:tau_rows], v[:tau_rows], lengths=examples.lengths[:tau_rows])
                values[f"{split}/{name}_tau"] = 100 * float(tau.nanmean())
    return values


def _pairs(run: str, readings: Mapping[str, Tensor], gold: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The pairs of rows whose agreement is measured for a run."""
    if run == "second":
        return {"alpha_hat": (gold["alpha"], readings["alpha"]), "alpha_beta": (gold["alpha"], readings["beta"])}
    if run == "frozen":
        return {"alpha_frozen": (gold["alpha"], readings["alpha"])}
    proxies = {f"uf_{name}": (readings["beta"], gold[name]) for name in ("px", "log") if name in gold}
    return {"alpha_uf": (gold["alpha"], readings["beta"]), "delta_uf": (gold["delta"], readings["beta"]), **proxies}


def _gold(corpus: Corpus, config: StudyConfig, folder: Path, on: Mapping[str, Examples], device: torch.device) -> Gold:
    """alpha and Delta of the reference's best checkpoint."""
    model = make_model(corpus, "reference", width=config.width)
    load_weights(model, folder / "reference", which="best")
    model.to(device).eval()
    return {
        split: {"alpha": read(model, examples).alpha, "delta": saliency(model, examples)}
        for split, examples in on.items()
    }


def _chance(gold: Gold, on: Mapping[str, Examples], config: StudyConfig) -> dict[str, float]:
    """The agreement and the tau of the gold alpha with random numbers."""
    by_split = {}
    for split, values in gold.items():
        alpha, lengths, n = values["alpha"], on[split].lengths, config.tau_rows
        noise = torch.rand(alpha.shape, generator=torch.Generator().manual_seed(0)).to(alpha.device)
        by_split[split] = 100 * float(random_agreement(alpha, noise, lengths=lengths, shuffles=5).nanmean())
        by_split[f"{split}_tau"] = 100 * float(kendall_tau(alpha[:n], noise[:n], lengths=lengths[:n]).nanmean())
    return by_split


def _add_proxies(
    corpus: Corpus, config: StudyConfig, folder: Path, on: Mapping[str, Examples], gold: Gold, device: torch.device
) -> None:
    """Train the bag-of-words proxy, and for two classes logistic regression, and add their rows to ``gold``.

    Both learn from the examples as they are scored, </s> included: each position of a row is a trained word.
    """
    outputs = 2 if corpus.kind == "classification" else corpus.vocab
    train, valid = as_read(corpus, "train"), as_read(corpus, "valid")
    fitted = train_proxy(train, valid, words=corpus.vocab, outputs=outputs, config=config.proxy, device=device)
    facts: dict[str, Any] = {"losses": fitted.losses}
    logistic: LogisticProxy | None = None
    if corpus.kind == "classification":
        logistic = logistic_proxy(train, valid, words=corpus.vocab, device=device)
        facts |= {"penalty": logistic.penalty, "accuracy": {str(k): v for k, v in logistic.accuracy.items()}}
    for split, examples in on.items():
        gold[split]["px"] = proxy_rows(fitted.model, examples)
        if logistic is not None:
            gold[split]["log"] = proxy_rows(logistic, examples)
    write_json(folder / "proxies.json", json.loads(json.dumps(facts)))
