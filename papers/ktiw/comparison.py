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
from attnlab.provenance import write_atomic, write_json
from attnlab.training import load_weights
from papers.ktiw.corpora import Corpus
from papers.ktiw.optimal import optimal_agreement
from papers.ktiw.readings import Examples, proxy_rows, read, saliency
from papers.ktiw.stacked import run_stacked
from papers.ktiw.study import (
    READINGS,
    StudyConfig,
    chosen_runs,
    make_model,
    measured_on,
    run_study,
    shortened,
    study_config,
)

__all__ = ["compare_runs", "run_chosen"]

Gold = dict[str, dict[str, Tensor]]


def run_chosen(
    corpora: Sequence[Corpus],
    work: Path | str,
    *,
    runs: tuple[str, ...],
    steps: int | None,
    batch: int | None,
    stacked: bool = False,
) -> None:
    """Train and compare several data sets, with other numbers of steps or examples where they are given.

    ``stacked`` trains the runs of a data set at once.
    """
    for corpus in corpora:
        config = study_config(corpus)
        config = replace(config, steps=steps or config.steps, batch=batch or config.batch)
        folder = Path(work) / corpus.name
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
    """Compare what the checkpoints of ``folder``'s runs have read with the reference's best checkpoint."""
    from safetensors.torch import load_file

    if not (folder / "reference" / "run.json").exists():
        raise ValueError(
            f"{folder} has no reference run; train it first: its attention is what others are compared with"
        )
    corpus = shortened(corpus, config.longest)
    on = measured_on(corpus, config)
    device = best_device()
    gold = _gold(corpus, config, folder, on, device)
    write_json(folder / "chance.json", _chance(gold, on, config))
    if (folder / "uniform" / READINGS).exists():
        _proxies(corpus, config, folder, on, gold, device)
    for run in ("second", "uniform", "frozen"):
        lines = []
        for path in sorted((folder / run / READINGS).glob("step-*.safetensors")):
            found = load_file(path, device=str(device))
            values = {}
            for split, lengths in ((split, one.lengths) for split, one in on.items()):
                mine = {name.removeprefix(f"{split}."): t for name, t in found.items() if name.startswith(split)}
                for name, (u, v) in _pairs(run, mine, gold[split]).items():
                    values[f"{split}/{name}"] = 100 * float(agreement(u, v, lengths=lengths).nanmean())
                    if split == "valid":
                        n = config.tau_rows
                        tau = kendall_tau(u[:n], v[:n], lengths=lengths[:n])
                        values[f"{split}/{name}_tau"] = 100 * float(tau.nanmean())
            lines.append(json.dumps({"step": int(path.stem[5:]), "kind": "eval", "values": values}))
        if lines:
            write_atomic(folder / run / "agreements.jsonl", "\n".join(lines) + "\n")


def _pairs(run: str, found: Mapping[str, Tensor], gold: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """What each run is compared with."""
    if run == "second":
        return {"alpha_hat": (gold["alpha"], found["alpha"]), "alpha_beta": (gold["alpha"], found["beta"])}
    if run == "frozen":
        return {"alpha_frozen": (gold["alpha"], found["alpha"])}
    proxies = {f"uf_{name}": (found["beta"], gold[name]) for name in ("px", "log") if name in gold}
    return {"alpha_uf": (gold["alpha"], found["beta"]), "delta_uf": (gold["delta"], found["beta"]), **proxies}


def _gold(corpus: Corpus, config: StudyConfig, folder: Path, on: Mapping[str, Examples], device: torch.device) -> Gold:
    """alpha and Delta of the reference's best checkpoint."""
    model = make_model(corpus, "reference", width=config.width)
    load_weights(model, folder / "reference", which="best")
    model.to(device).eval()
    return {split: {"alpha": read(model, one).alpha, "delta": saliency(model, one)} for split, one in on.items()}


def _chance(gold: Gold, on: Mapping[str, Examples], config: StudyConfig) -> dict[str, float]:
    """What the gold alpha has in common with noise."""
    found = {}
    for split, values in gold.items():
        alpha, lengths, n = values["alpha"], on[split].lengths, config.tau_rows
        noise = torch.rand(alpha.shape, generator=torch.Generator().manual_seed(0)).to(alpha.device)
        found[split] = 100 * float(random_agreement(alpha, noise, lengths=lengths, shuffles=5).nanmean())
        found[f"{split}_tau"] = 100 * float(kendall_tau(alpha[:n], noise[:n], lengths=lengths[:n]).nanmean())
    return found


def _proxies(
    corpus: Corpus, config: StudyConfig, folder: Path, on: Mapping[str, Examples], gold: Gold, device: torch.device
) -> None:
    """The bag-of-words proxy, and for two classes the logistic regression it is equal to."""
    outputs = 2 if corpus.kind == "classification" else corpus.vocab
    fitted = train_proxy(
        corpus.train, corpus.valid, words=corpus.vocab, outputs=outputs, config=config.proxy, device=device
    )
    told: dict[str, Any] = {"losses": fitted.losses}
    logistic: LogisticProxy | None = None
    if corpus.kind == "classification":
        logistic = logistic_proxy(corpus.train, corpus.valid, words=corpus.vocab, device=device)
        told |= {"penalty": logistic.penalty, "accuracy": {str(k): v for k, v in logistic.accuracy.items()}}
    for split, examples_of in on.items():
        gold[split]["px"] = proxy_rows(fitted.model, examples_of)
        if logistic is not None:
            gold[split]["log"] = proxy_rows(logistic, examples_of)
    write_json(folder / "proxies.json", json.loads(json.dumps(told)))
