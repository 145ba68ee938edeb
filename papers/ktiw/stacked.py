"""The runs of a data set trained as one stacked model, into the run folders that ``run_study`` would make.

On a GPU each update is a CUDA graph, one for each length that batches are padded to, so the paper's small batches keep
the GPU busy. Each run has batches of its own. The batches of one step have similar lengths, so that little is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

from attnlab.data import IGNORED
from attnlab.data.parallel import padded
from attnlab.devices import best_device
from attnlab.training import Moment, Recipe
from attnlab.training.checkpoints import write_checkpoint
from attnlab.training.runs import RunFolder
from attnlab.training.side_by_side import Clock, Learner, lanes, train_learners
from papers.ktiw.config import StudyConfig
from papers.ktiw.corpora import Corpus
from papers.ktiw.models.lstm import Classifier, Translator, attention_parameters
from papers.ktiw.models.stacked_lstm import StackedClassifier, StackedTranslator, stack_classifiers, stack_translators
from papers.ktiw.readings import BOS, PAD, as_read
from papers.ktiw.study import (
    ReadingsCallback,
    chosen_runs,
    initial_model,
    measured_on,
    run_description,
    shortened,
)

__all__ = ["orders", "run_stacked"]

WATCHED = "valid/accuracy"


def run_stacked(
    corpus: Corpus,
    work: Path | str,
    *,
    config: StudyConfig,
    runs: tuple[str, ...],
    seconds: float | None = None,
) -> Path:
    """Train the runs at once into ``work``/<data set>/<run>; after ``seconds`` they stop, evaluated once more."""
    clock = Clock(config.steps, seconds)
    folder = Path(work) / corpus.name
    corpus = shortened(corpus, config.longest)
    seeds = chosen_runs(corpus, config, runs)
    if len(seeds) > 1 and "linear" in seeds:
        raise ValueError("the linear-output model has other parameters, so it is stacked apart; run it alone")
    models: list[Any] = [initial_model(corpus, run, seed, config).to(best_device()) for run, seed in seeds.items()]
    stack: Any = stack_classifiers if corpus.kind == "classification" else stack_translators
    stacked = stack(models).to(best_device())
    learner = _StackedLearner(stacked, config, _frozen(list(seeds), models[0]))
    on = measured_on(corpus, config)
    members = [
        _Member(folder / run, run, model, ReadingsCallback(run, on, corpus.words))
        for run, model in zip(seeds, models, strict=True)
    ]

    def evaluate(step: int) -> None:
        for i, member in enumerate(members):
            stacked.copy_member(i, member.model)
            member.evaluate(step, clock.elapsed())

    with ExitStack() as held:
        for member, seed in zip(members, seeds.values(), strict=True):
            held.enter_context(member.folder.hold())
            description = run_description(corpus, config, member.run, member.model)
            member.begin(seed, {**description, "stacked": list(seeds), "tf32": torch.backends.cuda.matmul.allow_tf32})
        source = _StackedSource(_Table(corpus), config, members=len(members))
        evaluate_at = frozenset(config.evaluate_at())
        train_learners([(learner, source)], clock, pauses=evaluate_at, pause_at_end=True, on_pause=evaluate)
        for member in members:
            member.finish()
    return folder


def orders(lengths: np.ndarray, *, batch: int, members: int, epoch: int, seed: int = 0) -> np.ndarray:
    """The examples (batches, members, batch) of an epoch: a member has its own, and a batch has similar lengths.

    Lengths are disturbed by up to a tenth, so that batches differ between epochs. Examples that do not fill a batch are
    left out of the epoch.
    """
    n = max(1, len(lengths) // batch)
    by_member = []
    for member in range(members):
        rng = np.random.default_rng([seed, epoch, 1 + member])
        kept = np.resize(rng.permutation(len(lengths)), n * batch)
        noisy = lengths[kept] * rng.uniform(0.9, 1.1, len(kept))
        by_member.append(kept[noisy.argsort(kind="stable")].reshape(n, batch))
    shuffled = np.random.default_rng([seed, epoch, 0]).permutation(n)
    return np.stack(by_member, 1)[shuffled]


class _StackedSource:
    """The batches of all members stacked, and padded to one of few widths."""

    def __init__(self, table: _Table, config: StudyConfig, *, members: int) -> None:
        self.table, self.config, self.members = table, config, members
        self.epoch, self.order = -1, np.zeros((0, members, config.batch), np.int64)

    def batch(self, step: int) -> dict[str, Tensor]:
        batches = max(1, len(self.table.lengths) // self.config.batch)
        epoch, at = divmod(step, batches)
        if epoch != self.epoch:
            size = {"batch": self.config.batch, "members": self.members}
            self.order = orders(self.table.lengths, **size, epoch=epoch, seed=self.config.seed)
            self.epoch = epoch
        chosen = self.order[at]
        return self.table.batch(chosen, _rounded_up(int(self.table.lengths[chosen].max())))


class _Table:
    """The training examples, padded; a batch is gathered by their numbers."""

    def __init__(self, corpus: Corpus) -> None:
        sources, targets = as_read(corpus, "train")
        source_lengths = np.array([len(row) for row in sources])
        sides = {"input_ids": padded(sources, PAD)}
        if corpus.kind == "classification":
            sides["labels"] = torch.as_tensor(targets)
            self.lengths = source_lengths
        else:
            sides["decoder_input_ids"] = padded([np.insert(row[:-1], 0, BOS) for row in targets], PAD)
            sides["labels"] = padded(targets, IGNORED)
            self.lengths = np.maximum(source_lengths, [len(row) for row in targets])
        self.sides = {**sides, "lengths": torch.from_numpy(source_lengths)}

    def batch(self, chosen: np.ndarray, width: int) -> dict[str, Tensor]:
        """The chosen examples (members, batch), cut or filled up to ``width`` positions."""
        rows = torch.from_numpy(chosen)
        fill = {"input_ids": PAD, "decoder_input_ids": PAD, "labels": IGNORED}
        batch = {}
        for name, side in self.sides.items():
            part = side[rows] if side.ndim == 1 else side[:, :width][rows]
            if side.ndim > 1 and part.shape[2] < width:
                part = nn.functional.pad(part, (0, width - part.shape[2]), value=fill[name])
            batch[name] = part
        return batch


class _StackedLearner(Learner):
    """The mean loss of each member's targets. Members share no parameters, so the sum trains each by its own loss."""

    model: StackedClassifier | StackedTranslator

    def __init__(self, stacked: StackedClassifier | StackedTranslator, config: StudyConfig, frozen: _Frozen) -> None:
        recipe = Recipe(kind="adam", lr=config.lr, weight_decay=0.0, clip=None)
        [(stream, pool)] = lanes(1)
        super().__init__(stacked, None, recipe, stream=stream, pool=pool, half=False)
        self.frozen = frozen

    def objective(self, batch: dict[str, Tensor]) -> Tensor:
        return super().objective(batch).sum()

    def output_loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        y = batch["labels"]
        if isinstance(self.model, StackedClassifier):
            return softplus((1 - 2 * y) * output).mean(1)
        nll = cross_entropy(output.flatten(0, -2), y.flatten(), ignore_index=IGNORED, reduction="none")
        return nll.view(y.shape).sum((1, 2)) / (y != IGNORED).sum((1, 2))

    def prepare_gradients(self) -> None:
        """Frozen members keep the parameters that they do not learn."""
        for name in self.frozen.names:
            grad = self.model.stacked(name).grad
            if grad is not None:
                for member in self.frozen.members:
                    grad[member].zero_()


