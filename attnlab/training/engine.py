"""The parts of a run: one update, one evaluation, one line of metrics, one checkpoint."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.training.callbacks import Callback, Moment
from attnlab.training.checkpoints import Checkpoint, discard, list_checkpoints, newest_good, prune, write_checkpoint
from attnlab.training.feed import Source, parts_of, to_device
from attnlab.training.launch import gather_objects
from attnlab.training.pending_metrics import PendingMetrics, TableTransfer, first_not_finite
from attnlab.training.progress import ProgressLine
from attnlab.training.run_state import RunState, check_saved
from attnlab.training.runs import RunError, RunFolder, say
from attnlab.training.settings import Settings, make_optimizer, parameter_groups
from attnlab.training.state import (
    full_state,
    load_state,
    random_state,
    seed_everything,
    set_random_state,
    undisturbed,
)
from attnlab.training.terms import Batch, Objective, Term, term_weight

__all__ = ["DivergedError", "Engine", "Evaluation", "RunState"]


@dataclass(frozen=True)
class Evaluation:
    """The loss terms' means over batches 0 .. ``batches`` - 1 of a source, in evaluation mode."""

    source: Source
    batches: int


class DivergedError(RunError):
    """A loss term or the gradient became NaN or infinite: ``step``, ``term`` and the last good ``checkpoint``."""

    def __init__(self, step: int, term: str, checkpoint: Path | None) -> None:
        self.step, self.term, self.checkpoint = step, term, checkpoint
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint had been written"
        super().__init__(
            f"{term} is not finite at step {step}; {kept}; a lower learning rate, a longer warm-up or clipping may help"
        )


