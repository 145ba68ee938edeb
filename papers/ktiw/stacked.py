"""The runs of a data set trained as one stacked model, into the run folders that ``run_study`` would make.

On a GPU each update is a CUDA graph, one for each length that batches are padded to; so the paper's small batches do
not leave it waiting. Each run has batches of its own; those of one step are of like length, or most would be padding.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
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
from attnlab.provenance import provenance, write_json
from attnlab.training import Moment
from attnlab.training.checkpoints import write_checkpoint
from papers.ktiw.corpora import Corpus
from papers.ktiw.graphs import captured_update
from papers.ktiw.models.lstm import attention_parameters, freeze_probe
from papers.ktiw.models.stacked_lstm import StackedClassifier, StackedTranslator, stack_classifiers, stack_translators
from papers.ktiw.readings import BOS, EOS, PAD
from papers.ktiw.study import (
    StudyConfig,
    Watch,
    chosen_runs,
    make_model,
    measured_on,
    shortened,
    told_of,
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
    began = time.perf_counter()
    folder = Path(work) / corpus.name
    corpus = shortened(corpus, config.longest)
    seeds = chosen_runs(corpus, config, runs)
    if len(seeds) > 1 and "linear" in seeds:
        raise ValueError("the linear-output model has other parameters, so it is stacked apart; run it alone")
    device = best_device()
    models = []
    for run, seed in seeds.items():
        torch.manual_seed(seed)
        models.append(make_model(corpus, run, width=config.width).to(device))
        if run == "frozen":
            freeze_probe(models[-1])
    stack: Any = stack_classifiers if corpus.kind == "classification" else stack_translators
    stacked = stack(models).to(device).train()
    training = _Training(stacked, _Table(corpus, device), config, _frozen(list(seeds), models[0]))
    places = [_Place(folder / run, run, seed) for run, seed in seeds.items()]
    on = measured_on(corpus, config)
    watches = {place.run: Watch(place.run, on, corpus.words) for place in places}
    for place, model in zip(places, models, strict=True):
        told = told_of(corpus, config, place.run, model)
        place.begin({**told, "stacked": list(seeds), "tf32": torch.backends.cuda.matmul.allow_tf32})
    evaluations, epoch = set(config.evaluate_at()), 0
    batches: Iterator[np.ndarray] = iter(())
    for step in range(config.steps + 1):
        late = seconds is not None and time.perf_counter() - began > seconds
        if step in evaluations or late:
            for i, (place, model) in enumerate(zip(places, models, strict=True)):
                stacked.copy_member(i, model)
                place.evaluate(watches[place.run], model.eval(), step, time.perf_counter() - began)
        if late or step == config.steps:
            break
        chosen = next(batches, None)
        if chosen is None:
            made = orders(
                training.table.lengths, batch=config.batch, members=len(places), epoch=epoch, seed=config.seed
            )
            batches, epoch = iter(made), epoch + 1
            chosen = next(batches)
        training.update(chosen)
    for place in places:
        place.finish()
    return folder


def orders(lengths: np.ndarray, *, batch: int, members: int, epoch: int, seed: int = 0) -> np.ndarray:
    """The examples (batches, members, batch) of an epoch: each member's own, those of a batch of like length.

    Lengths are disturbed by a tenth, so that no batch recurs; what does not fill a batch is left for another epoch.
    """
    n = max(1, len(lengths) // batch)
    found = []
    for member in range(members):
        rng = np.random.default_rng([seed, epoch, 1 + member])
        kept = np.resize(rng.permutation(len(lengths)), n * batch)
        noisy = lengths[kept] * rng.uniform(0.9, 1.1, len(kept))
        found.append(kept[noisy.argsort(kind="stable")].reshape(n, batch))
    shuffled = np.random.default_rng([seed, epoch, 0]).permutation(n)
    return np.stack(found, 1)[shuffled]


class _Table:
    """The training examples, padded, on the device; a batch is gathered by their numbers."""

    def __init__(self, corpus: Corpus, device: torch.device) -> None:
        x, y = corpus.train
        if corpus.kind == "classification":
            sides = {"input_ids": padded(x, PAD), "labels": torch.as_tensor(y)}
            source = np.array([len(row) for row in x])
            self.lengths = source
        else:
            sides = {
                "input_ids": padded([np.append(row, EOS) for row in x], PAD),
                "decoder_input_ids": padded([np.insert(row, 0, BOS) for row in y], PAD),
                "labels": padded([np.append(row, EOS) for row in y], IGNORED),
            }
            source = np.array([1 + len(row) for row in x])
            self.lengths = np.maximum(source, [1 + len(row) for row in y])
        self.sides = {name: t.to(device) for name, t in sides.items()} | {
            "lengths": torch.from_numpy(source).to(device)
        }
        self.device = device

    def batch(self, chosen: np.ndarray, width: int) -> dict[str, Tensor]:
        """The chosen examples (members, batch), cut or filled up to ``width`` positions."""
        at = torch.from_numpy(chosen).to(self.device, non_blocking=True)
        fill = {"input_ids": PAD, "decoder_input_ids": PAD, "labels": IGNORED}
        found = {}
        for name, side in self.sides.items():
            part = side[at] if side.ndim == 1 else side[:, :width][at]
            if side.ndim > 1 and part.shape[2] < width:
                part = nn.functional.pad(part, (0, width - part.shape[2]), value=fill[name])
            found[name] = part
        return found


class _Training:
    """Updates of a stacked model; on a GPU a graph for each width of batches."""

    def __init__(
        self, stacked: StackedClassifier | StackedTranslator, table: _Table, config: StudyConfig, frozen: _Frozen
    ) -> None:
        self.stacked, self.table, self.frozen = stacked, table, frozen
        self.graph = table.device.type == "cuda"
        self.adam = torch.optim.Adam(
            stacked.parameters(), lr=config.lr, fused=self.graph or None, capturable=self.graph
        )
        self.pool = torch.cuda.graph_pool_handle() if self.graph else None
        self.captured: dict[int, tuple[dict[str, Tensor], Callable[[], Tensor]]] = {}

    def update(self, chosen: np.ndarray) -> None:
        """One step on these examples (members, batch)."""
        width = _rounded_up(int(self.table.lengths[chosen].max()))
        batch = self.table.batch(chosen, width)
        if not self.graph:
            self._update(batch)
            return
        if width not in self.captured:
            work = captured_update(self.stacked, self.adam, lambda: self._update(batch), pool=self.pool)
            self.captured[width] = (batch, work)
        held, work = self.captured[width]
        for name, t in batch.items():
            if held[name] is not t:
                held[name].copy_(t)
        work()

    def _update(self, batch: dict[str, Tensor]) -> Tensor:
        self.adam.zero_grad(set_to_none=True)
        loss = _losses(self.stacked, batch).sum()
        loss.backward()
        for name in self.frozen.names:
            grad = self.stacked.stacked(name).grad
            if grad is not None:
                for member in self.frozen.members:
                    grad[member].zero_()
        self.adam.step()
        return loss.detach()


def _losses(stacked: StackedClassifier | StackedTranslator, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss of each member's targets; members share no parameters, so their sum trains each by its own."""
    if isinstance(stacked, StackedClassifier):
        logits = stacked(batch["input_ids"], lengths=batch["lengths"])
        return softplus((1 - 2 * batch["labels"]) * logits).mean(1)
    y = batch["labels"]
    logits = stacked(batch["input_ids"], decoder_input_ids=batch["decoder_input_ids"], lengths=batch["lengths"])
    nll = cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=IGNORED, reduction="none")
    return nll.view(y.shape).sum((1, 2)) / (y != IGNORED).sum((1, 2))


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


