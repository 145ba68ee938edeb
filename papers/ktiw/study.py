"""One data set of KTIW: the trainings its tables compare, each a run folder that keeps the readings of its checkpoints.

``reference`` gives the gold alpha and Delta at its best checkpoint; ``second`` is the same model from another seed;
``uniform`` never learns to attend; ``frozen`` learns nothing else. ``linear`` is the model of A.1. Runs are
independent, so they may be trained at once; ``comparison.py`` then compares them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.data import IGNORED, LabelledSource, ParallelSource
from attnlab.devices import best_device
from attnlab.dynamics import agreement
from attnlab.loss import Loss
from attnlab.reading.timeline import record_step
from attnlab.training import Callback, CrossEntropy, Moment, Recipe, Schedule, Settings, train
from papers.ktiw.config import StudyConfig, study_config
from papers.ktiw.corpora import Corpus
from papers.ktiw.models.glove import fill_from_glove
from papers.ktiw.models.lstm import Classifier, Translator, freeze_probe
from papers.ktiw.models.lstm_config import ClassifierConfig, TranslatorConfig
from papers.ktiw.models.search import translate
from papers.ktiw.readings import BOS, EOS, PAD, Examples, examples, read

__all__ = [
    "ReadingsCallback",
    "check_glove",
    "chosen_runs",
    "initial_model",
    "make_model",
    "measured_on",
    "run_description",
    "run_study",
    "shortened",
]

RUNS = ("reference", "second", "uniform", "frozen", "linear")
SPLITS = ("valid", "train")
READINGS = "readings"
# The readings of each run's checkpoints that the comparison needs.
KEPT = {"second": ("alpha", "beta"), "uniform": ("beta",), "frozen": ("alpha",)}
# The splits that a run translates: xi needs the second seed's translations, A.1 those of both output layers.
TRANSLATED = {"second": SPLITS, "reference": ("valid",), "linear": ("valid",)}
# The source tokens of the sentence that a run's timeline shows.
SENTENCE = 12


@dataclass(frozen=True)
class LogOdds:
    """-log sigmoid of the right sign: the loss of a two-class model with one output."""

    name: str = "log-odds"

    def __call__(self, model: Any, output: Any, batch: Mapping[str, Any], step: int) -> Loss:
        sign = 2 * batch["labels"].to(output.logits.dtype) - 1
        return Loss(torch.nn.functional.softplus(-sign * output.logits).sum(), torch.tensor(len(sign)))


class ReadingsCallback(Callback):
    """At each evaluation: accuracy and loss on both splits, and alpha and beta kept for the comparison."""

    def __init__(self, run: str, on: dict[str, Examples], words: tuple[str, ...]) -> None:
        self.run, self.on, self.words = run, on, words

    def on_evaluation(self, moment: Moment) -> dict[str, float]:
        from safetensors.torch import save_file

        model: Any = moment.model
        values: dict[str, float] = {}
        kept: dict[str, Tensor] = {}
        for split, on in self.on.items():
            reading = read(model, on)
            values |= {f"{split}/accuracy": reading.accuracy, f"{split}/loss": reading.loss}
            own = agreement(reading.alpha, reading.beta, lengths=on.lengths).nanmean()
            if self.run != "uniform":
                values[f"{split}/alpha_beta_own"] = 100 * float(own)
            kept |= {f"{split}.{name}": getattr(reading, name).contiguous() for name in KEPT.get(self.run, ())}
        if kept:
            folder = moment.run_dir / READINGS
            folder.mkdir(exist_ok=True)
            save_file(kept, folder / f"step-{moment.step:08d}.safetensors")
        if isinstance(model, Translator):
            for split in TRANSLATED.get(self.run, ()):
                _translations(model, self.on[split], moment.run_dir / f"{split}-{moment.step:06d}.npz")
            _record_sentence(model, self.on["valid"], self.words, moment, values)
        return values


def _translations(model: Translator, on: Examples, path: Path) -> None:
    """Write greedy translations and their references as ids end to end; they are scored later, by sacrebleu."""
    rows, references = [], []
    for batch in on.batches:
        longest = 2 * batch["labels"].shape[1] + 5
        hypotheses = translate(
            model, batch["input_ids"], attention_mask=batch["attention_mask"], bos=BOS, eos=EOS, max_length=longest
        )
        rows += [row[: row.index(EOS)] if EOS in row else row for row in hypotheses.tolist()]
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
    batch, row = _long_enough(on)
    length, height = int(batch["attention_mask"][row].sum()), int((batch["labels"][row] != IGNORED).sum())
    sizes = {"input_ids": length, "attention_mask": length}
    cut = {name: t[row : row + 1, : sizes.get(name, height)] for name, t in batch.items()}
    reading = read(model, Examples(on.kind, [cut], torch.full((height,), length)))
    beta = reading.beta[:, :length].softmax(1)
    target = [words[i] for i in cut["labels"][0].tolist()]
    source = [words[i] for i in cut["input_ids"][0].tolist()]
    maps = {("cross", 0): reading.alpha[None, None, :, :length], ("cross", 1): beta[None, None]}
    shown = {name: value for name, value in values.items() if name.startswith("valid/") and "loss" not in name}
    record_step(moment.run_dir, moment.step, maps, tokens={"source": source, "target": target}, scalars=shown)


def _long_enough(on: Examples) -> tuple[dict[str, Tensor], int]:
    """The batch and the row of the first sentence of at least ``SENTENCE`` tokens, or else of the last sentence."""
    for batch in on.batches:
        rows = (batch["attention_mask"].sum(1) >= SENTENCE).nonzero()
        if len(rows):
            return batch, int(rows[0])
    return on.batches[-1], len(on.batches[-1]["labels"]) - 1


def run_study(
    corpus: Corpus, work: Path | str, *, config: StudyConfig | None = None, runs: tuple[str, ...] = RUNS
) -> Path:
    """Train the unfinished runs of a data set into ``work``/<data set>/<run>; returns the data set's folder."""
    config = config or study_config(corpus)
    folder = Path(work) / corpus.name
    folder.mkdir(parents=True, exist_ok=True)
    corpus = shortened(corpus, config.longest)
    on = measured_on(corpus, config)
    for run, seed in chosen_runs(corpus, config, runs).items():
        if not (folder / run / "result.json").exists():
            _train(corpus, config, run, seed, folder / run, on)
    return folder