@dataclass(frozen=True)
class _Frozen:
    """Members that learn nothing but attention, and the parameters they do not learn (A.6)."""

    members: Sequence[int]
    names: Sequence[str]


def _frozen(runs: Sequence[str], model: Any) -> _Frozen:
    members = [i for i, run in enumerate(runs) if run == "frozen"]
    learned = {id(p) for p in attention_parameters(model)}
    names = [name for name, p in model.named_parameters() if id(p) not in learned] if members else []
    return _Frozen(members, names)


class _Member:
    """One run of the stack, with its model and its run folder, as ``attnlab.training.train`` would leave it."""

    def __init__(self, path: Path, run: str, model: Classifier | Translator, readings: ReadingsCallback) -> None:
        self.folder, self.run, self.model, self.readings = RunFolder(path), run, model, readings
        self.best: tuple[float, int, dict[str, Tensor]] | None = None
        self.last: tuple[int, dict[str, float]] = (0, {})

    def begin(self, seed: int, description: dict[str, Any]) -> None:
        """Write run.json; an unfinished run in this folder is begun again."""
        (self.folder.path / "run.json").unlink(missing_ok=True)
        self.folder.describe(name=self.run, seed=seed, config=description, resume=False)
        self.folder.start_metrics()

    def evaluate(self, step: int, seconds: float) -> None:
        """Record the readings of the model as it is now."""
        model = self.model.eval()
        values = self.readings.on_evaluation(Moment(step, model, self.folder.path, {}))
        self.last = step, values
        self.folder.record(step=step, kind="eval", seconds=seconds, values=values)
        print(f"{self.run} {step} {seconds:.0f} s " + " ".join(f"{k} {v:.4g}" for k, v in values.items()), flush=True)
        if self.best is None or values[WATCHED] > self.best[0]:
            self.best = (values[WATCHED], step, {k: t.detach().cpu().clone() for k, t in model.state_dict().items()})

    def finish(self) -> None:
        """Write the best checkpoint and result.json."""
        assert self.best is not None
        _, best, weights = self.best
        state = {"progress": {"best_step": best}}
        write_checkpoint(self.folder.checkpoints, step=best, model=weights, optimizer={}, state=state)
        step, values = self.last
        self.folder.finish({"name": self.run, "metrics": values, "step": step})


def _rounded_up(width: int) -> int:
    """The width that a batch is padded to, a multiple of 8, or of 32 beyond 64: each width needs a graph."""
    unit = 8 if width <= 64 else 32
    return -(-width // unit) * unit
