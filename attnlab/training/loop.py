"""The loop that trains every model here: any module, any source of batches, any loss terms, through Accelerate."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.training.callbacks import Callback, Moment
from attnlab.training.checkpoints import (
    discard,
    list_checkpoints,
    load_model,
    newest_good,
    prune,
    sweep,
    write_checkpoint,
)
from attnlab.training.feed import Feed, Source, parts_of, to_device
from attnlab.training.progress import Progress
from attnlab.training.runs import RunError, RunFolder, say
from attnlab.training.settings import Settings, make_optimizer
from attnlab.training.state import (
    full_state,
    load_state,
    random_state,
    seed_everything,
    set_random_state,
    undisturbed,
)
from attnlab.training.terms import Batch, Objective, Term, term_weight

__all__ = ["DivergedError", "Evaluation", "Interrupted", "Outcome", "train"]


@dataclass(frozen=True)
class Evaluation:
    """The loss terms' means over batches 0 .. ``batches`` - 1 of a source, in evaluation mode."""

    source: Source
    batches: int


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its last evaluation, its best checkpoint, and how the time was spent."""

    step: int
    metrics: dict[str, float]
    best_step: int | None
    best_value: float | None
    stopped_early: bool
    timing: dict[str, float]
    run_dir: Path


class DivergedError(RunError):
    """A loss term or the gradient became NaN or infinite: ``step``, ``term`` and the last good ``checkpoint``."""

    def __init__(self, step: int, term: str, checkpoint: Path | None) -> None:
        self.step, self.term, self.checkpoint = step, term, checkpoint
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint had been written"
        super().__init__(
            f"{term} is not finite at step {step}; {kept}; a lower learning rate, a longer warm-up or clipping may help"
        )


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or a termination signal, after a checkpoint was saved."""


@dataclass
class _Standing:
    """What a checkpoint remembers beside parameters and generators."""

    step: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_value: float | None = None
    stale: int = 0
    stopped: bool = False
    evaluated: dict[str, float] = field(default_factory=dict)
    # Sums since the last train line: loss, terms, gradient norm.
    window: list[float] = field(default_factory=list)
    window_steps: int = 0


def train(
    model: nn.Module,
    source: Source,
    *,
    terms: Sequence[Term],
    settings: Settings,
    run_dir: Path | str,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    evaluations: Mapping[str, Evaluation] | None = None,
    callbacks: Sequence[Callback] = (),
    forward: Callable[[nn.Module, Batch], Any] | None = None,
    resume: bool = False,
    track: str | None = None,
) -> Outcome:
    """Train ``model`` in place on ``source`` and leave a run folder behind.

    The loss is the sum over terms of weight(step) * total / count, with counts taken over the whole global batch. The
    model is called with the entries of the batch that its ``forward`` names (not labels), or through ``forward(model,
    batch)``. ``resume=True`` goes on from the newest good checkpoint, and starts afresh where there is none; a finished
    run is not run again. ``track`` names an Accelerate tracker, such as tensorboard.
    """
    run_dir = Path(run_dir)
    accelerator = _accelerator(settings, run_dir, track)
    main = accelerator.is_main_process
    folder = RunFolder(run_dir)
    name = name or run_dir.name
    with folder.hold() if main else nullcontext():
        if main:
            folder.describe(
                name=name,
                seed=settings.seed,
                config={**(config or {}), "training": settings.as_dict()},
                processes=accelerator.num_processes,
                resume=resume,
            )
            sweep(run_dir)
        accelerator.wait_for_everyone()
        if folder.result is not None:
            return _finished(model, folder)
        seed_everything(settings.seed + accelerator.process_index)

        loop = _Loop(accelerator, model, terms, settings, folder, forward, callbacks, dict(evaluations or {}))
        if resume:
            loop.restore()
        at = loop.at
        if main:
            folder.start_metrics(loop.metrics_bytes)
        if track:
            accelerator.init_trackers(name, config=_flat(settings.as_dict()))

        evaluate_at = frozenset(settings.evaluate_at)
        steps = range(at.step, at.step if at.stopped else settings.steps)
        progress = loop.progress = Progress(settings.steps, start=at.step, quiet=not main)
        ranks = {"rank": accelerator.process_index, "world": accelerator.num_processes}
        feed = Feed(
            source,
            steps,
            device=accelerator.device,
            accumulate=settings.accumulate,
            ahead=settings.prefetch,
            **ranks,
        )
        started = time.perf_counter()
        try:
            with feed, _interrupts() as interrupted:
                if at.step == 0 and 0 in evaluate_at and not at.evaluated and loop.evaluate():
                    loop.checkpoint()
                for parts in feed:
                    loop.update(parts)
                    at.step += 1
                    for callback in callbacks:
                        callback.on_step(Moment(at.step, model, run_dir, {}))
                    logging = at.step % settings.log_every == 0 or at.step == settings.steps
                    if logging:
                        loop.log()
                    improved = at.step in evaluate_at and loop.evaluate()
                    interrupt = loop.agree(interrupted.is_set(), now=logging)
                    due = settings.checkpoint_every and at.step % settings.checkpoint_every == 0
                    if due or improved or interrupt or at.stopped or at.step == settings.steps:
                        loop.checkpoint()
                    progress.step(at.step)
                    if interrupt:
                        raise _interruption(loop)
                    if at.stopped:
                        break
        finally:
            progress.close()
        loop.synchronise()
        elapsed = time.perf_counter() - started
        done = at.step - steps.start
        timing = {
            "seconds": round(loop.seconds(), 3),
            "steps_per_second": done / elapsed if done else 0.0,
            "waiting_share": feed.waited / elapsed if done else 0.0,
        }
        for tracker in accelerator.trackers:
            tracker.finish()
        outcome = loop.outcome(timing)
        if main:
            folder.finish({"name": name, **{k: v for k, v in vars(outcome).items() if k != "run_dir"}})
        accelerator.wait_for_everyone()
    return outcome


