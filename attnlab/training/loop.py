"""The training loop: any module, any source of batches, any loss terms, through Accelerate."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from attnlab.training.callbacks import Callback, Moment
from attnlab.training.checkpoints import newest_good, sweep
from attnlab.training.engine import Engine, Evaluation
from attnlab.training.feed import Prefetcher, Source
from attnlab.training.launch import flat_settings, interrupts, make_accelerator, watch_others
from attnlab.training.progress import ProgressLine
from attnlab.training.run_state import check_model
from attnlab.training.runs import RunError, RunFolder, say
from attnlab.training.settings import Settings
from attnlab.training.state import seed_everything
from attnlab.training.terms import Batch, Term

__all__ = ["Interrupted", "Outcome", "train"]


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


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or a termination signal, after a checkpoint of ``step`` was saved in ``run_dir``."""

    def __init__(self, step: int, run_dir: Path) -> None:
        self.step, self.run_dir = step, run_dir
        super().__init__(f"interrupted at step {step}; a checkpoint is saved; resume {run_dir} to go on")


def train(
    model: nn.Module,
    source: Source,
    *,
    terms: Sequence[Term],
    settings: Settings,
    run_dir: Path | str | RunFolder,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    evaluations: Mapping[str, Evaluation] | None = None,
    callbacks: Sequence[Callback] = (),
    forward: Callable[[nn.Module, Batch], Any] | None = None,
    resume: bool = False,
    track: str | None = None,
) -> Outcome:
    """Train ``model`` in place on ``source`` and leave a run folder behind.

    The loss is the sum over terms of weight(step) * total / count, with counts taken over the whole global batch. The
    model is called with the entries of the batch that its ``forward`` names (not labels), or through ``forward(model,
    batch)``. ``resume=True`` goes on from the newest good checkpoint, or from the start if there is none; a finished
    run is not run again. ``data`` identifies what the source reads, such as checksums: a resumed run with other data is
    refused. ``track`` names an Accelerate tracker, such as tensorboard.
    """
    folder = run_dir if isinstance(run_dir, RunFolder) else RunFolder(run_dir)
    run_dir = folder.path
    accelerator = make_accelerator(settings, run_dir=run_dir, track=track)
    main = accelerator.is_main_process
    name = name or run_dir.name
    with folder.hold() if main else nullcontext():
        if main:
            folder.describe(
                name=name,
                seed=settings.seed,
                config={**(config or {}), "training": settings.as_dict()},
                data=data,
                processes=accelerator.num_processes,
                resume=resume,
            )
            sweep(run_dir)
        accelerator.wait_for_everyone()
        finished = _finished(model, folder, main=main)
        if finished is not None:
            return finished
        seed_everything(settings.seed + accelerator.process_index)

        engine = Engine(accelerator, model, terms, settings, folder, forward, callbacks, dict(evaluations or {}))
        if resume:
            engine.restore()
        if main:
            folder.start_metrics(engine.metrics)
        if track:
            accelerator.init_trackers(name, config=flat_settings(settings.as_dict()))
        with watch_others(accelerator, settings.timeout, lambda: engine.state.step):
            timing = _run(engine, source)
        return _finish(engine, timing, name)


def _run(engine: Engine, source: Source) -> dict[str, float]:
    """Make the updates that are left, with what is due between them; returns how the time was spent."""
    accelerator, settings, state = engine.accelerator, engine.settings, engine.state
    steps = range(state.step, state.step if state.stopped else settings.steps)
    engine.progress = ProgressLine(
        settings.steps, start=state.step, quiet=not accelerator.is_main_process, tokens=settings.tokens
    )
    batches = Prefetcher(
        source,
        steps,
        device=accelerator.device,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        accumulate=settings.accumulate,
        ahead=settings.prefetch,
    )
    started = time.perf_counter()
    try:
        with batches, interrupts() as interrupted:
            if state.step == 0 and 0 in settings.evaluate_at and not state.evaluated and engine.evaluate():
                engine.checkpoint()
            for parts in batches:
                engine.update(parts)
                state.step += 1
                for callback in engine.callbacks:
                    callback.on_step(Moment(state.step, engine.model, engine.folder.path, {}))
                _between_updates(engine, interrupted.is_set())
                if state.stopped:
                    break
    finally:
        engine.progress.close()
    engine.synchronise()
    elapsed, done = time.perf_counter() - started, state.step - steps.start
    return {
        "seconds": round(engine.seconds(), 3),
        "steps_per_second": done / elapsed if done else 0.0,
        "waiting_share": batches.waited / elapsed if done else 0.0,
    }


def _between_updates(engine: Engine, interrupted: bool) -> None:
    """Log, evaluate and save where that is due after this step; raise ``Interrupted`` if the run was interrupted."""
    settings, state = engine.settings, engine.state
    last = state.step == settings.steps
    logging = last or state.step % settings.log_every == 0
    if logging:
        engine.log()
    engine.flush(wait=False)
    improved = state.step in settings.evaluate_at and engine.evaluate()
    # Ranks exchange this only when a line is written, since an exchange makes them wait for each other.
    interrupted, overdue = engine.agree(interrupted, engine.overdue(), exchange=logging)
    due = overdue or (settings.checkpoint_every and state.step % settings.checkpoint_every == 0)
    if due or improved or interrupted or state.stopped or last:
        engine.checkpoint()
    engine.progress.step(state.step)
    if interrupted:
        raise Interrupted(state.step, engine.folder.path)


def _finish(engine: Engine, timing: dict[str, float], name: str) -> Outcome:
    """Write result.json; returns how the run ended."""
    accelerator, folder, state = engine.accelerator, engine.folder, engine.state
    for tracker in accelerator.trackers:
        tracker.finish()
    metrics = {key: value for key, value in state.evaluated.items() if math.isfinite(value)}
    outcome = Outcome(state.step, metrics, state.best_step, state.best_value, state.stopped, timing, folder.path)
    if accelerator.is_main_process:
        folder.finish({"name": name, **{k: v for k, v in vars(outcome).items() if k != "run_dir"}})
    accelerator.wait_for_everyone()
    return outcome


def _finished(model: nn.Module, folder: RunFolder, *, main: bool) -> Outcome | None:
    """The outcome of a finished run, with its weights in ``model``; None where there is something left to do."""
    result = folder.result
    if result is None:
        return None
    known = {f.name for f in dataclasses.fields(Outcome)}
    try:
        outcome = Outcome(run_dir=folder.path, **{k: v for k, v in result.items() if k in known})
    except TypeError:
        say(f"{folder.path / 'result.json'} is damaged and is written again")
        return None
    saved = newest_good(folder.path, check=lambda saved: check_model(saved, model.state_dict()))
    if saved is None:
        raise RunError(f"{folder.path} is finished, but it has no readable checkpoint to take its weights from")
    if saved.step != outcome.step:
        say(f"{folder.path} is finished, but its last checkpoint cannot be read; the steps after it are trained again")
        return None
    say(f"{folder.path} is finished (step {outcome.step}); nothing to do")
    model.load_state_dict(saved.model)
    if main and saved.metrics is not None:
        folder.start_metrics(saved.metrics)
    return outcome
