"""One data set of KTIW: the trainings its tables compare, each a run folder whose evaluations hold the agreements.

``reference`` gives the gold alpha and Delta at its best checkpoint; ``second`` is the same model from another seed;
``uniform`` never learns to attend; ``frozen`` learns nothing else. ``linear`` is the model of A.1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.data import IGNORED, LabelledSource, ParallelSource
from attnlab.dynamics import agreement, kendall_tau, random_agreement
from attnlab.dynamics.proxy import LogisticProxy, ProxyConfig, logistic_proxy, train_proxy
from attnlab.experiments.ktiw.corpora import Corpus
from attnlab.experiments.ktiw.readings import BOS, EOS, PAD, Examples, examples, proxy_rows, read, saliency
from attnlab.experiments.parts import best_device
from attnlab.loss import Loss
from attnlab.models.lstm import Classifier, Translator, freeze_probe
from attnlab.models.lstm_config import ClassifierConfig, TranslatorConfig
from attnlab.models.lstm_search import translate
from attnlab.provenance import write_json
from attnlab.reading.timeline import record_step
from attnlab.training import Callback, CrossEntropy, Moment, Recipe, Schedule, Settings, load_model, train

__all__ = ["RUNS", "StudyConfig", "make_model", "run_chosen", "run_study", "study_config"]

RUNS = ("reference", "second", "uniform", "frozen", "linear")
SPLITS = ("valid", "train")
LONG_TEXTS = 100
# The source tokens of the sentence that a run's timeline shows.
SENTENCE = 12


@dataclass(frozen=True)
class StudyConfig:
    """A data set's trainings (A.8); ``evaluate`` are the first evaluations, then one every ``evaluate_every`` steps."""

    steps: int
    batch: int
    lr: float = 1e-3
    evaluate: tuple[int, ...] = ()
    evaluate_every: int = 250
    # Examples of either split that agreements are measured on.
    count: int = 4000
    # Rows of them that tau is measured on.
    tau_rows: int = 1000
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    seed: int = 0

    def evaluate_at(self) -> tuple[int, ...]:
        """The steps at which a run is evaluated, the last one among them."""
        start = self.evaluate[-1] if self.evaluate else 0
        later = range(start + self.evaluate_every, self.steps + 1, self.evaluate_every)
        return tuple(step for step in (*self.evaluate, *later, self.steps) if step <= self.steps)