class Engine:
    """The parts of one run; ``state`` says how far it has come."""

    def __init__(
        self,
        accelerator: Any,
        model: nn.Module,
        terms: Sequence[Term],
        settings: Settings,
        folder: RunFolder,
        forward: Callable[[nn.Module, Batch], Any] | None,
        callbacks: Sequence[Callback],
        evaluations: dict[str, Evaluation],
    ) -> None:
        self.accelerator, self.model, self.settings, self.folder = accelerator, model, settings, folder
        self.callbacks, self.evaluations = callbacks, evaluations
        self.sharded = accelerator.distributed_type.value == "FSDP"
        self.objective = Objective(model, terms, forward)
        if not self.sharded:
            self.objective.to(accelerator.device)
        # Of the whole model, before it is sharded: what a checkpoint must hold.
        self.tensors = {name: torch.empty_like(t, device="meta") for name, t in model.state_dict().items()}
        groups = parameter_groups(self.objective, settings.recipe)
        optimizer = make_optimizer(groups, settings.recipe, fused=accelerator.device.type == "cuda")
        self.prepared, wrapped = accelerator.prepare(self.objective, optimizer)
        # Accelerate's wrapper looks for an optional package on the disk at every step, and without a gradient scaler
        # does nothing else.
        self.optimizer: torch.optim.Optimizer = wrapped.optimizer
        if settings.compile:
            self.prepared.compile(dynamic=settings.dynamic, mode=settings.compile_mode)
        self.parameters = list(self.prepared.parameters())
        self.names = ["loss", *(term.name for term in terms)]
        self.state = RunState()
        self.metrics = b""
        self.progress = ProgressLine(settings.steps, quiet=True)
        self.began = self.saved_at = time.perf_counter()
        # Seconds that the last checkpoint took.
        self.saving = 0.0
        self.pending = PendingMetrics(accelerator, len(self.names) + 1)
        self.transfer: TableTransfer | None = None
        # The terms' weights as numbers and as a tensor.
        self.weights: tuple[list[float], Tensor] = ([], torch.empty(0))
        self.prepared.train()

    def update(self, parts: list[dict[str, Any]]) -> None:
        """One optimiser step on this rank's parts of the batch."""
        accelerator, step, recipe = self.accelerator, self.state.step, self.settings.recipe
        world = accelerator.num_processes
        weights = self.weights_at(step)
        counts = self.counts(parts, step) if len(parts) > 1 else None
        sums: Tensor | None = None
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            with nullcontext() if last else accelerator.no_sync(self.prepared):
                totals, own = self.prepared(part, step)
                if counts is None:
                    counts = self.over_all_ranks(own)
                # Gradients are averaged over ranks, but the loss is a sum over them.
                accelerator.backward(torch.dot(totals, weights * world / counts))
            sums = totals.detach() if sums is None else sums + totals.detach()
        norm = accelerator.clip_grad_norm_(self.parameters, recipe.clip or math.inf)
        lr = recipe.lr * self.settings.schedule.factor(step + 1, steps=self.settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        assert sums is not None
        assert counts is not None
        self.pending.add(weights=weights, totals=sums, counts=counts, norm=norm.detach().float())

    def counts(self, parts: list[dict[str, Any]], step: int) -> Tensor:
        """The count of each term over all parts on all ranks, before the first backward pass."""
        own = []
        for part in parts:
            known = self.objective.counts(part, step)
            if known is None:
                with torch.no_grad(), undisturbed(0):
                    known = self.prepared(part, step)[1]
            own.append(known.to(self.accelerator.device))
        return self.over_all_ranks(torch.stack(own).sum(0))

    def over_all_ranks(self, counts: Tensor) -> Tensor:
        """The counts' sums; a term with nothing to average over is 0 / 1."""
        counts = counts.detach()
        if self.accelerator.num_processes > 1:
            counts = self.accelerator.reduce(counts, "sum")
        return counts.where(counts > 0, 1.0)

    def weights_at(self, step: int) -> Tensor:
        """The terms' weights as a tensor, made anew only when one has changed."""
        weights = [term_weight(term, step) for term in self.objective.terms]
        if self.weights[0] != weights:
            self.weights = (weights, torch.tensor(weights, device=self.accelerator.device))
        return self.weights[1]

    def log(self) -> None:
        """Start copying the rows since the last train line; ``flush`` writes their means after the copy."""
        self.flush()
        self.transfer = TableTransfer(self.pending.table(), step=self.state.step, seconds=self.seconds())
        self.pending.restore([])
        self.flush(wait=False)

    def flush(self, *, wait: bool = True) -> None:
        """Write the train line that ``log`` began; without ``wait`` only if its numbers are already on the host."""
        transfer = self.transfer
        if transfer is None or not (wait or transfer.ready):
            return
        self.transfer = None
        table = transfer.table()
        self.check_finite(table, last=transfer.step)
        *losses, norm = table.double().mean(0).tolist()
        lr = self.settings.recipe.lr * self.settings.schedule.factor(transfer.step, steps=self.settings.steps)
        values = dict(zip(self.names, losses, strict=True)) | {"lr": lr, "grad_norm": norm}
        self.progress.loss = losses[0]
        self.record("train", values, step=transfer.step, seconds=transfer.seconds)

    def evaluate(self) -> bool:
        """Evaluate, record, and return whether the watched value is the best so far."""
        self.check_updates()
        state = self.state
        self.prepared.eval()
        values: dict[str, float] = {}
        with undisturbed(self.settings.seed):
            for name, evaluation in self.evaluations.items():
                means = self.means(evaluation)
                values |= {f"{name}/{key}": value for key, value in zip(self.names, means, strict=True)}
            for callback in self.callbacks:
                moment = Moment(state.step, self.model, self.folder.path, dict(values))
                values |= callback.on_evaluation(moment) or {}
        self.optimizer.zero_grad(set_to_none=True)
        self.prepared.train()
        state.evaluated = {name: float(value) for name, value in values.items()}
        self.record("eval", state.evaluated, step=state.step, seconds=self.seconds())
        self.progress.evaluation(state.step, state.evaluated)
        return self.improved()

    def improved(self) -> bool:
        """Whether the watched value of the last evaluation is the best so far; ``patience`` may stop the run."""
        state, settings = self.state, self.settings
        if settings.watch is None:
            return False
        if settings.watch not in state.evaluated:
            names = ", ".join(state.evaluated)
            raise ValueError(f"watch={settings.watch!r} is not among the evaluation's values: {names}")
        value, best = state.evaluated[settings.watch], state.best_value
        better = best is None or (value > best if settings.maximise else value < best)
        if better and math.isfinite(value):
            state.best_step, state.best_value, state.stale = state.step, value, 0
            return True
        state.stale += 1
        state.stopped = settings.patience is not None and state.stale >= settings.patience
        return False

    @torch.no_grad()
    def means(self, evaluation: Evaluation) -> list[float]:
        """The weighted loss and each term, averaged over the evaluation's batches on all ranks."""
        accelerator = self.accelerator
        sums = torch.zeros(2, len(self.names) - 1, device=accelerator.device, dtype=torch.float32)
        for index in range(evaluation.batches):
            batch = evaluation.source.batch(index)
            [part] = parts_of(batch, rank=accelerator.process_index, world=accelerator.num_processes)
            sums += torch.stack(self.prepared(to_device(part, accelerator.device), self.state.step))
        totals, counts = accelerator.reduce(sums, "sum")
        means = totals / counts.where(counts > 0, 1.0)
        return torch.cat([(self.weights_at(self.state.step) * means).sum()[None], means]).tolist()

    def record(self, kind: str, values: Mapping[str, float], *, step: int, seconds: float) -> None:
        """A line of metrics.jsonl, and the same to the trackers."""
        if self.accelerator.is_main_process:
            self.folder.record(step=step, kind=kind, seconds=seconds, values=values)
        if self.accelerator.trackers:
            named = {name if "/" in name else f"{kind}/{name}": value for name, value in values.items()}
            self.accelerator.log(named, step=step)

    def check_updates(self) -> None:
        """Raise if a term or the gradient was not finite in an update so far."""
        self.flush()
        self.check_finite(self.pending.table().cpu(), last=self.state.step)

    def check_finite(self, table: Tensor, *, last: int) -> None:
        """Raise if these rows, which end with step ``last``, are not finite."""
        place = first_not_finite(table, last=last)
        if place is not None:
            step, column = place
            kept = list_checkpoints(self.folder.path)
            raise DivergedError(step, [*self.names, "the gradient"][column], kept[-1] if kept else None)

    def checkpoint(self) -> None:
        """Save all that a resumed run needs."""
        self.check_updates()
        start = time.perf_counter()
        accelerator, state = self.accelerator, self.state
        model, optimizer = full_state(self.prepared, self.optimizer, sharded=self.sharded)
        generators = gather_objects([random_state()], accelerator)
        state.pending = self.pending.table().tolist()
        if accelerator.is_main_process:
            with self.folder.explain(f"save the checkpoint of step {state.step}"):
                metrics = self.folder.sync_metrics()
                write_checkpoint(
                    self.folder.checkpoints,
                    step=state.step,
                    model=model,
                    optimizer=optimizer,
                    state={
                        "run": self.folder.identity(),
                        "progress": state.as_json() | {"seconds": self.seconds()},
                        "metrics_bytes": len(metrics),
                        "metrics_sha256": hashlib.sha256(metrics).hexdigest(),
                        "random": generators,
                        "callbacks": [callback.state() for callback in self.callbacks],
                    },
                    metrics=metrics,
                )
                prune(self.folder.path, keep=self.settings.keep)
        accelerator.wait_for_everyone()
        self.saved_at = time.perf_counter()
        self.saving = self.saved_at - start

    def overdue(self) -> bool:
        """Whether the last checkpoint is older than the settings allow, and saving takes at most 1/20 of the time."""
        limit = self.settings.checkpoint_seconds
        return limit is not None and time.perf_counter() - self.saved_at > max(limit, 20 * self.saving)

    def restore(self) -> None:
        """Go back to the newest good checkpoint, if there is one."""
        accelerator = self.accelerator
        saved = newest_good(self.folder.path, check=self.check_saved)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            for path in list_checkpoints(self.folder.path):
                if saved is None or path.name > saved.path.name:
                    discard(path)
            say(
                f"resuming from {saved.path}" if saved else f"no checkpoint in {self.folder.path}; starting from step 0"
            )
        if saved is None:
            return
        load_state(self.prepared, self.optimizer, saved.model, saved.optimizer, sharded=self.sharded)
        rank, generators = accelerator.process_index, saved.state["random"]
        if rank < len(generators):
            set_random_state(generators[rank])
        else:
            seed_everything(self.settings.seed + rank + saved.step)
        self.state = RunState.from_json(saved.state["progress"])
        self.metrics = (
            saved.metrics if saved.metrics is not None else self.earlier_metrics(saved.state["metrics_bytes"])
        )
        self.pending.restore(self.state.pending)
        for callback, memory in zip(self.callbacks, saved.state["callbacks"], strict=True):
            callback.load_state(memory)

    def check_saved(self, saved: Checkpoint) -> None:
        """Raise if this run cannot go on from the checkpoint."""
        check_saved(
            saved,
            identity=self.folder.identity(),
            tensors=self.tensors,
            optimizer=self.settings.recipe.kind,
            callbacks=len(self.callbacks),
            columns=len(self.names) + 1,
        )

    def earlier_metrics(self, size: int) -> bytes:
        """The first ``size`` bytes of metrics.jsonl, of which a checkpoint of an earlier version holds no copy."""
        file = self.folder.path / "metrics.jsonl"
        present = file.read_bytes()[:size] if file.exists() else b""
        if len(present) < size:
            say(f"{file} has {len(present)} bytes where its checkpoint saw {size}; the lines that are lost stay lost")
            present = present[: present.rfind(b"\n") + 1]
        return present

    def agree(self, *flags: bool, exchange: bool) -> tuple[bool, ...]:
        """Which of the flags a rank has raised; several ranks know of each other only after an ``exchange``."""
        if self.accelerator.num_processes == 1:
            return flags
        if not exchange:
            return (False,) * len(flags)
        raised = torch.tensor([float(flag) for flag in flags], device=self.accelerator.device)
        return tuple(bool(flag) for flag in self.accelerator.reduce(raised, "sum").tolist())

    def seconds(self) -> float:
        """Time spent on this run so far, the time before it was resumed included."""
        return self.state.seconds + time.perf_counter() - self.began

    def synchronise(self) -> None:
        """Wait until the device has finished, so that measured times include its work."""
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