def chosen_runs(corpus: Corpus, config: StudyConfig, runs: tuple[str, ...]) -> dict[str, int]:
    """The seed of each of ``runs`` that a data set of this kind has."""
    unknown = set(runs) - set(RUNS)
    if unknown:
        raise ValueError(f"unknown runs {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    # Table 10 is of classifiers, and they have no other output layer.
    absent = "linear" if corpus.kind == "classification" else "frozen"
    return {run: config.seed + number for number, run in enumerate(RUNS) if run in runs and run != absent}


def measured_on(corpus: Corpus, config: StudyConfig) -> dict[str, Examples]:
    """The examples of either split that agreements are measured on, always the same ones."""
    device = best_device()
    batch = 512 if device.type == "cuda" else 128
    return {split: examples(corpus, split, count=config.count, device=device, batch=batch) for split in SPLITS}


def shortened(corpus: Corpus, longest: int | None) -> Corpus:
    """A classification's texts cut at ``longest`` words; None leaves them as they are."""
    if longest is None or corpus.kind == "translation":
        return corpus
    train, valid = (([row[:longest] for row in rows], labels) for rows, labels in (corpus.train, corpus.valid))
    return replace(corpus, train=train, valid=valid)


def _train(corpus: Corpus, config: StudyConfig, run: str, seed: int, folder: Path, on: dict[str, Examples]) -> None:
    model = initial_model(corpus, run, seed, config)
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
    readings = ReadingsCallback(run, on, corpus.words)
    train(
        model,
        source,
        terms=terms,
        settings=settings,
        run_dir=folder,
        config=run_description(corpus, config, run, model),
        callbacks=[readings],
        resume=True,
    )


def run_description(corpus: Corpus, config: StudyConfig, run: str, model: Classifier | Translator) -> dict[str, Any]:
    """The config in a run's run.json, with the number of training examples, and of files only their names."""
    description = {"data": corpus.name, "run": run, "model": asdict(model.config), **asdict(config)}
    return {**description, "glove": _file_name(config.glove), "examples": len(corpus.train[0])}


def _file_name(path: str | None) -> str | None:
    return None if path is None else Path(path).name


def check_glove(corpus: Corpus, config: StudyConfig, folder: Path) -> None:
    """Refuse word vectors for a translator, and runs in ``folder`` that started from other embeddings."""
    if config.glove is not None and corpus.kind == "translation":
        raise ValueError(
            f"word vectors are for classifiers (A.8), and {corpus.name} is a translation; name data sets by --only"
        )
    asked = _file_name(config.glove)
    for path in sorted(folder.glob("*/run.json")):
        used = json.loads(path.read_text(encoding="utf-8"))["config"].get("glove")
        if used != asked:
            raise ValueError(
                f"{path.parent} started from {used or 'random embeddings'}, asked for {asked or 'random embeddings'}; "
                "name another folder by --work"
            )


def initial_model(corpus: Corpus, run: str, seed: int, config: StudyConfig) -> Classifier | Translator:
    """The model of a run before its first update: drawn from the seed, with word vectors where the config has them."""
    torch.manual_seed(seed)
    model = make_model(corpus, run, width=config.width)
    if config.glove is not None:
        known = fill_from_glove(model.tokens, config.glove, words=corpus.words)
        print(f"{corpus.name} {run}: {known} of {corpus.vocab} words start from {Path(config.glove).name}", flush=True)
    if run == "frozen":
        freeze_probe(model)
    return model


def make_model(corpus: Corpus, run: str, *, width: int = 256) -> Classifier | Translator:
    """The model of a run in A.8's sizes; ``uniform`` has uniform attention, ``linear`` a linear output layer."""
    attention = "uniform" if run == "uniform" else "softmax"
    if corpus.kind == "classification":
        return Classifier(ClassifierConfig(vocab=corpus.vocab, width=width, attention=attention))
    config = TranslatorConfig(vocab=corpus.vocab, width=width, dropout=0.5, attention=attention)
    return Translator(replace(config, output="linear") if run == "linear" else config)