class _Place:
    """The run folder of a member, as ``attnlab.training.train`` would leave it."""

    def __init__(self, folder: Path, run: str, seed: int) -> None:
        self.folder, self.run, self.seed = folder, run, seed
        self.best: tuple[float, int, dict[str, Tensor]] | None = None
        self.last: dict[str, Any] = {}

    def begin(self, told: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "metrics.jsonl").write_text("", encoding="utf-8")
        write_json(self.folder / "run.json", {"name": self.run, "config": told, "seed": self.seed, **provenance()})

    def evaluate(self, watch: Watch, model: nn.Module, step: int, seconds: float) -> None:
        values = watch.on_evaluation(Moment(step, model, self.folder, {}))
        self.last = {"step": step, "kind": "eval", "seconds": round(seconds, 3), "values": values}
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.last) + "\n")
        print(f"{self.run} {step} {seconds:.0f} s " + " ".join(f"{k} {v:.4g}" for k, v in values.items()), flush=True)
        if self.best is None or values[WATCHED] > self.best[0]:
            self.best = (values[WATCHED], step, {k: t.detach().cpu().clone() for k, t in model.state_dict().items()})

    def finish(self) -> None:
        assert self.best is not None
        _, step, state = self.best
        (self.folder / "checkpoints").mkdir(exist_ok=True)
        write_checkpoint(
            self.folder / "checkpoints", step=step, model=state, optimizer={}, state={"progress": {"best_step": step}}
        )
        write_json(
            self.folder / "result.json", {"name": self.run, "metrics": self.last["values"], "step": self.last["step"]}
        )


def _rounded_up(width: int) -> int:
    """A width that few graphs serve: a multiple of 8, or of 32 beyond 64."""
    unit = 8 if width <= 64 else 32
    return -(-width // unit) * unit