def study_config(corpus: Corpus, *, epochs: int = 20) -> StudyConfig:
    """The paper's settings for this data set: 4,000 steps of 32 texts, or ``epochs`` of 16 sentence pairs."""
    if corpus.kind == "classification":
        long = float(np.median([len(row) for row in corpus.train[0]])) > LONG_TEXTS
        proxy = ProxyConfig(lr=5e-5 if long else 1.5e-4)
        return StudyConfig(steps=4000, batch=32, evaluate=(0, 10, 50, 100, 150, 200, 250), proxy=proxy)
    steps = epochs * -(-len(corpus.train[0]) // 16)
    return StudyConfig(steps=steps, batch=16, evaluate=(0, 50, 100, 500, 1000, 1500), evaluate_every=2000, count=1014)


@dataclass(frozen=True)
class LogOdds:
    """-log sigmoid of the right sign: the loss of a two-class model with one output."""

    name: str = "log-odds"

    def __call__(self, model: Any, output: Any, batch: Mapping[str, Any], step: int) -> Loss:
        sign = 2 * batch["labels"].to(output.logits.dtype) - 1
        return Loss(torch.nn.functional.softplus(-sign * output.logits).sum(), torch.tensor(len(sign)))


class _Watch(Callback):
    """At each evaluation: accuracy and loss on both splits, and the agreements that this run is there for."""

    def __init__(
        self,
        run: str,
        on: dict[str, Examples],
        gold: dict[str, dict[str, Tensor]],
        config: StudyConfig,
        words: tuple[str, ...],
    ) -> None:
        self.run, self.on, self.gold, self.config, self.words = run, on, gold, config, words

    def on_evaluation(self, moment: Moment) -> dict[str, float]:
        model: Any = moment.model
        values: dict[str, float] = {}
        for split, on in self.on.items():
            found = read(model, on)
            values |= {f"{split}/accuracy": found.accuracy, f"{split}/loss": found.loss}
            for name, (u, v) in _pairs(self.run, found, self.gold.get(split, {})).items():
                values[f"{split}/{name}"] = 100 * float(agreement(u, v, lengths=on.lengths).nanmean())
                if split == "valid":
                    n = self.config.tau_rows
                    tau = kendall_tau(u[:n], v[:n], lengths=on.lengths[:n])
                    values[f"{split}/{name}_tau"] = 100 * float(tau.nanmean())
        if isinstance(model, Translator):
            for split, on in self.on.items():
                _translations(model, on, moment.run_dir / f"{split}-{moment.step:06d}.npz")
            _record_sentence(model, self.on["valid"], self.words, moment, values)
        return values


def _pairs(run: str, found: Any, gold: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """What each run is compared with; nothing for the reference itself."""
    if run == "second":
        return {"alpha_hat": (gold["alpha"], found.alpha), "alpha_beta": (gold["alpha"], found.beta)}
    if run == "uniform":
        proxies = {f"uf_{name}": (found.beta, gold[name]) for name in ("px", "log") if name in gold}
        return {"alpha_uf": (gold["alpha"], found.beta), "delta_uf": (gold["delta"], found.beta), **proxies}
    if run == "frozen":
        return {"alpha_frozen": (gold["alpha"], found.alpha)}
    return {"alpha_beta_own": (found.alpha, found.beta)}


def _translations(model: Translator, on: Examples, path: Path) -> None:
    """Greedy translations, to be scored where sacrebleu is: ids end to end, and the reference's beside them."""
    rows, references = [], []
    for batch in on.batches:
        longest = 2 * batch["labels"].shape[1] + 5
        found = translate(
            model, batch["input_ids"], attention_mask=batch["attention_mask"], bos=BOS, eos=EOS, max_length=longest
        )
        rows += [row[: row.index(EOS)] if EOS in row else row for row in found.tolist()]
        references += [[i for i in row if i >= 0 and i != EOS] for row in batch["labels"].tolist()]
    arrays: dict[str, Any] = {}
    for name, side in (("hypotheses", rows), ("references", references)):
        arrays[name] = np.array([i for row in side for i in row], np.uint16)
        arrays[f"{name}_lengths"] = np.array([len(row) for row in side], np.uint16)
    np.savez_compressed(path, **arrays)


def _record_sentence(
    model: Translator, on: Examples, words: tuple[str, ...], moment: Moment, values: Mapping[str, float]
) -> None:
    """alpha of one sentence, and beta (as shares of a row), as two layers of the run's timeline."""
    batch = next((b for b in on.batches if b["input_ids"].shape[1] >= SENTENCE), on.batches[-1])
    length, height = int(batch["attention_mask"][0].sum()), int((batch["labels"][0] != IGNORED).sum())
    sizes = {"input_ids": length, "attention_mask": length}
    cut = {name: t[:1, : sizes.get(name, height)] for name, t in batch.items()}
    found = read(model, Examples(on.kind, [cut], torch.full((height,), length)))
    beta = found.beta[:, :length].softmax(1)
    target = [words[i] for i in batch["labels"][0].tolist() if i >= 0]
    source = [words[i] for i in batch["input_ids"][0, :length].tolist()]
    maps = {("cross", 0): found.alpha[None, None, :, :length], ("cross", 1): beta[None, None]}
    shown = {name: value for name, value in values.items() if name.startswith("valid/") and "loss" not in name}
    record_step(moment.run_dir, moment.step, maps, tokens={"source": source, "target": target}, scalars=shown)


def run_study(
    corpus: Corpus,
    work: Path | str,
    *,
    config: StudyConfig | None = None,
    runs: tuple[str, ...] = RUNS,
    wait: float = 0,
) -> Path:
    """Train what is not yet trained of a data set, into ``work``/<data set>/<run>; returns that folder.

    Runs need the reference's checkpoint. Another process may be making it: ``wait`` is how many seconds to wait for it.
    """
    config = config or study_config(corpus)
    unknown = set(runs) - set(RUNS)
    if unknown:
        raise ValueError(f"unknown runs {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    folder = Path(work) / corpus.name
    folder.mkdir(parents=True, exist_ok=True)
    device = best_device()
    on = {split: examples(corpus, split, count=config.count, device=device, batch=128) for split in SPLITS}
    gold: dict[str, dict[str, Tensor]] = {split: {} for split in SPLITS}
    if "uniform" in runs and not (folder / "uniform" / "result.json").exists():
        _proxies(corpus, config, folder, on, gold, device)
    # Table 10 is of classifiers, and they have no other output layer.
    not_here = "linear" if corpus.kind == "classification" else "frozen"
    for number, run in enumerate(RUNS):
        if run not in runs or run == not_here or (folder / run / "result.json").exists():
            continue
        if run in ("second", "uniform", "frozen") and "alpha" not in gold["valid"]:
            _gold(corpus, config, folder, on, gold, device, wait=wait)
        _train(corpus, config, run, config.seed + number, folder / run, on, gold)
    return folder


def run_chosen(
    corpora: Sequence[Corpus], work: Path | str, *, runs: tuple[str, ...], steps: int | None, batch: int | None
) -> None:
    """``run_study`` of several data sets, with other numbers of steps or examples where they are given."""
    for corpus in corpora:
        config = study_config(corpus)
        config = replace(config, steps=steps or config.steps, batch=batch or config.batch)
        folder = run_study(corpus, work, config=config, runs=runs)
        if "linear" in runs and corpus.kind == "translation" and not (folder / "optimal.json").exists():
            from attnlab.experiments.ktiw.optimal import optimal_agreement

            optimal_agreement(corpus, folder)


def _train(
    corpus: Corpus,
    config: StudyConfig,
    run: str,
    seed: int,
    folder: Path,
    on: dict[str, Examples],
    gold: dict[str, dict[str, Tensor]],
) -> None:
    torch.manual_seed(seed)
    model = make_model(corpus, run)
    if run == "frozen":
        freeze_probe(model)
    x, y = corpus.train
    source: Any
    if corpus.kind == "classification":
        source = LabelledSource(x, y.tolist(), pad=PAD, batch_size=config.batch, seed=seed)
    else:
        source = ParallelSource(x, y, pad=PAD, bos=BOS, eos=EOS, batch_size=config.batch, seed=seed)
    settings = Settings(
        steps=config.steps,
        recipe=Recipe(kind="adam", lr=config.lr, weight_decay=0.0, clip=None),
        schedule=Schedule("constant"),
        seed=seed,
        precision="no",
        evaluate_at=config.evaluate_at(),
        watch="valid/accuracy",
        maximise=True,
    )
    terms: list[Any] = [LogOdds() if corpus.kind == "classification" else CrossEntropy()]
    told = {"data": corpus.name, "run": run, "model": asdict(model.config), **asdict(config)}
    watch = _Watch(run, on, gold, config, corpus.words)
    train(model, source, terms=terms, settings=settings, run_dir=folder, config=told, callbacks=[watch], resume=True)


def make_model(corpus: Corpus, run: str) -> Classifier | Translator:
    """The model of a run: A.8's sizes, with uniform attention or a linear output layer where the run says so."""
    attention = "uniform" if run == "uniform" else "softmax"
    if corpus.kind == "classification":
        return Classifier(ClassifierConfig(vocab=corpus.vocab, attention=attention))
    config = TranslatorConfig(vocab=corpus.vocab, dropout=0.5, attention=attention)
    return Translator(replace(config, output="linear") if run == "linear" else config)


def _gold(
    corpus: Corpus,
    config: StudyConfig,
    folder: Path,
    on: dict[str, Examples],
    gold: dict[str, dict[str, Tensor]],
    device: torch.device,
    *,
    wait: float,
) -> None:
    """alpha and Delta of the reference's best checkpoint."""
    reference = folder / "reference"
    until = time.monotonic() + wait
    while not (reference / "result.json").exists():
        if time.monotonic() > until:
            raise ValueError(f"{reference} holds no finished run; train it first: its attention is what others meet")
        time.sleep(1)
    model = make_model(corpus, "reference")
    load_model(model, reference, which="best")
    model.to(device).eval()
    for split, examples_of in on.items():
        found = read(model, examples_of)
        gold[split] |= {"alpha": found.alpha, "delta": saliency(model, examples_of)}
    chance = {}
    for split, g in gold.items():
        lengths = on[split].lengths
        noise = torch.rand(g["alpha"].shape, generator=torch.Generator().manual_seed(0)).to(device)
        n = config.tau_rows
        tau = kendall_tau(g["alpha"][:n], noise[:n], lengths=lengths[:n])
        chance[split] = 100 * float(random_agreement(g["alpha"], noise, lengths=lengths, shuffles=5).nanmean())
        chance[f"{split}_tau"] = 100 * float(tau.nanmean())
    write_json(folder / "chance.json", chance)


def _proxies(
    corpus: Corpus,
    config: StudyConfig,
    folder: Path,
    on: dict[str, Examples],
    gold: dict[str, dict[str, Tensor]],
    device: torch.device,
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