class _Loop:
    """The moving parts of one run."""

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
        optimizer = make_optimizer(self.objective, settings.recipe, fused=accelerator.device.type == "cuda")
        self.prepared, self.optimizer = accelerator.prepare(self.objective, optimizer)
        if settings.compile:
            self.prepared.compile(dynamic=settings.dynamic)
        self.parameters = list(self.prepared.parameters())
        self.names = ["loss", *(term.name for term in terms)]
        self.at = _Standing()
        self.metrics_bytes = 0
        self.progress = Progress(settings.steps, quiet=True)
        self.began = time.perf_counter()
        # These live on the device and are read only when a line is written, so that the device never waits for them.
        self.window = torch.zeros(len(self.names) + 1, device=accelerator.device)
        self.first_bad = torch.full_like(self.window, 2**31, dtype=torch.int64)
        self.weights: tuple[list[float], Tensor] = ([], self.window)
        self.prepared.train()

    def update(self, parts: list[dict[str, Any]]) -> None:
        """One optimiser step on this rank's parts of the batch."""
        accelerator, step, recipe = self.accelerator, self.at.step, self.settings.recipe
        world = accelerator.num_processes
        weights = self.weights_at(step)
        counts = self.counts(parts, step) if len(parts) > 1 else None
        means = torch.zeros(len(weights), device=accelerator.device)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            with nullcontext() if last else accelerator.no_sync(self.prepared):
                totals, own = self.prepared(part, step)
                if counts is None:
                    counts = _at_least_one(accelerator.reduce(own.detach(), "sum"))
                share = totals / counts
                # Ranks average their gradients; the sum over ranks is wanted.
                accelerator.backward((weights * share).sum() * world)
            means += share.detach()
        norm = accelerator.clip_grad_norm_(self.parameters, recipe.clip or math.inf)
        lr = recipe.lr * self.settings.schedule.factor(step + 1, steps=self.settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        values = torch.cat([(weights * means).sum()[None], means, norm.detach().reshape(1).float()])
        self.window += values
        self.first_bad = torch.where(values.isfinite(), self.first_bad, self.first_bad.clamp(max=step + 1))
        self.at.window_steps += 1

    def counts(self, parts: list[dict[str, Any]], step: int) -> Tensor:
        """What each term is averaged over in all parts on all ranks, known before the first backward pass."""
        own = []
        for part in parts:
            known = self.objective.counts(part, step)
            if known is None:
                with torch.no_grad(), undisturbed(0):
                    known = self.prepared(part, step)[1]
            own.append(known.to(self.accelerator.device))
        return _at_least_one(self.accelerator.reduce(torch.stack(own).sum(0), "sum"))

    def weights_at(self, step: int) -> Tensor:
        """The terms' weights as a tensor, made anew only when one has changed."""
        weights = [term_weight(term, step) for term in self.objective.terms]
        if self.weights[0] != weights:
            self.weights = (weights, torch.tensor(weights, device=self.accelerator.device))
        return self.weights[1]

    def log(self) -> None:
        """Write the means since the last train line."""
        self.check()
        steps = max(1, self.at.window_steps)
        *losses, norm = (v / steps for v in self.window_sums())
        lr = self.settings.recipe.lr * self.settings.schedule.factor(self.at.step, steps=self.settings.steps)
        values = dict(zip(self.names, losses, strict=True)) | {"lr": lr, "grad_norm": norm}
        self.progress.loss = losses[0]
        self.record("train", values)
        self.window.zero_()
        self.at.window_steps = 0

    def evaluate(self) -> bool:
        """Evaluate, record, and tell whether the watched value is the best so far."""
        self.check()
        at, settings = self.at, self.settings
        self.prepared.eval()
        values: dict[str, float] = {}
        with undisturbed(settings.seed):
            for name, evaluation in self.evaluations.items():
                means = self.means(evaluation)
                values |= {f"{name}/{key}": value for key, value in zip(self.names, means, strict=True)}
            for callback in self.callbacks:
                moment = Moment(at.step, self.model, self.folder.path, dict(values))
                values |= callback.on_evaluation(moment) or {}
        self.optimizer.zero_grad(set_to_none=True)
        self.prepared.train()
        at.evaluated = {name: float(value) for name, value in values.items()}
        self.record("eval", at.evaluated)
        self.progress.evaluation(at.step, at.evaluated)
        if settings.watch is None:
            return False
        if settings.watch not in values:
            raise ValueError(f"watch={settings.watch!r} is not among the evaluation's values: {', '.join(values)}")
        value = at.evaluated[settings.watch]
        better = at.best_value is None or (value > at.best_value if settings.maximise else value < at.best_value)
        if better and math.isfinite(value):
            at.best_step, at.best_value, at.stale = at.step, value, 0
            return True
        at.stale += 1
        at.stopped = settings.patience is not None and at.stale >= settings.patience
        return False

    @torch.no_grad()
    def means(self, evaluation: Evaluation) -> list[float]:
        """The weighted loss and each term, averaged over the evaluation's batches on all ranks."""
        accelerator = self.accelerator
        sums = torch.zeros(2, len(self.names) - 1, device=accelerator.device, dtype=torch.float32)
        for index in range(evaluation.batches):
            batch = evaluation.source.batch(index)
            [part] = parts_of(batch, rank=accelerator.process_index, world=accelerator.num_processes)
            sums += self.prepared(to_device(part, accelerator.device), self.at.step)
        totals, counts = accelerator.reduce(sums, "sum")
        means = totals / _at_least_one(counts)
        return torch.cat([(self.weights_at(self.at.step) * means).sum()[None], means]).tolist()

    def record(self, kind: str, values: Mapping[str, float]) -> None:
        """A line of metrics.jsonl, and the same to the trackers."""
        if self.accelerator.is_main_process:
            self.folder.record(step=self.at.step, kind=kind, seconds=self.seconds(), values=values)
        if self.accelerator.trackers:
            named = {name if "/" in name else f"{kind}/{name}": value for name, value in values.items()}
            self.accelerator.log(named, step=self.at.step)

    def check(self) -> None:
        """Raise if a term or the gradient was not finite in some update since the last look."""
        first = self.accelerator.gather(self.first_bad[None]).amin(0).tolist()
        step = min(first)
        if step < 2**31:
            # The weighted sum is bad wherever a term is: the term is what the user can change.
            what = [*self.names[1:], "the gradient", "loss"]
            bad = [*first[1:], first[0]]
            term = what[bad.index(step)]
            kept = list_checkpoints(self.folder.path)
            raise DivergedError(step, term, kept[-1] if kept else None)

    def checkpoint(self) -> None:
        """Save everything that a resumed run needs."""
        self.check()
        accelerator, at = self.accelerator, self.at
        model, optimizer = full_state(self.prepared, self.optimizer.optimizer, sharded=self.sharded)
        generators = _gather([random_state()], accelerator)
        at.window = self.window_sums()
        if accelerator.is_main_process:
            standing = dataclasses.asdict(at) | {"seconds": self.seconds()}
            standing["evaluated"] = {k: v if math.isfinite(v) else None for k, v in at.evaluated.items()}
            with self.folder.explain(f"save the checkpoint of step {at.step}"):
                write_checkpoint(
                    self.folder.checkpoints,
                    step=at.step,
                    model=model,
                    optimizer=optimizer,
                    state={
                        "progress": standing,
                        "metrics_bytes": self.folder.sync_metrics(),
                        "random": generators,
                        "callbacks": [callback.state() for callback in self.callbacks],
                    },
                )
                prune(self.folder.path, keep=self.settings.keep)
        accelerator.wait_for_everyone()

    def restore(self) -> None:
        """Go back to the newest good checkpoint, if there is one."""
        accelerator = self.accelerator
        found = newest_good(self.folder.path)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            for path in list_checkpoints(self.folder.path):
                if found is None or path.name > found.path.name:
                    discard(path)
            say(
                f"resuming from {found.path}" if found else f"no checkpoint in {self.folder.path}; starting from step 0"
            )
        if found is None:
            return
        load_state(self.prepared, self.optimizer.optimizer, found.model, found.optimizer, sharded=self.sharded)
        rank, generators = accelerator.process_index, found.state["random"]
        if rank < len(generators):
            set_random_state(generators[rank])
        else:
            seed_everything(self.settings.seed + rank + found.step)
        standing = found.state["progress"]
        standing["evaluated"] = {k: math.nan if v is None else v for k, v in standing["evaluated"].items()}
        self.at = _Standing(**standing)
        self.metrics_bytes = found.state["metrics_bytes"]
        if accelerator.is_main_process:
            self.window.copy_(torch.tensor(self.at.window))
        for callback, state in zip(self.callbacks, found.state["callbacks"], strict=True):
            callback.load_state(state)

    def window_sums(self) -> list[float]:
        """The window's sums over ranks; the gradient's norm is the same on all."""
        sums = self.accelerator.reduce(self.window.clone(), "sum")
        sums[-1] = self.window[-1]
        return sums.tolist()

    def agree(self, flag: bool, *, now: bool) -> bool:
        """Whether any rank was interrupted; several ranks ask each other only when a line is written anyway."""
        if self.accelerator.num_processes == 1:
            return flag
        if not now:
            return False
        return bool(self.accelerator.reduce(torch.tensor(float(flag), device=self.accelerator.device), "sum"))

    def seconds(self) -> float:
        """Time spent on this run so far, the time before it was resumed included."""
        return self.at.seconds + time.perf_counter() - self.began

    def synchronise(self) -> None:
        """Wait for the device, so that times are true."""
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()

    def outcome(self, timing: dict[str, float]) -> Outcome:
        """How the run stands now."""
        at = self.at
        metrics = {name: value for name, value in at.evaluated.items() if math.isfinite(value)}
        return Outcome(at.step, metrics, at.best_step, at.best_value, at.stopped, timing, self.folder.path)


def _accelerator(settings: Settings, run_dir: Path, track: str | None) -> Any:
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
    except ImportError as error:
        raise ImportError('training needs accelerate: pip install "attnlab[train]"') from error
    precision = settings.precision
    if precision == "auto":
        gpu = settings.device != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "bf16" if gpu else "no")
    if precision not in ("bf16", "no"):
        raise ValueError(f"precision must be bf16 or no, got {precision} (from accelerate's configuration)")
    # Accelerate keeps one precision per process and refuses a second run with another.
    AcceleratorState._reset_state()
    return Accelerator(
        mixed_precision=precision,
        # Told so, Accelerate also joins the processes of a machine without any accelerator (gloo).
        cpu=settings.device == "cpu" or not torch.accelerator.is_available(),
        log_with=track,
        project_dir=str(run_dir) if track else None,
    )


def _finished(model: nn.Module, folder: RunFolder) -> Outcome:
    result = folder.result
    assert result is not None
    say(f"{folder.path} is finished (step {result['step']}); nothing to do")
    load_model(model, folder.path)
    known = {f.name for f in dataclasses.fields(Outcome)}
    return Outcome(run_dir=folder.path, **{k: v for k, v in result.items() if k in known})


def _interruption(loop: _Loop) -> Interrupted:
    path = loop.folder.path
    if loop.accelerator.is_main_process:
        say(f"interrupted at step {loop.at.step}; a checkpoint is saved; go on with --resume {path} (resume=True)")
    return Interrupted(f"interrupted at step {loop.at.step}; resume {path}")


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C (or SIGTERM) into an event; a second one interrupts at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: Any) -> None:
        event.set()
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, note)
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _at_least_one(counts: Tensor) -> Tensor:
    """A term that found nothing to average over is 0 / 1."""
    return counts.where(counts > 0, torch.ones_like(counts))


def _gather(items: list[Any], accelerator: Any) -> list[Any]:
    if accelerator.num_processes == 1:
        return items
    from accelerate.utils import gather_object

    return gather_object(items)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted names and plain values, as trackers take them."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, int | float | str) else str(value)
    return flat
